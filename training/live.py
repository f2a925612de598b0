"""A model that learns while it is talked to: each mark on an answer trains its adapter at once.

A mark is a row: one answer preferred to another, a thumb on an answer, or the text that the user would have answered. A
few optimizer steps fit it together with earlier marks, while a KL term on neutral texts holds the model to its start
(the adapter off). A checkpoint after each mark has adapter, optimizer and rows, so that a mark can be taken back with
the same bits, and a killed process loses at most the mark that it was learning.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.divergence import Divergence, TeacherTargets
from hybrid_rlhf.algorithms.kl import UpdateRate
from hybrid_rlhf.algorithms.preference import LOSSES, dpo, kto
from hybrid_rlhf.core.chat_runs import STAGE
from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import print_main
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.core.own_files import refusal, write_file
from hybrid_rlhf.core.strict_json import plain, to_json
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.chat import SkipRow
from hybrid_rlhf.data.collate import collate_sft
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.messages import clean
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.train.accumulate import Rows, accumulate
from hybrid_rlhf.export.folder import export
from hybrid_rlhf.inference.teaching import Mark
from hybrid_rlhf.models.backbone import own_head
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import Adapters, LoraConfig
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.models.weights import identity
from hybrid_rlhf.report import summary
from hybrid_rlhf.roles import Actor, Teacher
from hybrid_rlhf.roles.role_state import load_training_state, scale_schedule, training_state
from hybrid_rlhf.roles.scoring import prefix_groups, summed
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.run import checkpoint, resume, runfile
from hybrid_rlhf.run.train_config import TrainConfig
from hybrid_rlhf.training import builders, defaults, fixed_prompts, preferences, step1_sft, supervised
from hybrid_rlhf.training.fixed_prompts import MAX_NEW_TOKENS

DIVERGENCE = Divergence("reverse_kl")
MARKS, SAVED = "marks", "saved_step"  # the folder of the rows; a fact of the record
FILES = {"pair": "pairs.jsonl", "thumb": "thumbs.jsonl", "text": "texts.jsonl"}
RANK = 4  # a snapshot of adapter and optimizer takes 12 bytes a weight
KEPT = 32  # marks that can be taken back
MAX_STEPS, ENOUGH = 4, 0.9  # optimizer steps of a mark; p(preferred) after which there are no more
REPLAYED, LOOKED_AT = 1, 2  # earlier marks in a step; and looked at after them
NEUTRAL, KL_WEIGHT = 2, 20.0  # neutral texts of a mark, in every second step: they take as long as the mark itself
MEASURED = 4  # of them, by whose KL the next mark's rate follows
UPDATE_KL = 0.01  # nats a token that a mark may move the neutral texts, as ppo.update_kl bounds a rollout's updates
NEUTRAL_TOKENS, MAX_TOKENS = 32, 4096  # of a neutral text; of a micro-batch
NUM_ANSWERED = 4  # marked prompts that the report answers before and after
# Ordinary text, and what people ask: what the model says of these should not change.
TEXTS = (
    "The harbour was quiet when the ferry came in. A few people stood on the pier with their coats closed, and a dog "
    "ran along the edge of the water, barking at the gulls.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. It takes place in the chloroplasts of "
    "plant cells, which hold the green pigment chlorophyll.",
    "In 1869 the two lines met in Utah, and for the first time a traveller could cross the continent by train in about "
    "a week, where it had taken months by wagon.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)",
    "Preheat the oven to 200 degrees. Mix the flour, sugar and butter until the dough is smooth, roll it out, and cut "
    "it into squares. Bake for twelve minutes and let them cool.",
    "The committee met on Tuesday to discuss the budget. After two hours it agreed to repair the bridge this year and "
    "to put off the new library until the spring.",
    "A prime number has exactly two divisors, one and itself. To see whether 91 is prime, try the small primes in "
    "turn: it is 7 times 13, so it is not.",
    "She looked out of the window and said that she did not know why he had come. He put his hat on the table and "
    "answered that he had come because she had asked him to.",
)


class Change(NamedTuple):
    """What a mark changed. before, after: p(preferred), or of a thumb p(answer), the mean probability of its tokens;
    kl: nats a token from the start, on four neutral texts; num_held of num_looked of num_others other marks hold;
    steps: optimizer steps; is_bounded: the KL ended them (it is seen in a step, which is then the last)."""

    kind: str
    before: float
    after: float
    kl: float
    num_held: int
    num_looked: int
    num_others: int
    steps: int
    seconds: float
    is_bounded: bool

    def line(self) -> str:
        """The change as a line for the user."""
        what = "p(answer)" if self.kind == "thumb" else "p(preferred)"
        others = ""
        if self.num_others:
            which = "mark" if self.num_others == 1 else f"{self.num_others} marks"
            among = f"{self.num_looked}" if self.num_looked == self.num_others else f"{self.num_looked} looked at"
            others = f"; your other {which} still hold{'s' if self.num_others == 1 else ''}: {self.num_held} of {among}"
        bound = "; stopped at the bound of the KL" if self.is_bounded else ""
        return (f"{what} {_share(self.before)} -> {_share(self.after)}; KL {self.kl:.3f}{others}; "
                f"{self.steps} step{'s' * (self.steps > 1)}, {self.seconds:.1f} s{bound}")


def _share(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if value < 0.995 else "1.0"


class _Encoded(NamedTuple):
    """A mark, or a neutral text, as tokens. rows: {input_ids, loss_mask}, the preferred answer first. start: (rows,)
    log-probabilities by the start, and targets its hidden states; lengths (rows,): tokens of the answers."""

    rows: list[dict]
    targets: list[Tensor]
    start: Tensor
    lengths: Tensor

    def first(self, count: int) -> _Encoded:
        """The first rows alone."""
        return _Encoded(*(column[:count] for column in self))


class LiveLearner:
    """A policy with an adapter that learns from marks, in the folder of a run. `engine` answers with it.

    Raises UserError for a folder that is not a learning chat's, of another base, or in use; for a model that cannot be
    trained; for a full disk, before or after which the state is that of the last mark.
    """

    def __init__(self, model: str, output: str, seed: int = 0, command: str = "") -> None:
        self.folder, self.base, folder = Path(output), model, builders.model_folder(model)
        self.saved = self.folder / resume.FOLDER
        self.config = settings_of(folder, output, seed)
        builders.check_model(self.config.model, self.config.engine, self.config.train.optim)
        builders.check_lengths(self.config.model, data__max_length=self.config.data.max_length)
        self.tokenizer = load_tokenizer(folder)
        check(bool(self.tokenizer.chat_template), f"{model} has no chat template; a model trained here (--stage sft) "
                                                  "saves one")
        self.record = _claimed(self.folder, self.config, folder, command)
        try:
            self._open()
            self._resume()
        except BaseException:
            runfile.release(self.folder)
            raise

    def _open(self) -> None:
        config = self.config
        builders.seed_everything(config.seed)
        causal = builders.open_policy(config.model, self.tokenizer, config.seed, dropout=False)
        adapters = Adapters(causal)
        adapters.train_only(adapters.names)
        self.engine: HybridEngine = builders.policy_engine(causal, self.tokenizer,
                                                           adapter=partial(adapters.use, adapters.names[0]))
        start = builders.policy_engine(causal, self.tokenizer, adapter=partial(adapters.use, None))
        supervised.prepare_training(self.engine, config, 1)
        self.actor, self.start = (Actor(engine, self.tokenizer, MAX_TOKENS) for engine in (self.engine, start))
        self.teacher, self.head = Teacher(start, MAX_TOKENS), own_head(causal)
        self.rate = UpdateRate(UPDATE_KL)
        scale_schedule(self.actor, lambda: self.rate.value)
        self.neutral = self._neutral_texts()
        start.name = "start"
        self.marks: list[Mark] = []
        self.history: list[dict] = []
        self._encoded: list[_Encoded] = []  # of the first marks; those of a checkpoint follow at the next mark

    def _neutral_texts(self) -> list[_Encoded]:
        rows = [self.tokenizer(text, add_special_tokens=False)["input_ids"][:NEUTRAL_TOKENS] for text in TEXTS]
        read = self._read([{"input_ids": ids, "loss_mask": [True] * len(ids)} for ids in rows])
        return [_Encoded(*(column[i : i + 1] for column in read)) for i in range(len(rows))]

    def _read(self, rows: list[dict]) -> _Encoded:
        """Rows as the start reads them."""
        batch = collate_sft(rows, self.tokenizer.pad_token_id)
        lengths = batch.loss_mask[:, 1:].sum(1)
        check(bool((lengths > 0).all()), "this answer has no token to learn; give another text")
        targets, logprobs = self.teacher.read(batch, DIVERGENCE)
        return _Encoded(rows, targets.rows, torch.stack([each.sum() for each in logprobs]), lengths)

    def _batch(self, parts: Sequence[_Encoded]) -> tuple[SequenceBatch, TeacherTargets]:
        """The rows of several, and what the start makes of them."""
        batch = collate_sft([row for each in parts for row in each.rows], self.tokenizer.pad_token_id)
        return batch, TeacherTargets(DIVERGENCE, [rows for each in parts for rows in each.targets], head=self.head)

    # -- marks -------------------------------------------------------------------------------------------------------

    def learn(self, mark: Mark) -> Change:
        """Train on a mark and keep it. UserError for one without text, without difference, or too long; the state is
        then as before, as after any failure."""
        began = time.monotonic()
        prompt = [message | {"content": clean(message["content"])} for message in mark.prompt]
        mark = replace(mark, prompt=prompt, answer=clean(mark.answer), other=clean(mark.other))
        self._encode_rest()
        self._encoded.append(self._encode(mark))
        self.marks.append(mark)
        try:
            with self.engine.active():  # once for all passes: entering it goes through all modules
                before, steps, is_bounded = self._fit()
                change = self._measured(before, steps, is_bounded, began)
            self.rate.update(max(0.0, change.kl - self.kl))
            self.history.append({"step": len(self.marks)} | change._asdict())
            self._save()
        except BaseException as error:
            checkpoint.clear(self.saved, after=len(self.marks) - 1)
            self._restore(checkpoint.at(self.saved, len(self.marks) - 1))
            with suppress(OSError):  # else the next mark writes them
                self._write_rows()
            if refused := refusal(error):
                raise UserError(f"{self.folder}: {refused}; the mark was not learnt") from error
            raise
        return change

    def undo(self) -> Mark:
        """Take the last mark back: weights, optimizer and rows are those from before it, bit for bit."""
        check(bool(self.marks), "there is no mark to take back")
        path = checkpoint.at(self.saved, len(self.marks) - 1)
        check(path.is_dir(), f"the last {KEPT} marks can be taken back; choose another --learn folder to start anew")
        wrong = checkpoint.damage(path)
        check(wrong is None, f"the mark cannot be taken back: {path} is damaged ({wrong}); "
                             "choose another --learn folder to start anew")
        mark = self.marks[-1]
        checkpoint.clear(self.saved, after=len(self.marks) - 1)  # first: what is removed is taken back
        self._restore(path)
        self._note_change()
        return mark

    def _encode_rest(self) -> None:
        """Encode the marks of a checkpoint: not when it is loaded, as the chat sets its template's variables later."""
        self._encoded += [self._encode(mark) for mark in self.marks[len(self._encoded):]]

    def _encode(self, mark: Mark) -> _Encoded:
        """The tokens of a mark, as the stages make them of its row."""
        answers = [mark.answer] if mark.kind == "thumb" else [mark.answer, mark.other]
        check(all(answer.strip() for answer in answers), "an empty answer cannot be marked; give it a text")
        check(len(set(answers)) == len(answers), "the two answers are the same; give another text")
        try:
            encoded = [chat.encode(self.tokenizer, mark.prompt, [{"role": "assistant", "content": answer}])
                       for answer in answers]
        except SkipRow as error:
            raise UserError(f"this answer cannot be learnt: {error}; give another text") from error
        longest = max(len(each.ids) for each in encoded)
        most = self.config.data.max_length
        check(longest <= most, f"the conversation is {longest} tokens long, and marks are learnt on {most} at most; "
                               "start anew (/reset)")
        return self._read([{"input_ids": each.ids[:size], "loss_mask": each.loss_mask[:size]} for each, size in zip(
            encoded, map(self._size, encoded, (mark.is_cut, mark.is_other_cut)), strict=True)])

    def _size(self, row: chat.Encoded, is_cut: bool) -> int:
        """The tokens of a row; of an answer that was cut those before the end that the template gives it."""
        last = max((i for i, is_marked in enumerate(row.loss_mask) if is_marked), default=0)
        return last if is_cut and row.ids[last] in self.engine.eos_ids else len(row.ids)

    def _fit(self) -> tuple[float, int, bool]:
        """A few steps on the newest mark; returns its p before them, their number, and whether the KL ended them."""
        newest, before, first_kl = len(self.marks) - 1, 0.0, 0.0
        for step in range(MAX_STEPS):
            seen, kl = self._step([newest, *self._others(REPLAYED, step)], step)
            if step == 0:
                before, first_kl = self._probability(newest, seen), kl
            elif kl - first_kl > UPDATE_KL:
                return before, step + 1, True
            if self.marks[newest].kind == "pair" and self._probability(newest, seen) >= ENOUGH:
                return before, step + 1, False
        return before, MAX_STEPS, False

    def _others(self, count: int, step: int) -> list[int]:
        """At most `count` marks but the newest, drawn by the seed, the number of marks and the step."""
        seed = (self.config.seed * 1_000_003 + len(self.marks)) * 101 + step
        return torch.randperm(len(self.marks) - 1, generator=torch.Generator().manual_seed(seed))[:count].tolist()

    def _step(self, chosen: Sequence[int], step: int) -> tuple[Tensor, float]:
        """One optimizer step on the marks `chosen`, the newest first, and in every second step some neutral texts, the
        same for a mark; all in one pass where that is cheaper. Returns the log-probabilities of the newest mark's
        answers before it, and the KL of the texts (0 without them)."""
        marks, is_held = [self.marks[i] for i in chosen], step % 2 == 0
        sizes = [2 if mark.kind == "pair" else 1 for mark in marks]
        if step == 0 and marks[0].kind == "text":
            sizes[0] = 2  # the answer in its place is not trained, and only read for p before
        texts = [self.neutral[(len(self.marks) * NEUTRAL + i) % len(TEXTS)] for i in range(NEUTRAL * is_held)]
        parts = [self._encoded[i].first(size) for i, size in zip(chosen, sizes, strict=True)] + texts
        num_tokens, seen = sum(int(text.lengths) for text in texts), {}

        def loss_of(index: Tensor) -> tuple[Tensor, dict]:
            numbers = index.tolist()
            here = [parts[i] for i in numbers]
            rows, targets = (each.to(self.engine.device) for each in self._batch(here))
            scores = self.engine(rows, teacher=targets) if max(numbers) >= len(marks) else self.engine(rows)
            sums = summed(scores, rows).split([len(part.rows) for part in here])
            seen.update((i, each.detach().cpu()) for i, each in zip(numbers, sums, strict=True))
            losses = [_loss(marks[i], each, parts[i]) / len(marks)
                      for i, each in zip(numbers, sums, strict=True) if i < len(marks)]
            if scores.divergence is None:
                return torch.stack(losses).sum(), {}
            moved = scores.divergence.split([int(part.lengths.sum()) for part in here])
            kl = torch.cat([each for i, each in zip(numbers, moved, strict=True) if i >= len(marks)])
            losses.append(KL_WEIGHT * kl.sum() / num_tokens)
            return torch.stack(losses).sum(), {"kl": (kl.detach().mean(), len(kl))}

        shared = prefix_groups(self.engine, self._batch(parts)[0])  # if any, padding costs nothing: one pass
        metrics = accumulate(self.engine, MAX_TOKENS, Rows(
            torch.tensor([len(part.rows) * max(len(row["input_ids"]) for row in part.rows) for part in parts]), loss_of,
            None if shared is None else torch.zeros(len(parts))))
        return seen[0], metrics.compute().get("kl", 0.0)

    # -- measures ----------------------------------------------------------------------------------------------------

    def _measured(self, before: float, steps: int, is_bounded: bool, began: float) -> Change:
        newest = len(self.marks) - 1
        others = self._others(LOOKED_AT, MAX_STEPS)
        logprobs = self._logprobs([newest, *others])
        num_held = sum(self._holds(i, logprobs[i]) for i in others)
        return Change(self.marks[newest].kind, before, self._probability(newest, logprobs[newest]), self.kl_now(),
                      num_held, len(others), newest, steps, time.monotonic() - began, is_bounded)

    def _logprobs(self, which: Sequence[int]) -> dict[int, Tensor]:
        """The log-probabilities (answers,) of these marks under the current weights."""
        parts = [self._encoded[i] for i in which]
        values = self.actor.sequence_logprobs(self._batch(parts)[0])
        return dict(zip(which, values.split([len(part.rows) for part in parts]), strict=True))

    def _probability(self, i: int, logprobs: Tensor) -> float:
        """p(preferred): that of the preferred answer of the two, by the mean log-probability of their tokens, since a
        sum would compare their lengths. Of a thumb the mean probability of the answer's tokens (the geometric mean)."""
        means = logprobs / self._encoded[i].lengths
        return float(means[0].exp() if self.marks[i].kind == "thumb" else torch.sigmoid(means[0] - means[1]))

    def _holds(self, i: int, logprobs: Tensor) -> bool:
        """Whether the model has moved from its start as the mark asked."""
        ratios = logprobs - self._encoded[i].start
        if self.marks[i].kind == "thumb":
            return bool((ratios[0] > 0) == self.marks[i].is_good)
        return bool(ratios[0] > ratios[1])

    @torch.no_grad()
    def kl_now(self) -> float:
        """Nats per token of some neutral texts, always the same, between the model and its start."""
        scores = self.actor.score_tokens(*self._batch(self.neutral[:MEASURED]))
        return float(torch.cat([each.divergence for each in scores]).mean())

    @property
    def kl(self) -> float:
        """The KL after the last mark."""
        return self.history[-1]["kl"] if self.history else 0.0

    # -- files -------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """A checkpoint of the state, then the files that follow from it."""
        step = len(self.marks)
        run = {"stage": self.config.stage, "settings": plain(self.config), "world_size": 1, "step": step,
               "total_steps": step, "versions": self.record.versions, "data": None, "held_out": None}
        state = {"step": step, "trainer": {"policy": training_state(self.actor)}, "run": run, "rate": self.rate.state(),
                 "marks": [asdict(mark) for mark in self.marks], "history": self.history}
        checkpoint.save(self.saved, step, state, keep=KEPT + 1)
        self._note_change()

    def _note_change(self) -> None:
        """Write the files that follow from the checkpoint; the record no longer says that the run is finished."""
        self._write_rows()
        if self.record.status != "running":
            self.record.status, self.record.finished = "running", None
            self.record.write()

    def _write_rows(self) -> None:
        """The rows of all marks by kind, as the stages read them, and the metrics of the report."""
        rows: dict[str, list[dict]] = {kind: [] for kind in FILES}
        for mark in self.marks:
            for kind, row in mark.rows().items():
                rows[kind].append(row)
        (self.folder / MARKS).mkdir(exist_ok=True)
        for kind, name in FILES.items():
            path = self.folder / MARKS / name
            write_file(path, "".join(f"{to_json(row)}\n" for row in rows[kind]))
            path.chmod(0o600)  # conversations are private
        write_file(self.folder / summary.METRICS, "".join(f"{to_json(_metrics(row))}\n" for row in self.history))

    def _resume(self) -> None:
        """Take the newest complete checkpoint up, or write the first one."""
        path = checkpoint.latest(self.saved, lambda text: print_main(f"note: {text}"))
        if path is None:
            self._save()
            return
        self._restore(path)
        checkpoint.clear(self.saved, after=len(self.marks))
        self._write_rows()

    def _restore(self, path: Path) -> None:
        """The state of a checkpoint."""
        try:
            state = checkpoint.load(path)
            load_training_state(self.actor, state["trainer"]["policy"])
            self.rate.load_state(state["rate"])
            self.marks, self.history = [Mark(**mark) for mark in state["marks"]], state["history"]
        except (LookupError, ValueError, TypeError) as error:
            raise UserError(f"{path} cannot be taken up: {error}; choose another --learn folder") from error
        del self._encoded[len(self.marks):]  # a state that is taken up again has the first of the marks

    def save(self) -> Path:
        """Leave an ordinary run: merged model, adapter, model card, report; returns the model's folder. The report has
        answers to the first marked prompts, by the start and now."""
        check(bool(self.marks), "nothing is marked yet; give a mark to an answer, and save then")
        try:
            return self._saved()
        except Exception as error:
            if refused := refusal(error):
                raise UserError(f"{self.folder}: {refused}; the marks are kept in its checkpoints") from error
            raise

    def _saved(self) -> Path:
        folder, step = self.folder / builders.MODEL_FOLDER, len(self.marks)
        asked = [mark.prompt for mark in self.marks[:NUM_ANSWERED]]
        prompts = Prompts([chat.encode_prompt(self.tokenizer, prompt) for prompt in asked],
                          [prompt[-1]["content"] for prompt in asked])
        answers = [{"step": number} | answer for number, actor in ((0, self.start), (step, self.actor)) for answer in
                   fixed_prompts.of_policy(actor, prompts, SamplingConfig(max_new_tokens=MAX_NEW_TOKENS))()]
        write_file(self.folder / summary.ANSWERS, "".join(f"{to_json(row)}\n" for row in answers))
        with explained("while exporting"), self.engine.active():
            export(self.engine.model, self.tokenizer, folder, self.engine.eos_ids)
        figures = {name: value for name, value in _metrics(self.history[-1]).items() if name != "step"}
        self.record.describe(figures, self.tokenizer, **self._facts())
        self.record.close("finished")
        runfile.claim(self.folder, runfile.SETTINGS_FILE)  # the chat goes on
        summary.conclude(self.folder, STAGE, lambda text: print_main(f"warning: {text}"))
        return folder

    def _facts(self) -> dict:
        kinds = Counter(f"{mark.kind}s" for mark in self.marks)
        return ({"base_model": self.base, SAVED: len(self.marks), "data": dict(kinds)}
                | builders.adapted_weights(self.config.model))

    def close(self) -> None:
        """Release the folder. A run with changes since the last `save` is on record as stopped, at that model's step,
        and a line says so; one without a mark leaves nothing."""
        if not self.marks and SAVED not in self.record.facts:
            self._remove()
        elif self.record.status == "running":
            if SAVED in self.record.facts:
                self.record.facts |= {"model_step": self.record.facts[SAVED], "num_steps": len(self.marks)}
            self.record.close("stopped")
        if not self.record.is_finished and (self.marks or SAVED in self.record.facts):
            last = f"the run {self.record.left_early}" if SAVED in self.record.facts else (
                f"there is no model yet: {self.record.cure}")
            print_main(f"marks kept in {self.folder}: {len(self.marks)}; {last}")
        runfile.release(self.folder)

    def _remove(self) -> None:
        """Remove its files; what else is in the folder stays."""
        for name in (resume.FOLDER, MARKS):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in (runfile.RUN_FILE, runfile.SETTINGS_FILE, summary.METRICS):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


def settings_of(model: str, output: str, seed: int) -> preferences.Config:
    """The settings of a learning chat as those of a dpo run over its pairs: an adapter on `model` and a constant rate,
    twice that of demonstrations in the table, since a mark is four steps where a run has hundreds."""
    def config(kind: type, **train: float) -> preferences.Config:
        return defaults.resolve(kind(
            output_dir=output, seed=seed, resume="never",
            model=ModelConfig(model_name_or_path=model, lora=LoraConfig(r=RANK)),
            data=DataConfig(sources=[str(Path(output) / MARKS / FILES["pair"])]),
            train=TrainConfig(lr_scheduler_type="constant", warmup_ratio=0.0, **train)))

    return config(preferences.Config, learning_rate=2 * config(step1_sft.Config).train.learning_rate)


def _loss(mark: Mark, logprobs: Tensor, part: _Encoded) -> Tensor:
    """The loss of a mark from the log-probabilities (k,) of its answers: DPO of a pair, KTO of a thumb (its reference
    point is 0, as few marks give no estimate of one), and the cross-entropy of a text."""
    if mark.kind == "text":
        return -logprobs[0] / int(part.lengths[0])
    ratios = logprobs - part.start.to(logprobs.device)
    if mark.kind == "pair":
        return dpo(*ratios, beta=LOSSES["sigmoid"].beta)
    return kto(ratios, torch.tensor([mark.is_good], device=ratios.device), ratios.new_zeros(()),
               beta=LOSSES["kto"].beta, desirable_weight=1.0, undesirable_weight=1.0)[0]


def _claimed(folder: Path, config: preferences.Config, model: str, command: str) -> runfile.RunRecord:
    """The record of a learning chat in `folder`, new or taken up, with its lock."""
    record = runfile.run_at(folder)
    is_begun = record is not None and bool(checkpoint.steps(folder / resume.FOLDER))
    if record is None or (record.stage == STAGE and not is_begun):  # such as one that ended while it loaded its model
        record = runfile.start(folder, STAGE, config, command)
        record.facts |= builders.adapted_weights(config.model)
        record.write()
        return record
    check(record.stage == STAGE, f"--learn {folder} holds a {record.stage} run; choose another folder")
    runfile.claim(folder, runfile.SETTINGS_FILE)
    before = record.config["model"]["model_name_or_path"]
    if record.facts.get("base_weights", identity(model)) != identity(model):
        runfile.release(folder)
        raise UserError(f"--learn {folder} has learnt on {before}, and this model has other weights; give --model "
                        f"{before}, or another folder")
    record.command = command
    return record


def _metrics(row: dict) -> dict[str, float]:
    """A row of the history as metrics, a step for each mark."""
    shares = {"mark/held": row["num_held"] / row["num_looked"]} if row["num_looked"] else {}
    return {"step": row["step"], "mark/before": row["before"], "mark/after": row["after"], "mark/kl": row["kl"],
            "mark/updates": row["steps"], "time/step": row["seconds"]} | shares
