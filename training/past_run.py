"""Take the steps of a run again: compare them with its record, keep their rollouts, and go on from one of them with
other settings.

The weights move at every step, so the rollouts between two checkpoints are had by training again: from the seed, or
from a checkpoint. On a CPU a step has the same bits again. Nothing is written into the run's folder.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import groupby, zip_longest
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from hybrid_rlhf.core import own_files
from hybrid_rlhf.core.distributed import print_main
from hybrid_rlhf.core.errors import UserError, check
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.core.strict_json import plain, to_json
from hybrid_rlhf.report.metric_names import is_repeatable
from hybrid_rlhf.report.summary import ANSWERS, FORK, METRICS, SAMPLES, conclude, read_history
from hybrid_rlhf.rewards import RewardSource, part_scores, text_of
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.episode_record import Episode
from hybrid_rlhf.run import checkpoint, resume, runfile
from hybrid_rlhf.run.checkpointing import DoesNotFit
from hybrid_rlhf.run.loop import last_rollout
from hybrid_rlhf.run.reporter import Asked, watched_by
from hybrid_rlhf.training import on_policy
from hybrid_rlhf.training.stage_config import OnPolicyConfig

ROLLOUTS = "rollouts.jsonl"
_COMPARED = ("data", "device:", "decoding:")  # header lines of what a run depends on besides its settings
KEPT_BY_A_FORK = ("model.", "data.", "stage", "train.per_device_train_batch_size",
                  "train.gradient_accumulation_steps", "train.optim")  # its state would not fit others
Take = Callable[[int, list[dict]], bool]
Run = Callable[..., object]


class Done(BaseException):
    """A watcher has seen enough: leaves a run without a checkpoint, a model or a report."""


class Differs(NamedTuple):
    """The first value that is another one than on record."""

    step: int
    what: str
    before: object
    now: object


class Token(NamedTuple):
    """Where two rollouts differ first: response `row` of step `step` (from 0), token `place` of it (None: its prompt);
    the ids, None where a response has ended."""

    step: int
    row: int
    place: int | None
    here: int | None = None
    there: int | None = None


@dataclass(frozen=True)
class Past:
    """A run on record. config: its settings, with the runs that it started from named. forked: the step up to which it
    is another run's, 0 for most."""

    folder: Path
    record: runfile.RunRecord
    config: OnPolicyConfig
    forked: int = 0

    @cached_property
    def metrics(self) -> dict[tuple[str, int], dict]:
        """(event, step) -> its row of metrics.jsonl; the events are step_end and evaluate."""
        path = self.folder / METRICS
        return {("evaluate" if any(map(_is_held_out, row)) else "step_end", row["step"]): row
                for row in (read_history(path) if path.exists() else [])}

    @cached_property
    def samples(self) -> dict[int, list[dict]]:
        return dict(read_rollouts(self.folder / SAMPLES))

    @property
    def last(self) -> int:
        """The last step on record; 0 for none."""
        return max((step for event, step in self.metrics if event == "step_end"), default=0)

    def start(self, step: int | None) -> Path | None:
        """The newest complete checkpoint of at most `step` steps; None: the run's beginning. step None: the beginning,
        or the earliest checkpoint of a run that went on from another one."""
        paths = [path for path in self.checkpoints() if (step is None or checkpoint.number(path) <= step)
                 and checkpoint.damage(path) is None and resume.made_by(path)]
        check(paths or not self.forked,
              f"{self.folder} went on from step {self.forked} of another run, and has no checkpoint of that step; its "
              f"rollouts are in {self.folder / ROLLOUTS}")
        if step is None:
            return paths[0] if self.forked else None
        return paths[-1] if paths else None

    def changed_code(self) -> list[str]:
        """The files of rewards and tools that have changed since the run."""
        codes = runfile.code_of(plain(self.config))
        return [path for path, known in self.record.code.items() if codes.get(path, known) != known]

    def checkpoints(self) -> list[Path]:
        """The run's own checkpoints, oldest first, complete or not."""
        return [path for path in checkpoint.steps(self.folder / resume.FOLDER)
                if checkpoint.number(path) >= max(1, self.forked)]

    def changes(self) -> list[str]:
        """What has changed since the run, a line each: releases, files of rewards and tools, models."""
        now, then = runfile.versions(), self.record.versions
        lines = [f"{name} is {now[name]}; the run had {then[name]}" for name in now if then.get(name, now[name]) !=
                 now[name]]
        lines += [f"{path} has changed since the run" for path in self.changed_code()]
        for model in map(self.record.facts.get, ("base_model", "reward_model")):
            parent = runfile.run_at(model) if model else None
            if parent and (parent.finished or "") > self.record.started:
                lines.append(f"{model} was trained again after the run began")
        answers = [name for name, is_there in (
            ("tools and environments", bool(self.config.environment and self.config.environment.is_given)),
            ("a service", self.config.reward.url), ("a judge", self.config.reward.judge.is_given)) if is_there]
        return lines + [f"the run asks {' and '.join(answers)}: it is the same again only if the same is answered"
                        ] * bool(answers)


def open_past(folder: Path, config: OnPolicyConfig) -> Past:
    """The run in `folder`; UserError where it cannot be taken again. config: its settings, as they are on record."""
    record = runfile.read_run(folder)
    for path in record.code:
        check(Path(path).is_file(), f"replay: {path}, which {folder} was rewarded or answered by, is gone, and each "
                                    "step learns from it; put it back, or give --recorded to score the samples on "
                                    "record")
    made = [facts for path in checkpoint.steps(folder / resume.FOLDER) if checkpoint.damage(path, is_thorough=False)
            is None and (facts := resume.made_by(path))]
    num = made[-1]["world_size"] if made else 1
    check(num == 1, f"replay: {folder} was trained by {num} processes, and one gives other bits; --recorded scores the "
                    "samples on record")
    past = Past(folder, record, with_parents(replace(config, output_dir=str(folder)), record), forked_at(folder))
    check(past.last, f"replay: {folder} has no step on record ({METRICS}); choose a run that has taken one")
    return past


def with_parents(config: OnPolicyConfig, record: runfile.RunRecord) -> OnPolicyConfig:
    """The settings with the names of the runs that the run of `record` started from, or finds beside it."""
    model, roles, facts = config.model, config.roles, record.facts
    beside = replace(config, output_dir=record.output_dir)
    if not (roles.actor.model_name_or_path or model.model_name_or_path):
        model = replace(model, model_name_or_path=facts.get("base_model") or on_policy.find_actor(beside))
    is_needed = on_policy.prepared(config).method.needs_reward
    if config.reward.has_model(roles, config.environment, is_needed=is_needed) and not roles.reward.model_name_or_path:
        path = facts.get("reward_model") or on_policy.find_sources(beside).reward
        roles = replace(roles, reward=replace(roles.reward, model_name_or_path=path))
    return replace(config, model=model, roles=roles)


def forked_at(folder: Path, of: Path | None = None) -> int:
    """The step at which the run in `folder` went on from another one (from `of`, if given); 0 for one that did not."""
    facts = json.loads((folder / FORK).read_text(encoding="utf-8")) if (folder / FORK).exists() else None
    is_of = facts is not None and (of is None or Path(facts["of"]).resolve() == of.resolve())
    return int(facts["step"]) if facts is not None and is_of else 0


# -- Steps taken again -------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Follows a run, and leaves it after step `last` (None: never), or where `take`, which gets each step's rollout as
    rows, has enough.

    past: the run whose record the steps, and evaluations between them, are compared with. saves: whether the last step
    leaves a checkpoint. first: the first step taken, step: the last one. num_compared: values compared so far. differs:
    the first that is another one.
    """

    take: Take
    last: int | None = None
    past: Past | None = None
    saves: bool = False
    begin: Callable[[int], None] = lambda _step: None
    first: int = 0
    step: int = 0
    num_compared: int = 0
    differs: Differs | None = None
    _trainer: Any = None

    def __call__(self, event: str, facts: dict) -> Asked:
        step = facts["step"]
        if event == "begin":
            self._trainer, self.first = facts["trainer"], step + 1
            self.begin(step)
        if event in ("step_end", "evaluate") and self.past and not self.differs:
            self._compare(self.past, event, step, facts["values"])
        if event == "step_end":
            self.step = step
            if self.take(step, rows_of(step, last_rollout(self._trainer))) or (step == self.last and not self.saves):
                raise Done
        if event == "save" and step == self.last:
            raise Done
        return Asked(save=event == "step_end" and step == self.last)

    def _compare(self, past: Past, event: str, step: int, values: Mapping[str, float]) -> None:
        """Compare metrics and, of a logged step, samples with those on record."""
        before = past.metrics.get((event, step), {})
        now = {k: v for k, v in json.loads(to_json(values)).items() if _is_held_out(k) == (event == "evaluate")}
        if event == "evaluate" and not before:
            return  # it was told to evaluate at other steps then
        pairs = [(name, before.get(name), now.get(name)) for name in before | now if name != "step"
                 and is_repeatable(name)]
        if event == "step_end" and step in past.samples:
            rows = json.loads(to_json([{"step": step, **row} for row in self._trainer.samples()]))
            pairs += [(f"sample {i + 1}", *pair) for i, pair in enumerate(zip_longest(past.samples[step], rows))]
        self.differs = next((Differs(step, *pair) for pair in pairs if pair[1] != pair[2]), None)
        self.num_compared += len(pairs)


def _is_held_out(name: str) -> bool:
    return name.startswith("eval/")


def again(past: Past, run: Run, folder: Path, start: Path | None, watch: Watch) -> list[str]:
    """Take the run's steps from the checkpoint `start` on (None: from its first) in `folder`, which is new, until
    `watch` has enough; returns lines on data, device and kernels that the run's first lines named otherwise. run: that
    of the run's stage."""
    train = replace(past.config.train, save_steps=0, save_minutes=0.0, save_best=None, max_seconds=None)
    config = replace(past.config, output_dir=str(folder), resume="auto", report_to=[], train=train)
    if start is not None:
        seed_run(past.folder, past.record.stage, start, config)
    _until_done(run, config, watch)
    old, new = ([line for line in record.facts.get("header") or [] if line.startswith(_COMPARED)]
                for record in (past.record, runfile.read_run(folder)))
    return [f"the run said {a!r}, and now it is {b!r}" for a, b in zip(old, new, strict=False) if a != b]


def _until_done(run: Run, config: OnPolicyConfig, watch: Watch, command: str = "") -> None:
    try:
        with suppress(Done), watched_by(watch):
            run(config, command=command)
    finally:
        runfile.release(Path(config.output_dir))
        watch._trainer = None
        gc.collect()  # roles refer to each other


def seed_run(source: Path, stage: str, start: Path, config: OnPolicyConfig, changes: Mapping | None = None) -> None:
    """Make config.output_dir, which is new, an unfinished run that goes on from a copy of the checkpoint `start` of the
    run in `source`, with the settings `config`, and with what that had written until then. changes: further values of
    the checkpoint, as checkpoint.copy_changed has them."""
    settings, folder = plain(on_policy.prepared(config)), Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (METRICS, SAMPLES, ANSWERS):  # the reporter cuts them to the checkpoint's step
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    checkpoint.copy_changed(start, folder / resume.FOLDER, {("run", "settings"): settings, **(changes or {})})
    runfile.RunRecord(str(folder), stage, "stopped", config=settings, started=runfile.now(),  # last: it makes a run
                      versions=runfile.versions(), code=runfile.code_of(settings)).write()


# -- A run that goes on from a step with other settings ----------------------------------------------------------------


def changed_settings(past: Past, config: OnPolicyConfig) -> dict[str, list]:
    """Dotted name -> [the run's value, the new one] of the settings that a fork changes. UserError where there is none,
    or where the run's state does not fit."""
    old, new = (plain(on_policy.prepared(each)) for each in (past.config, config))
    names = resume.changes(old, new)
    fixed = [name for name in names if name.startswith(KEPT_BY_A_FORK)]
    check(not fixed, f"replay: a fork keeps {', '.join(fixed)}, for it goes on with the run's weights and place in the "
                     "data; start a new run instead")
    check(names, "replay: --fork and no setting that changes; add some, such as --ppo.kl_coef 0.1")
    return {name: [reduce(lambda each, key: each[key], name.split("."), settings) for settings in (old, new)]
            for name in names}


def fork(past: Past, run: Run, config: OnPolicyConfig, step: int, folder: Path, command: str) -> Watch | None:
    """Go on after `step` of the run with the settings `config` (its output_dir is the fork's), until the end. Where the
    run has no checkpoint of that step, the steps before are taken again, in `folder`, which is new. Keeps the rollouts.
    Called again it goes on where it was. Returns the watch of the steps before, None where there were none to take."""
    out, watch, config = Path(config.output_dir), None, with_parents(replace(config, resume="auto"), past.record)
    changed, is_begun = changed_settings(past, config), runfile.is_run(out)
    if not is_begun:
        source, start = past.folder, past.start(step)
        if start is None or checkpoint.number(start) < step:
            moved = past.changed_code()
            there = ", ".join(str(checkpoint.number(path)) for path in past.checkpoints()) or "it has none"
            check(not moved, f"replay: {', '.join(moved)} has changed since the run, which has no checkpoint of step "
                             f"{step}: the steps up to it would be others; put the file back, or fork at a step with a "
                             f"checkpoint ({there})")
            watch = Watch(lambda _step, _rows: False, step, past, saves=True)
            again(past, run, folder, start, watch)
            if watch.differs:
                print_main(f"warning: step {watch.differs.step} was not the same again ({watch.differs.what}): the "
                           "fork goes on from other weights than the run had")
            source, start = folder, checkpoint.at(folder / resume.FOLDER, step)
        # a checkpoint has the coefficient, which may adapt; everything else that it has is not a setting
        coef = changed.get("ppo.kl_coef")
        more = {("trainer", "kl_coef", "value"): coef[1]} if coef else {}
        out.mkdir(parents=True, exist_ok=True)
        (out / FORK).write_text(to_json({"of": str(past.folder), "step": step, "changed": changed}), encoding="utf-8")
        seed_run(source, past.record.stage, start, config, more)
    file = RolloutFile(out / ROLLOUTS)
    try:
        _until_done(run, config, Watch(file.take, begin=file.begin), command)
    except DoesNotFit as error:
        if is_begun:
            raise
        shutil.rmtree(out)  # no step was taken
        raise UserError(f"replay: {', '.join(changed)}: the run has no state of what this turns on, and a fork goes on "
                        "with the run's; start a new run instead") from error
    return watch


def first_difference(past: Past, run: Run, other: Path, folder: Path, start: Path | None = None
                     ) -> tuple[Token | None, int, Watch]:
    """The first token at which the run's rollouts, taken again in `folder`, differ from those in the file `other` of a
    run that went on from it (None where none does), the number of steps that were compared, which both have rollouts
    of, and the watch. start: a checkpoint of the step where that began, if there is one."""
    tokens: list[Token | None] = []
    theirs, begins = read_rollouts(other), forked_at(other.parent)
    ahead = next(theirs, None)

    def take(step: int, rows: list[dict]) -> bool:
        nonlocal ahead
        while ahead and ahead[0] < step:  # a step without rollouts, such as one on demonstrations, has no rows there
            ahead = next(theirs, None)
        if ahead and ahead[0] == step > begins and rows:
            tokens.append(first_token(step, ahead[1], rows))
        return ahead is None or any(tokens)

    watch = Watch(take, past.last, past)
    again(past, run, folder, start or past.start(begins), watch)
    return (tokens[-1] if tokens else None), len(tokens), watch


def note(folder: Path, line: str) -> None:
    """Add where the fork in `folder` differs first to its report."""
    path = folder / FORK
    facts = json.loads(path.read_text(encoding="utf-8")) | {"differs": line}
    own_files.write_file(path, to_json(facts, indent=1))
    conclude(folder, runfile.read_run(folder).stage)


def first_token(step: int, rows: list[dict], others: list[dict]) -> Token | None:
    """Where the rollouts of one step differ first; None where they are equal."""
    for i, (a, b) in enumerate(zip_longest(rows, others)):
        if a is None or b is None or a["prompt_ids"] != b["prompt_ids"]:
            return Token(step, i, None)
        for place, (here, there) in enumerate(zip_longest(a["response_ids"], b["response_ids"])):
            if here != there:
                return Token(step, i, place, here, there)
    return None


# -- Rollouts as a file, and scored by another reward ------------------------------------------------------------------


def rows_of(step: int, rollout: Rollout | None) -> list[dict]:
    """A rollout as rows: prompt, prompt_ids, response_ids, completion (text, or an episode's messages), ended, score
    (None: every source skipped it), columns (those of the data), images ([path, width, height] each; if there are any).
    """
    if rollout is None:
        return []
    lengths, responses, rows = rollout.response_mask.sum(1).tolist(), rollout.responses(), []
    for i, ids in enumerate(rollout.response_ids.tolist()):
        score = float(rollout.scores[i])
        rows.append({"step": step, "prompt": rollout.prompts.texts[i], "prompt_ids": rollout.prompts.ids[i],
                     "response_ids": ids[:lengths[i]], "completion": responses[i], "ended": bool(rollout.has_eos[i]),
                     "score": None if math.isnan(score) else score,
                     "columns": {name: values[i] for name, values in rollout.prompts.columns.items()},
                     **({"images": list(rollout.prompts.images[i])} if rollout.prompts.images[i] else {})})
    return rows


class RolloutFile:
    """JSON lines of rollouts, a row for each response; those after a step from which a run goes on are cut."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int) -> None:
        kept = [row for _, rows in read_rollouts(self.path) for row in rows if row["step"] <= step]
        self.path.write_text("".join(to_json(row) + "\n" for row in kept), encoding="utf-8")

    def take(self, _step: int, rows: list[dict]) -> bool:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(to_json(row, default=str) + "\n" for row in rows)  # such as dates
        return False


def read_rollouts(path: Path) -> Iterator[tuple[int, list[dict]]]:
    """(step, rows) of a file of rollouts or samples; nothing of one that is not there."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for step, rows in groupby((json.loads(line) for line in file if line.endswith("\n")),
                                      key=lambda row: row["step"]):
                yield step, list(rows)


def rescored(rollouts: Iterable[tuple[int, list[dict]]], source: RewardSource) -> list[dict]:
    """For each step: reward and reward_std, the mean and standard deviation of the scores on record (None without any),
    and the same of the source's, as other and other_std."""
    history = []
    for step, rows in rollouts:
        scores = [s for s in part_scores(source, _rollout(rows)).tolist() if not math.isnan(s)]
        known = [row["score"] for row in rows if row.get("score") is not None]
        history.append({"step": step, **_spread("reward", known), **_spread("other", scores), "responses": len(rows)})
    return history


def _spread(name: str, values: list[float]) -> dict[str, float | None]:
    return {name: fmean(values) if values else None, f"{name}_std": pstdev(values) if values else None}


def _rollout(rows: list[dict]) -> Rollout:
    """Rows as a rollout for a reward function; samples of a run have no token ids, and one stands for all."""
    names = dict.fromkeys(name for row in rows for name in row.get("columns", {}))
    prompts = Prompts([row.get("prompt_ids", [0]) for row in rows], [row["prompt"] for row in rows],
                      {name: [row["columns"].get(name) for row in rows] for name in names},
                      [tuple(ImageRef(*image) for image in row.get("images", ())) for row in rows if "columns" in row])
    made = [row["completion"] for row in rows]
    rollout = Rollout.from_responses(prompts, [row.get("response_ids") or [0] for row in rows],
                                     [bool(row.get("ended")) for row in rows], 0, [text_of(each) for each in made])
    if any(not isinstance(each, str) for each in made):
        rollout.episodes = [Episode(messages=each) for each in made]
    return rollout


def in_common(first: Iterator, second: Iterator) -> Iterator[tuple[int, list[dict], list[dict]]]:
    """(step, rows, rows) of the steps that both files of rollouts have, whose steps rise."""
    a, b = next(first, None), next(second, None)
    while a and b:
        if a[0] == b[0]:
            yield a[0], a[1], b[1]
        a, b = (next(first, None) if a[0] <= b[0] else a), (next(second, None) if b[0] <= a[0] else b)
