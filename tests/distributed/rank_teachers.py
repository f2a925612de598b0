"""A student on two processes that follows a teacher, its own and the teacher's logits in chunks; see rank_checks.py."""

from __future__ import annotations

import copy
from unittest.mock import patch

import torch
from torch import nn

from hybrid_rlhf.algorithms.divergence import Divergence, TeacherTargets
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.models.backbone import own_head
from hybrid_rlhf.roles import Actor, PolicyModule, policy_module
from hybrid_rlhf.roles.scoring import score
from tests.distributed.rank_rows import STEPS, moved, own_rows, rows_of, tokens_allowed
from tests.factories.tiny import tiny_causal_lm

RATE, TOP_K = 0.5, 20
KIND = Divergence("jsd", 0.3, 0.7)


def models() -> tuple[nn.Module, nn.Module]:
    return tiny_causal_lm(), tiny_causal_lm(7, initializer_range=0.2)


def plain_step(student: nn.Module, teacher: nn.Module, step: int, top_k: int) -> None:
    """By torch alone on the whole batch, one unpadded sequence at a time, from whole logits."""
    found = []
    for row in rows_of(step)[1]:
        place = slice(len(row) // 2 - 1, -1)
        with torch.no_grad():
            t = (teacher(torch.tensor([row])).logits[0, place] / KIND.temperature).softmax(-1)
        s = (student(torch.tensor([row])).logits[0, place] / KIND.temperature).softmax(-1)
        if top_k:
            ids = t.topk(top_k).indices
            s, t = (torch.cat([p.gather(-1, ids), p.scatter(-1, ids, 0).sum(-1, keepdim=True)], -1) for p in (s, t))
        m = KIND.beta * t + (1 - KIND.beta) * s
        found.append((KIND.beta * t * (t / m).log() + (1 - KIND.beta) * s * (s / m).log()).sum(-1))
    torch.cat(found).mean().backward()
    torch.optim.SGD(student.parameters(), lr=RATE).step()
    student.zero_grad()


@torch.no_grad()
def targets_of(teacher: HybridEngine, batch: SequenceBatch, top_k: int) -> TeacherTargets:
    """As a role does it: micro-batches, each row's of its own."""
    rows: list = [None] * len(batch)
    ids: list = [None] * len(batch)
    for index, found in score(teacher, batch, tokens_allowed(), lambda part: (
            teacher(part, temperature=KIND.temperature, top_k=top_k) if top_k else teacher.module.states(part).rows)):
        counts = batch.loss_mask[index][:, 1:].sum(1).tolist()
        both = (found.top_logprobs, found.top_ids) if top_k else (found, found)
        for i, row, words in zip(index.tolist(), *(x.split(counts) for x in both), strict=True):
            rows[i], ids[i] = row, words
    if not rows:
        rows, ids = [torch.zeros(0, max(1, top_k))], [torch.zeros(0, max(1, top_k), dtype=torch.long)]
    return TeacherTargets(KIND, rows, ids) if top_k else TeacherTargets(KIND, rows, head=own_head(teacher.module.model))


def case(stage: int, teacher_stage: int) -> dict:
    top_k = TOP_K if teacher_stage == 3 else 0
    (model, teacher), (twin, plain_teacher) = models(), models()
    before = copy.deepcopy(twin.state_dict())
    engine = HybridEngine(PolicyModule(model), model, eos_ids=[3])
    engine.prepare_training(OptimizerConfig(learning_rate=RATE, max_grad_norm=1e9, optim="sgd"), lambda step: 1.0,
                            ZeroConfig(stage))
    teachers = HybridEngine(PolicyModule(teacher), name="teacher")
    if teacher_stage == 3:
        teachers.prepare_frozen(ZeroConfig(3))
    actor = Actor(engine, None, tokens_allowed())
    for step in range(STEPS):
        batch = rows_of(step)[0].rows(own_rows(step))
        actor.fit_tokens(batch, lambda tokens, count: (tokens.divergence.sum() / count, {}),
                         targets_of(teachers, batch, top_k))
        plain_step(twin, plain_teacher, step, top_k)
    with gathered(engine.module):
        ours = moved(model.state_dict(), before)
    theirs = moved(twin.state_dict(), before)
    return {"weights": float((ours - theirs).norm() / theirs.norm()), "moved": float(theirs.norm())}


def check_teachers() -> dict:
    with patch.object(policy_module, "chunk_rows", lambda *_: 5):
        return {f"student zero {student}, teacher zero {teacher}": case(student, teacher)
                for student, teacher in ((0, 0), (2, 0), (3, 0), (3, 3))}
