"""Build the roles of an on-policy method: the weights each starts from, shared bases, and engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import device, print_main, world_size
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.engine import HybridEngine, ZeroConfig
from hybrid_rlhf.engine.train.zero_config import lowest_stage
from hybrid_rlhf.models import load
from hybrid_rlhf.models.backbone import check_head, joining, text_backbone
from hybrid_rlhf.models.dropout import without_dropout
from hybrid_rlhf.models.heads import BackboneWithHead, head_of, zero_head
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import Adapters, add_lora, base_of, is_adapter, load_adapter
from hybrid_rlhf.models.weights import identity, read_tensor
from hybrid_rlhf.rewards.judge.judge_config import BASE, JudgeConfig
from hybrid_rlhf.rewards.judge.local_backend import LocalBackend
from hybrid_rlhf.rewards.mixture import Scale
from hybrid_rlhf.roles import Actor, Critic, Reference, Reward, Roles, Teacher
from hybrid_rlhf.roles.sharing import ROLES, TRAINED, Layout, RolesConfig, Start, resolve
from hybrid_rlhf.roles.spans import OwnTokens
from hybrid_rlhf.roles.teacher import head_tensors
from hybrid_rlhf.run import runfile
from hybrid_rlhf.training import builders
from hybrid_rlhf.training.stage_config import OnPolicyConfig

JUDGE = "judge"  # its adapter on the actor's base
POLICIES = ("actor", "ref", "teacher")  # the roles that are language models


@dataclass(frozen=True)
class Sources:
    """Where the roles' weights come from: run folders or models; None for a role that the run does not have.
    reads_text: whether the reward model has another tokenizer or template than the actor, and reads text;
    has_own_tokens: whether the teacher has other tokens than the actor."""

    actor: str
    reward: str | None
    ref: str | None
    critic: str | None
    reads_text: bool = False
    teacher: str | None = None
    has_own_tokens: bool = False


def find_starts(sources: Sources, model: ModelConfig, roles: RolesConfig) -> dict[str, Start]:
    """The start of each role of the run. A reward model or a teacher that was trained as an adapter on the actor's base
    is loaded as that adapter."""
    folders = {role: builders.model_folder(path) for role in ROLES if (path := getattr(sources, role)) is not None}
    adapter, reason = _adapter_on(sources.reward, folders["actor"]) if model.lora.r and sources.reward else (None, "")
    starts = {role: Start(folders[role]) for role in ("actor", "ref") if role in folders}
    for role in (r for r in ("critic", "reward") if r in folders):
        if getattr(sources, role) == sources.reward:
            starts[role] = Start(folders["actor"] if adapter else folders["reward"], adapter, folders["reward"],
                                 reason=reason)
        else:
            has_head = load.has_score(folders[role], model.trust_remote_code)
            starts[role] = Start(folders[role], head=folders[role] if has_head else None)
    if sources.teacher:
        teacher_adapter, _ = _adapter_on(sources.teacher, folders["actor"]) if model.lora.r else (None, "")
        starts["teacher"] = Start(folders["actor"] if teacher_adapter else folders["teacher"], teacher_adapter)
    return {role: replace(start, dtype=roles[role].dtype or model.dtype,
                          quantize=roles[role].quantize or model.quantize or "none") for role, start in starts.items()}


def _adapter_on(run: str, base: str) -> tuple[str | None, str]:
    """The adapter of a reward model's or a teacher's run if it was trained on the weights in `base`, else None and why
    not."""
    if not runfile.is_run(run):
        return None, "a reward model that is not a run"
    folder = Path(run) / "adapter"
    if not is_adapter(folder):
        return None, "its run trained all weights; train it with model.lora.r"
    if runfile.read_run(run).facts.get("base_weights") != identity(base):
        return None, "its run was made on another base; train it on the actor's own"
    return str(folder), ""


def judge_base(config: OnPolicyConfig, actor: str) -> str | None:
    """The folder of the actor's start, where reward.judge.model is computed on its weights: base, or an adapter on it.
    None for every other judge. UserError where these weights are trained, moved or cut into parts, and for an adapter
    of another base."""
    name, folder = config.reward.judge.model, builders.model_folder(actor)
    if name is None or (name != BASE and not is_adapter(name)):
        return None
    what = f"reward.judge.model {name} is computed on the policy's own weights"
    check(bool(config.model.lora.r), f"{what}, which must stay as they are; give model.lora.r (such as 16), or the "
                                     "folder of a model, which is then loaded")
    check(layout_of(config, "actor").zero_stage != 3, f"{what}, and ZeRO 3 cuts them into parts; choose another stage")
    check(not config.roles.actor.offload, f"{what}, which roles.actor.offload moves away; leave it out")
    judge, default = config.reward.judge, JudgeConfig()
    check((judge.dtype, judge.load_in_4bit) == (default.dtype, default.load_in_4bit),
          f"{what}, whose dtype and bits it has; leave out reward.judge.dtype and reward.judge.load_in_4bit")
    base = None if name == BASE else base_of(name)
    check(base is None or base == folder or identity(base) == identity(folder),
          f"reward.judge.model: the adapter {name} was made for {base}, and the policy starts from {folder}; give an "
          "adapter of that, or the merged model")
    return folder


def check_roles(config: OnPolicyConfig, sources: Sources) -> tuple[dict[str, Start], Layout]:
    """Starts and layout, checked. Raises UserError for roles that cannot be built; reads at most single tensors."""
    starts = find_starts(sources, config.model, config.roles)
    layout, line = resolve(config.roles, starts, bool(config.model.lora.r))
    for role in starts:
        settings = load_config_for(config, starts[role])
        builders.check_dtype(settings)
        builders.check_quantized_once(settings)
        if role == "actor" or (role == "critic" and layout.kind != "head"):
            load.check_lora(settings, f"roles.{role}.quantize {starts[role].quantize}")
        stage, dtype = layout_of(config, role).zero_stage, load.resolve_dtype(settings.dtype, device())
        check(role not in TRAINED or stage != 0 or config.model.lora.r
              or not lowest_stage(dtype, world_size(), config.train.optim),
              f"roles.{role}: zero_stage 0 with {dtype} weights, where DeepSpeed takes a wrong first step; choose 1")
    stages = {r: layout_of(config, r).zero_stage == 3 for r in TRAINED if r in starts}
    check(len(set(stages.values())) == 1 or layout.group("actor") != layout.group("critic"),
          "roles.actor.zero_stage and roles.critic.zero_stage: on one base both are 3 or neither is; set both alike")
    if line:
        print_main(line)
    return starts, layout


def load_config_for(config: OnPolicyConfig, start: Start) -> ModelConfig:
    """The model settings that a role's base is loaded with."""
    return replace(config.model, model_name_or_path=start.base, dtype=start.dtype, preset=None,
                   load_in_4bit=start.quantize == "4bit", load_in_8bit=start.quantize == "8bit")


def layout_of(config: OnPolicyConfig, role: str) -> ZeroConfig:
    """A role's engine settings: its own over those of section `engine`."""
    settings = config.roles[role]
    return replace(config.engine, micro_batch_tokens=settings.micro_batch_tokens or config.engine.micro_batch_tokens,
                   zero_stage=config.engine.zero_stage if settings.zero_stage is None else settings.zero_stage)


class Backbone:
    """One loaded model and the roles on it: adapters where there are any, and a head for each role that has one."""

    def __init__(self, group: tuple[str, ...], config: OnPolicyConfig, starts: dict[str, Start], layout: Layout,
                 tokenizer, judge: LocalBackend | None = None) -> None:  # noqa: ANN001
        self.starts, self.kind, self.lora = starts, layout.kind, config.model.lora
        trained = [r for r in group if r in TRAINED]
        self.is_frozen = not trained or bool(self.lora.r) or (trained == ["critic"] and layout.kind == "head")
        layouts = [layout_of(config, role) for role in trained or group]
        self.in_parts = any(each.cuts_weights if trained else each.zero_stage == 3 for each in layouts)
        settings = load_config_for(config, starts[group[0]])
        if not trained:
            settings = replace(settings, gradient_checkpointing=False)
        if self.is_frozen:
            settings = replace(settings, freeze=[])
        self.is_policy = group[0] in POLICIES
        new_head_std = 0.0 if group[0] == "critic" and starts["critic"].head is None else None
        self.model, self.new_ids = self._open(settings, tokenizer, new_head_std)
        self.heads = {role: self._head(role) for role in group if role in ("critic", "reward")}
        for role in group:
            self._adapt(role, config.seed)
        if judge and judge.adapter:
            load_adapter(self.model, judge.adapter, JUDGE)
        without_dropout(self.model)
        self.adapters = Adapters(self.model) if hasattr(self.model, "_peft_wrapper") else None
        if self.is_frozen:
            self.model.requires_grad_(False)
        if self.adapters:
            self.adapters.train_only(trained)

    def _open(self, settings: ModelConfig, tokenizer,  # noqa: ANN001
              new_head_std: float | None) -> tuple[nn.Module, list[int]]:
        parts = self.in_parts
        model = (load.load_causal_lm(settings, device(), in_parts=parts) if self.is_policy else
                 load.load_scalar_model(settings, device(), new_head_std, tokenizer.pad_token_id, in_parts=parts))
        new_ids = builders.prepare(model, settings, tokenizer)
        if self.is_policy:
            check_head(model)
        return model, new_ids

    def _head(self, role: str) -> nn.Module:
        """The scalar head of a role: the model's own where all of it is trained, else one in fp32 beside it. A critic's
        new head is zero: it predicts 0 before it is trained, whatever the scale of the hidden states."""
        start, is_trained = self.starts[role], role == "critic"
        if not self.is_frozen:
            return self.model.score
        if start.head and start.head == start.base and not self.is_policy:
            return head_of(self.model.score.weight.detach(), is_trained=is_trained).to(device())
        if start.head:
            return head_of(read_tensor(start.head, "score.weight"), is_trained=is_trained).to(device())
        return zero_head(self.model.config.get_text_config().hidden_size, is_trained=is_trained).to(device())

    def _adapt(self, role: str, seed: int) -> None:
        """Add a role's adapter: the one it starts from, or for a trained role a new one, which is zero at first."""
        start = self.starts[role]
        if role == "ref" or (role == "critic" and self.kind == "head"):
            return
        if start.adapter:
            load_adapter(self.model, start.adapter, role)
        elif role in TRAINED and self.lora.r:
            with torch.random.fork_rng(devices=[]):  # the same adapter whatever else was drawn before it
                torch.manual_seed(seed * 4 + ROLES.index(role))  # 4: as in earlier releases, to reproduce their runs
                add_lora(self.model, self.lora, role, self.new_ids)

    def turn(self, role: str) -> Callable:
        """The context in which a role computes on this base."""
        if self.adapters is None:
            return nullcontext
        reads = "reward" if role == "critic" and self.kind == "head" else role
        return partial(self.adapters.use, reads if reads in self.adapters.names else None)

    def parameters(self, role: str) -> dict[str, nn.Parameter] | None:
        """The parameters that a role trains; None for all trainable ones of the model."""
        if not self.is_frozen:
            return None
        adapter = {} if self.adapters is None else self.adapters.parameters(role)
        head = {"score.weight": self.heads[role].weight} if role in self.heads else {}
        return adapter | head

    def scalar(self, role: str) -> nn.Module:
        """The model of a role with a head."""
        if not self.is_frozen:
            return self.model
        return BackboneWithHead(text_backbone(self.model), self.heads[role], joining(self.model))


def _lay_out(engine: HybridEngine, role: str, group: tuple[str, ...], config: OnPolicyConfig,
             num_updates: Mapping[str, int], base: Backbone, takes_head: bool) -> None:
    """Make a role's optimizer, shard its weights or offload it, by its settings. takes_head: whether the actor's update
    reads the teacher's head."""
    if role in TRAINED:
        engine.prepare_training(builders.optimizer_of(config.train, config.roles[role].learning_rate),
                                builders.schedule_of(config.train, num_updates[role]), layout_of(config, role),
                                base.parameters(role))
    elif layout_of(config, role).zero_stage == 3 and not set(group) & set(TRAINED):
        engine.prepare_frozen(layout_of(config, role))
    if config.roles[role].offload:
        engine.offload_when_idle(keeps=head_tensors(base.model) if role == "teacher" and takes_head else ())


def build(config: OnPolicyConfig, starts: dict[str, Start], layout: Layout, tokenizer,  # noqa: ANN001
          num_updates: Mapping[str, int], scale: Scale | None, reward_tokenizer=None,  # noqa: ANN001
          takes_head: bool = True, is_mixed: bool = False,
          judge: LocalBackend | None = None, own_tokens: OwnTokens | None = None) -> tuple[Roles, Reward | None]:
    """The roles in their engines; actor and critic with an optimizer, dropout off everywhere.

    num_updates: of each trained role, over the run. scale: normalises scores, and the values of a critic with the
    reward model's head (None: neither). reward_tokenizer: the reward model's own, where it reads text. takes_head: as
    in on_policy.Method. is_mixed: whether the reward model's score is weighted, or one of several: a critic with its
    head, or another model's, is then rescaled by the first scores. judge: one that is to be computed on the actor's
    base, and is attached to it. own_tokens: the teacher's, where they are not the student's.
    """
    engines: dict[str, HybridEngine] = {}
    head = starts["reward"].head if "reward" in starts else None
    check("reward" not in starts or load.has_score(head, config.model.trust_remote_code),
          f"roles.reward: {head} has no scalar head; a reward model is needed (--stage reward)")
    is_copy = head is not None and "critic" in starts and starts["critic"].head == head and not is_mixed
    readers = {"reward": reward_tokenizer} if reward_tokenizer is not None else {}
    readers |= {"teacher": own_tokens.teacher} if own_tokens else {}
    is_rescaled = "critic" in starts and starts["critic"].head is not None and not is_copy
    for group in layout.bases:
        role_tokenizer = readers.get(group[0], tokenizer)
        with explained(f"while loading the model of {' and '.join(group)}"):
            base = Backbone(group, config, starts, layout, role_tokenizer, judge if "actor" in group else None)
        if judge and "actor" in group:
            judge.attach(base.model, base.turn(JUDGE))
        for role in group:
            if role in POLICIES:
                tp = (config.roles.actor.tp or 1) if role == "actor" else 1
                engine = builders.policy_engine(base.model, role_tokenizer, tp, base.turn(role))
            else:
                numbers = (scale.mean, scale.std) if role == "critic" and is_copy and scale else ()
                engine = builders.scalar_engine(base.scalar(role), role_tokenizer, *numbers, adapter=base.turn(role))
            with explained(f"while {'making the optimizer of' if role in TRAINED else 'placing'} the {role}"):
                _lay_out(engine, role, group, config, num_updates, base, takes_head)
            engines[role] = engine
    tokens = {role: layout_of(config, role).micro_batch_tokens for role in ROLES}
    return (Roles(Actor(engines["actor"], tokenizer, tokens["actor"]),
                  Reference(engines["ref"], tokens["ref"]) if "ref" in engines else None,
                  Critic(engines["critic"], tokens["critic"], starts["critic"].head is None, is_rescaled)
                  if "critic" in engines else None,
                  Teacher(engines["teacher"], tokens["teacher"], own_tokens=own_tokens)
                  if "teacher" in engines else None),
            Reward(engines["reward"], tokens["reward"]) if "reward" in engines else None)
