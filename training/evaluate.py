"""Compare models on held-out prompts: scores, win rates, KL, lengths, diversity, and their answers; and compare reward
sources with labelled data."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hybrid_rlhf.core.config import check, nearest
from hybrid_rlhf.core.distributed import world_size
from hybrid_rlhf.core.options import check_values, one_of, within
from hybrid_rlhf.core.startup import restore_gc
from hybrid_rlhf.data import collate, datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.labels import Labels
from hybrid_rlhf.data.preview import Preview, look
from hybrid_rlhf.data.turns import readable
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.report import agreement, compare
from hybrid_rlhf.report.agreement import Agreement
from hybrid_rlhf.report.compare import Answered, Method
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.rewards.mixture import Scale
from hybrid_rlhf.rewards.model import ModelSource
from hybrid_rlhf.roles import Reference, Reward
from hybrid_rlhf.roles.sharing import RolesConfig
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.episodes import EpisodePlayer
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.loop import on_record
from hybrid_rlhf.training import (
    builders,
    episodes_setup,
    label_agreement,
    reward_sources,
    scored_answers,
    unread_options,
)
from hybrid_rlhf.training.registry import READS
from hybrid_rlhf.training.reward_sources import RewardConfig

ROWS = ("auto", "all", "held_out")
FEW = 20  # prompts: with fewer, only a very large difference between models shows


@dataclass(frozen=True)
class EvaluateConfig:
    """Models to compare, on which prompts, and the report.

    Attributes:
        models: Two or more run folders or models, PATH or NAME=PATH; the first is what the others are compared with.
            None with labels: then only the reward sources are measured.
        labels: File or folder of preferences (prompt, chosen, rejected) or of labelled answers, by which the agreement
            of each reward source is measured.
        num_labels: At most so many rows of the labels are read, drawn by the seed; null reads all of them.
        reference: Run folder or model that KL is measured against; null takes the first of models.
        rows: all (every prompt of the sources), held_out (those that training holds out), or auto: all, unless one of
            the models was trained on one of the sources; then those held out. Of the labels too, by what the reward
            models were trained on.
        num_prompts: At most so many prompts are asked; null asks all of them.
        batch_size: Prompts that are answered and scored at a time.
        sampling: How answers are drawn.
        checker: Name of an independent checker of answers (demo), for the accuracy column; null leaves it out.
        prompt_templates: By a model's name, what is written around the last user turn for it, {prompt} standing for
            the turn: "Score 1. {prompt}" for a conditional_sft run. The reward source reads the prompt as it is.
        num_examples: Prompts whose answers are shown side by side.
        confidence: Coverage of the intervals.
        num_resamples: Resamples of the bootstrap.
    """

    models: list[str] = field(default_factory=list)
    labels: str | None = None
    num_labels: int | None = within(None, "[1,")
    reference: str | None = None
    rows: str = one_of("auto", ROWS)
    num_prompts: int | None = within(None, "[1,")
    batch_size: int = within(256, "[1,")
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    checker: str | None = one_of(None, scored_answers.CHECKERS)
    prompt_templates: dict[str, str] = field(default_factory=dict)
    num_examples: int = within(8, "[0,")
    confidence: float = within(0.95, "(0, 1)")
    num_resamples: int = within(10_000, "[1,")

    def __post_init__(self) -> None:
        check_values(self, "evaluate.")
        for name, template in self.prompt_templates.items():
            check(template.count("{prompt}") == 1, f"evaluate.prompt_templates: {name} is {template!r}; it must hold "
                                                   "{prompt} once")


@dataclass(frozen=True)
class Config:
    """Comparison of models on held-out prompts.

    Attributes:
        stage: Name of the stage.
        output_dir: Folder of evaluate.json and evaluate.md.
        seed: Seed of the answers and of the bootstrap.
        resume: never (evaluate again) or auto (a finished evaluation with the same settings is left as it is).
        report_to: An evaluation has no trackers.
        model: How the models are loaded (dtype, quantisation); which ones is evaluate.models.
        data: The prompts.
        roles: roles.reward.model_name_or_path is the stage-2 model.
        reward: What answers are scored by.
        environment: Tools and environments, which make a response an episode of several turns.
        evaluate: Which models are compared, and how.
    """

    stage: str = "evaluate"
    output_dir: str = "outputs/evaluate"
    seed: int = 0
    resume: str = "never"
    report_to: list[str] = field(default_factory=list)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        unread_options.refuse(self)


def contenders(config: Config) -> dict[str, str]:
    """Name -> run folder or model, in the order given ({} where there are only labels); UserError for fewer than two,
    or for two of one name."""
    entries, paths = config.evaluate.models, {}
    is_enough = len(entries) >= 2 or (not entries and config.evaluate.labels is not None)
    check(is_enough, f"evaluate.models has {len(entries)} models; give two or more, such as "
                     '--evaluate.models "[runs/sft, runs/ppo]", or none and evaluate.labels')
    bare = [Path(entry) for entry in entries if "=" not in entry]
    for entry in entries:
        name, has_name, path = entry.partition("=")
        path = path if has_name else name
        name = name if has_name else _own_name(Path(path), [p for p in bare if p != Path(path)])
        check(bool(name) and bool(path), f"evaluate.models: {entry!r} is neither PATH nor NAME=PATH; "
                                         "write it as one of them")
        check(name not in paths, f"evaluate.models: two are called {name}; name them, as in {name}_2={path}")
        paths[name] = builders.parent_run(path, config.output_dir, "sft", "evaluate.models")
    for name in config.evaluate.prompt_templates:
        check(name in paths, f"evaluate.prompt_templates: no model is called {name}{nearest(name, paths)}; there are "
                             f"{', '.join(paths)}")
    return paths


def _own_name(path: Path, others: list[Path]) -> str:
    """The shortest end of a path that no other path has: sft of runs/sft, a/sft where there is b/sft too."""
    parts = [p for p in path.parts if p != "/"]
    for size in range(1, len(parts) + 1):
        tail = parts[-size:]
        if tail != [builders.MODEL_FOLDER] and not any(list(o.parts[-size:]) == tail for o in others):
            return "/".join(tail).removesuffix(f"/{builders.MODEL_FOLDER}")
    return str(path)


def previews(config: Config) -> Iterator[Preview]:
    """Rendered prompts, in the first model's tokens."""
    models = contenders(config)
    check(bool(models), "--preview shows the prompts that evaluate.models are asked; there are no models")
    builders.require_data(config.data, "evaluate")
    tokenizer = builders.open_tokenizer(_settings(config, next(iter(models.values()))), config.data, READS["ppo"],
                                        config.seed)
    yield look(config.data, READS["ppo"], tokenizer)


def _settings(config: Config, path: str) -> ModelConfig:
    return dataclasses.replace(config.model, model_name_or_path=builders.model_folder(path))


def run(config: Config, command: str = "") -> dict[str, float]:
    """Answer, score, compare, and measure the sources; writes evaluate.json and evaluate.md in output_dir and returns
    each model's score, and each source's agreement with the labels."""
    check(world_size() == 1, "evaluate runs in one process; start it without torchrun or deepspeed")
    models = contenders(config)
    if models:
        builders.require_data(config.data, "evaluate")
    done = runfile.finished(config.output_dir, config.stage, config)
    if done:
        return done.metrics
    environments = episodes_setup.open_of(config.environment, raw=config.data.raw)
    sources = _Sources(config, reward_sources.open_sources(
        config.reward, config.roles, config.data.raw, config.environment, environments, config.seed),
        _reward_path(config))
    tokenizers = {name: _tokenizer(config, path) for name, path in models.items()}
    asked, how = _asked(config, models, tokenizers, sources, environments) if models else ({}, {})
    labelled = _labelled(config, sources, next(iter(tokenizers.values()), None))
    players = {name: episodes_setup.player_of(config.environment, environments, each)
               for name, each in tokenizers.items()}
    record = runfile.start(config.output_dir, config.stage, config, command)
    restore_gc()
    if labelled:
        how["labels"] = f"{config.evaluate.labels} ({'held out' if labelled.is_held_out else 'all'})"
    with on_record(record):
        sources.open()
        agreements = _measured(config, labelled, sources, next(iter(tokenizers.values()), None))
        answered = []
        if models:
            judges = _Judges(config, sources, how["reference_of_kl"])
            answered = [judges.answers(name, path, tokenizers[name], asked[name], players[name])
                        for name, path in models.items()]
            how |= scored_answers.print_unjudged(judges.unjudged, config.reward.judge.on_failure)
            how |= scored_answers.print_unscored(answered)
        metrics = _report(config, answered, next(iter(asked.values()), None), how, agreements)
        record.finish(metrics, tokenizer=next(iter(tokenizers.values()), None))
    return metrics


def _asked(config: Config, models: dict[str, str], tokenizers: dict, sources: _Sources, environments  # noqa: ANN001
           ) -> tuple[dict[str, Prompts], dict[str, str]]:
    """Model -> the prompts that it answers, which the sources can score; and how they were chosen."""
    reward_sources.check_groups(config.reward, config.evaluate.sampling.num_samples, "evaluate.sampling.num_samples")
    reference = config.evaluate.reference
    reference = builders.parent_run(reference, config.output_dir, "sft", "evaluate.reference") if reference else next(
        iter(models.values()))
    rows, why = which_rows(config.evaluate.rows, config.data, models.values())
    asked, report = in_common(config.data, tokenizers, rows, config.evaluate.num_prompts, config.seed)
    columns = next(iter(asked.values())).columns
    extra = {"environments": None} if environments and not config.environment.isolate else {}
    reward_sources.check_columns(sources.others, {name: v[0] for name, v in columns.items()} | extra,
                                 bool(environments))
    if environments is not None:
        check(not config.evaluate.prompt_templates, "evaluate.prompt_templates write the prompts, and so does "
                                                    "environment; leave one of them out")
        episodes_setup.first_rows(environments, [{name: values[i] for name, values in columns.items()}
                                                 for i in range(len(columns["prompt"]))])
    reward_sources.leave_unread(report, sources.others, environments)
    print_selection(len(next(iter(asked.values()))), why or rows.replace("_", " "), report)
    return asked, {"rows": rows.replace("_", " "), "reference_of_kl": reference}


def _reward_path(config: Config) -> str | None:
    """The stage-2 run or model, where it takes part."""
    if not config.reward.has_model(config.roles, config.environment):
        return None
    return builders.parent_run(config.roles.reward.model_name_or_path, config.output_dir, "reward",
                               "roles.reward.model_name_or_path (or reward.functions instead of a model)")


def _tokenizer(config: Config, path: str):  # noqa: ANN202
    """A model's tokenizer, after checks of its settings and lengths."""
    model = _settings(config, path)
    builders.check_dtype(model)
    if config.evaluate.models:
        longest = config.data.max_prompt_length + config.evaluate.sampling.max_new_tokens
        builders.check_lengths(model, **{"data.max_prompt_length + evaluate.sampling.max_new_tokens": longest})
    data = config.data
    if not config.evaluate.models:  # only the labels are rendered, and decide whether a chat template is needed
        data = dataclasses.replace(data, sources=[config.evaluate.labels])
    return builders.open_tokenizer(model, data, READS["ppo"], config.seed)


class _Sources:
    """The reward sources: the stage-2 model, opened by `open`, once, and the others."""

    def __init__(self, config: Config, others: list[RewardSource], reward: str | None) -> None:
        self.config, self.others, self.reward = config, others, reward
        self.role = None
        self.reader = None if reward is None else _tokenizer(config, reward)

    def open(self) -> None:
        if self.reward is not None:
            scalar = builders.open_scalar(_settings(self.config, self.reward), self.reader)
            self.role = Reward(builders.scalar_engine(scalar, self.reader))

    def reading_text(self) -> list[RewardSource]:
        """Every source by itself, each reading text in its own tokens."""
        model = [ModelSource(self.role, tokenizer=self.reader, raw=self.config.data.raw)] if self.role else []
        return [*model, *self.others]

    def of(self, path: str, tokenizer) -> RewardSource:  # noqa: ANN001
        """The source for answers in this model's tokens; a reward model with another tokenizer reads text."""
        model = None
        if self.role is not None:
            differs = builders.difference(path, self.reward, self.config.data, READS["ppo"],
                                          trust_remote_code=self.config.model.trust_remote_code)
            model = ModelSource(self.role, tokenizer=self.reader if differs else None, raw=self.config.data.raw)
        statistics = builders.score_statistics_of(self.reward) if self.reward else {}
        scale = Scale(statistics["mean"], statistics["std"]) if statistics else None
        return reward_sources.combine(self.config.reward, model, self.others, scale, tokenizer)[0]


def _labelled(config: Config, sources: _Sources, tokenizer) -> Labels | None:  # noqa: ANN001
    """The labels, if any, checked to be such as the sources can score."""
    settings = config.evaluate
    if settings.labels is None:
        return None
    check(not config.environment.is_given, "evaluate.labels are of answers in text, and environment makes episodes; "
                                           "leave one of them out")
    rows, why = which_rows(
        settings.rows, dataclasses.replace(config.data, sources=[settings.labels]),
        [*([sources.reward] if sources.reward else []), *config.reward.model_list])
    held_out = config.data.eval_fraction if rows == "held_out" else None
    labelled = label_agreement.read(settings.labels, settings.num_labels, config.seed, held_out, why)
    label_agreement.check(labelled, sources.others, tokenizer or sources.reader)
    return labelled


def _measured(config: Config, labelled: Labels | None, sources: _Sources, tokenizer) -> list[Agreement]:  # noqa: ANN001
    """Measure and show how far each source agrees with the labels; before the models answer, which may take long."""
    if labelled is None:
        return []
    measured = sources.reading_text()
    agreements = label_agreement.measure(labelled, measured, _method(config), tokenizer or sources.reader,
                                         config.evaluate.batch_size)
    agreement.show(agreements, _method(config))
    label_agreement.check_verdicts(agreements, measured)
    return agreements


def _method(config: Config) -> Method:
    return Method(config.evaluate.confidence, config.evaluate.num_resamples, config.seed)


class _Judges:
    """The reward sources and the reference, loaded once, for models that may have other tokenizers than theirs."""

    def __init__(self, config: Config, sources: _Sources, reference: str) -> None:
        self.config, self.sources, self.reference = config, sources, reference
        actor = scored_answers.open_actor(_settings(config, reference), _tokenizer(config, reference))
        self.engine = actor.engine
        self.unjudged: dict[str, float] = {}  # by model, the share of its answers that the judge has no verdict on

    def answers(self, name: str, path: str, tokenizer, prompts: Prompts,  # noqa: ANN001
                player: EpisodePlayer | None = None) -> Answered:
        """One model's answers to the prompts, judged. The model is freed when this returns."""
        settings, source = self.config.evaluate, self.sources.of(path, tokenizer)
        is_alike = builders.difference(path, self.reference, self.config.data, READS["ppo"],
                                       trust_remote_code=self.config.model.trust_remote_code) is None
        reference = Reference(self.engine) if is_alike else None
        actor = scored_answers.open_actor(_settings(self.config, path), tokenizer)
        actor.episodes = player
        template, rollouts = settings.prompt_templates.get(name), []
        for first in range(0, len(prompts), settings.batch_size):
            some = prompts.rows(range(first, min(first + settings.batch_size, len(prompts))))
            asked = scored_answers.in_words(some, template, tokenizer, self.config.data.raw) if template else None
            rollouts.append(scored_answers.respond(actor, some, settings.sampling, self.config.seed + first, asked))
            scored_answers.judge(rollouts[-1], source, reference)
        self.unjudged[name] = scored_answers.unjudged(source)
        del actor
        gc.collect()
        return _answered(name, path, rollouts, settings)


def _answered(name: str, path: str, rollouts: list[Rollout], settings: EvaluateConfig) -> Answered:
    """The record of one model's batches."""
    size = settings.sampling.num_samples

    def table(columns: list) -> np.ndarray:
        return np.concatenate([c.numpy() for c in columns]).astype(float).reshape(-1, size)

    texts = [r.shown(i) for r in rollouts for i in range(len(r))]
    return Answered(
        name, path, table([r.scores for r in rollouts]),
        {part: table([r.source_scores[part] for r in rollouts]) for part in rollouts[0].source_scores},
        [texts[i : i + size] for i in range(0, len(texts), size)],
        [n for r in rollouts for n in r.action_mask.sum(1).tolist()], [e for r in rollouts for e in r.has_eos.tolist()],
        None if rollouts[0].ref_logprobs is None else [n for r in rollouts for n in scored_answers.nats_from(r)],
        [right for r in rollouts for right in scored_answers.is_right(settings.checker, r)]
        if settings.checker else None)


def _report(config: Config, answered: list[Answered], prompts: Prompts | None, how: dict[str, str],
            agreements: list[Agreement]) -> dict[str, float]:
    """Write the comparison and the agreement, print the comparison, and return the score of each model and the accuracy
    of each source."""
    settings, shown, facts = config.evaluate, [], {}
    comparison = compare.compare(answered, _method(config))
    if prompts is not None:
        facts = {"prompts": f"{len(prompts)} ({how['rows']})", "answers_per_prompt": settings.sampling.num_samples,
                 "temperature": settings.sampling.temperature, "seed": config.seed,
                 "reward_sources": ", ".join(answered[0].parts), "reference_of_kl": how["reference_of_kl"]}
        facts |= {name: how[name] for name in (scored_answers.NO_VERDICT, scored_answers.UNSCORED) if name in how}
        shown = compare.examples([words_of(p) for p in prompts.columns["prompt"]], answered, settings.num_examples)
        compare.show(comparison, shown[:3])  # printed before writing, which a full disk may stop
    if agreements:
        facts |= {"labels": how["labels"]}
    more = agreement.section(agreements, _method(config)) if agreements else None
    written = compare.write(Path(config.output_dir), comparison, shown, facts, more)
    print(f"written to {' and '.join(map(str, written))}")
    return {f"score/{model.name}": float(np.nanmean(model.scores)) for model in answered} | {
        f"agreement/{row.source}": row.accuracy for row in agreements if row.accuracy is not None}


def words_of(prompt: str | list[dict]) -> str:
    """A prompt to display: the text itself, or the last message."""
    shown = readable(prompt)
    return shown if isinstance(shown, str) else shown[-1]["content"]


# -- which prompts are asked -------------------------------------------------------------------------------------------


def which_rows(rows: str, data: DataConfig, paths: Iterable[str]) -> tuple[str, str]:
    """(rows, why): auto becomes all, or held_out with the reason where a model was trained on one of the sources."""
    if rows != "auto":
        return rows, ""
    for path in paths:
        seen = _trained_on(path)
        shared = next((s.path for s in data.sources if _identity(s.path) in seen), None)
        if shared is not None:
            return "held_out", f"held out, for {path} was trained on {shared}; --evaluate.rows all asks every one"
    return "all", ""


def _trained_on(path: str) -> set[str]:
    """The data sources of a run and of the runs that it started from; empty for a model that is not a run."""
    seen: set[str] = set()
    done: set[str] = set()
    while path and path not in done and (record := runfile.run_at(path)):
        sources = (record.config.get("data") or {}).get("sources") or []
        seen |= {_identity(source["path"]) for source in sources}
        done.add(path)
        path = record.facts.get("base_model") or ""
    return seen


def _identity(source: str) -> str:
    """A source's absolute path; a name that is not a local path (a hub id) stays as it is."""
    path = Path(os.path.expanduser(source))  # a record has it as the user wrote it
    return str(path.resolve()) if path.exists() else source


def in_common(data: DataConfig, tokenizers: Mapping[str, object], rows: str, limit: int | None, seed: int
              ) -> tuple[dict[str, Prompts], dict]:
    """Model -> prompts in its tokens, those that fit into data.max_prompt_length for all, at most `limit`; and the
    counts of the rows."""
    by_model: dict[str, dict] = {}
    for name, tokenizer in tokenizers.items():
        built = datasets.build(data, READS["ppo"], tokenizer, seed)
        candidates = [*built.held_out, *(built.train if rows == "all" else ())]
        check(bool(candidates), f"none of the {len(built.train)} prompts is held out (data.eval_fraction "
                                f"{data.eval_fraction:g}); raise it, or ask all of them by --evaluate.rows all")
        by_model[name] = {_key(row): row for row in candidates}
    common = [key for key in next(iter(by_model.values())) if all(key in each for each in by_model.values())]
    check(bool(common), "evaluate.models: no prompt fits into data.max_prompt_length for all of them; raise it")
    chosen = common[:limit]
    asked = {name: collate.collate_prompts([each[key] for key in chosen]) for name, each in by_model.items()}
    return asked, built.report


def _key(row: dict) -> str:
    """Key of a prompt with its other columns, whatever the tokenizer; a row that occurs twice is asked once."""
    return json.dumps({k: v for k, v in row.items() if k not in ("prompt_ids", "text")}, sort_keys=True)


def print_selection(count: int, why: str, report: dict) -> None:
    """Print to stderr how many prompts are asked, with a warning where they are few. why: which they are."""
    parts = [f"evaluate: {count} of {report['read']} prompts are asked ({why})", *datasets.drops(report)]
    print("; ".join(parts), *(f"data: {line}" for line in datasets.unread(report)), sep="\n", file=sys.stderr)
    if count < FEW:
        print(f"warning: {count} prompts tell only very large differences between models apart; give {FEW} or more, "
              "better hundreds", file=sys.stderr)
