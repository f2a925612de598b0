"""Reward sources: settings of the stage-2 model, Python functions and others, and how they become one source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from hybrid_rlhf.algorithms.advantages import ESTIMATORS
from hybrid_rlhf.core.config import check, nearest
from hybrid_rlhf.core.distributed import print_main
from hybrid_rlhf.core.options import check_values, within
from hybrid_rlhf.environments.contract import Environments
from hybrid_rlhf.environments.open import EnvironmentConfig, source_of
from hybrid_rlhf.models import load
from hybrid_rlhf.models.tokenizer import Tokenizer
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.rewards.builtin import BUILTINS
from hybrid_rlhf.rewards.functions import FunctionSource, open_functions, parameters
from hybrid_rlhf.rewards.judge import JudgeConfig, JudgeSource, open_judge
from hybrid_rlhf.rewards.judge.judge_config import ABSOLUTE, MAX_TOGETHER, RANKING
from hybrid_rlhf.rewards.judge.local_backend import LocalBackend
from hybrid_rlhf.rewards.mixture import Mixture, Part, Scale
from hybrid_rlhf.rewards.model import ClassifierSource, ModelSource
from hybrid_rlhf.rewards.process_reward_model import OPTIONS, ProcessSource
from hybrid_rlhf.rewards.service import ServiceSource
from hybrid_rlhf.roles.sharing import RolesConfig
from hybrid_rlhf.trainers.ppo_config import PPOConfig
from hybrid_rlhf.training import builders


@dataclass(frozen=True)
class RewardConfig:
    """The reward sources. Without any of these, the stage-2 reward model; with one, that model only where
    roles.reward.model_name_or_path names it.

    Attributes:
        functions: Python functions, path.py:name or builtin:name (exact_match, numeric_match, length_penalty,
            math_match, repetition_penalty, format, reasoning_gym, demo_correct), one or a list; called as TRL calls
            them, with the dataset's columns.
        options: Further keywords of the functions, by name: {numeric_match: {column: answer}}; and of the models, by
            the last part of their path: label (which of several is the score), reads (text, pair or completion); of a
            process reward model label (that of a good step), separator, split and reduce (each, sum, min, last or
            product).
        models: Sequence-classification models, or token-classification models that score each step (process reward
            models, as TRL's PRMTrainer trains them): hub ids or folders, each with its own tokenizer; one or a list.
        url: A service that answers POST {prompts, completions} with {scores}, such as http://localhost:8000/score.
        judge: A language model that reads a rubric and the responses.
        weights: Weight of each source: the stage-2 model if it takes part, the functions, the models, the service, the
            judge; null weighs all by 1.
        timeout: Seconds that one call of a function may take, or url be silent during a request.
        isolate: Whether functions of files and modules run in a process of their own, which is killed at the timeout:
            for code that nothing else ends (compiled code), or that may crash. The built-in ones stay.
        retries: How often a request that found no service, or a busy one, is repeated, each time after twice the wait.
        batch_size: Responses per request.
    """

    functions: list[str] | str = field(default_factory=list)
    options: dict[str, dict] = field(default_factory=dict)
    models: list[str] | str = field(default_factory=list)
    url: str | None = None
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    weights: list[float] | None = None
    timeout: float = within(60.0, "(0,")
    isolate: bool = False
    retries: int = within(3, "[0,")
    batch_size: int = within(64, "[1,")

    def __post_init__(self) -> None:
        check_values(self, "reward.")
        check(not self.options or bool(self.functions or self.models),
              "reward.options are those of reward.functions and reward.models; there are none")

    @property
    def function_list(self) -> list[str]:
        return [self.functions] if isinstance(self.functions, str) else self.functions

    @property
    def model_list(self) -> list[str]:
        return [self.models] if isinstance(self.models, str) else self.models

    @property
    def given(self) -> list[str]:
        """The sources beside the stage-2 model."""
        judge = self.judge.model or self.judge.url
        return [*self.function_list, *self.model_list, *([self.url] if self.url else []), *([judge] if judge else [])]

    def has_model(self, roles: RolesConfig, environment: EnvironmentConfig | None = None, *,
                  is_needed: bool = True) -> bool:
        """Whether the stage-2 model takes part. An environment is expected to have its own reward; tools have none.
        is_needed: whether the method needs a score at all."""
        is_enough = not is_needed or bool(self.given or (environment and environment.factory))
        return not is_enough or roles.reward.model_name_or_path is not None

    def is_learned(self, roles: RolesConfig, environment: EnvironmentConfig | None = None) -> bool:
        """Whether a model takes part in the score, or a service, which may be a model."""
        return self.has_model(roles, environment) or bool(self.model_list or self.url or self.judge.is_given)


def open_sources(config: RewardConfig, roles: RolesConfig, raw: bool = False,
                 environment: EnvironmentConfig | None = None, environments: Environments | None = None, seed: int = 0,
                 *, is_needed: bool = True, judge_base: str | None = None) -> list[RewardSource]:
    """The sources beside the stage-2 model, the environment's own reward last. Raises UserError for what cannot be
    opened; reads no weights. raw: data.raw, whether models read string prompts as they are. seed: of the judge's
    random choices. is_needed: whether the method needs a score. judge_base: as build_roles.judge_base gives it."""
    models = [_scorer(path, config, raw, environments is not None) for path in config.model_list]
    options = {name: value for name, value in config.options.items() if name not in [m.name for m in models]}
    sources: list[RewardSource] = [
        *open_functions(config.function_list, options, config.timeout, config.isolate), *models]
    if config.url is not None:
        sources.append(ServiceSource(config.url, "service", config.timeout, config.retries, config.batch_size))
    if config.judge.is_given:
        sources.append(_judge(config.judge, seed, judge_base))
    if environment is not None and environments is not None:
        _check_isolation(environment, sources)
        reward = source_of(environments, environment.malformed_penalty)
        sources += [reward] if reward else []
    names = ["model"] * config.has_model(roles, environment, is_needed=is_needed) + [source.name for source in sources]
    check(bool(names) or not is_needed,
          "environment.factory: its class has neither get_reward nor step, and there is no other reward; give "
          "reward.functions, or roles.reward.model_name_or_path")
    twice = next((n for i, n in enumerate(names) if n in names[:i]), None)
    check(twice is None, f"two reward sources are called {twice} ({', '.join(names)}); rename one")
    check(config.weights is None or len(config.weights) == len(names),
          f"reward.weights has {len(config.weights or [])} numbers for {len(names)} sources ({', '.join(names)}); give "
          "one for each, in that order")
    return sources


def _check_isolation(environment: EnvironmentConfig, sources: list[RewardSource]) -> None:
    """UserError for a function with the argument `environments` where the instances are in other processes."""
    for source in sources:
        if isinstance(source, FunctionSource):
            check(not environment.isolate or "environments" not in parameters(source.function)[0],
                  f"environment.isolate: reward.functions: {source.name} asks for environments, and they are in "
                  "processes of their own; give the class a get_reward, or leave environment.isolate out")


def _scorer(path: str, config: RewardConfig, raw: bool, has_episodes: bool) -> ClassifierSource | ProcessSource:
    """One of reward.models, which scores whole responses or their steps."""
    folder, name = builders.model_folder(path), PurePath(path).name
    load.check_folder(folder, ("weights",))
    check(not load.is_kind("ProcessRewardModel", folder),
          f"reward.models: {path} is a process reward model with code of its own (as Qwen2.5-Math-PRM), which is not "
          "run here; give one that transformers loads as a token-classification model")
    is_process = load.is_kind("TokenClassification", folder)
    known, options = OPTIONS if is_process else ("label", "reads"), config.options.get(name, {})
    for key in options:
        check(key in known, f"reward.options.{name}: there is no {key}{nearest(key, known)}; there are "
                            f"{', '.join(known)}")
    if not is_process:
        return ClassifierSource(folder, name, raw=raw, **options)
    check(not has_episodes, f"reward.models: {path} is a process reward model, which reads responses of one turn; "
                            "leave out environment, or give another source")
    return ProcessSource(folder, name, **options)


def print_step_rewards(sources: list[RewardSource], ppo: PPOConfig | None, environments: Environments | None) -> None:
    """Print one line where rewards of steps or turns are summed to one number per response, or where steps are compared
    whose rewards are divided by their number. ppo: None for a method that ranks whole responses."""
    placed = [s for s in sources if isinstance(s, ProcessSource) and s.places_scores]
    names = [s.name for s in placed] + [k.name for k in (environments.kinds if environments else []) if k.has_step]
    divided = [s.name for s in placed if s.reduce == "each"]
    if names and (ppo is None or ESTIMATORS[ppo.estimator].sums):
        what = f"ppo.estimator {ppo.estimator}" if ppo else "this method"
        apart = ", ".join(name for name, row in ESTIMATORS.items() if not row.sums)
        print_main(f"reward: {', '.join(names)} rewards single steps or turns, and {what} reads their sum, one number "
                   f"of the response; ppo.estimator {apart} rewards each token by what follows it")
    elif divided and ppo is not None and ppo.estimator == "process_grpo":
        print_main(f"reward: {divided[0]} divides each step's reward by the number of steps, and process_grpo compares "
                   f"steps, so that fewer steps pay better; give reward.options {{{divided[0]}: {{reduce: sum}}}}")


def _judge(config: JudgeConfig, seed: int, base: str | None) -> JudgeSource:
    folder = builders.model_folder(config.model) if config.model else None
    return open_judge(replace(config, model=folder), seed, base)


def judge_on_base(sources: Sequence[RewardSource]) -> LocalBackend | None:
    """The backend of a judge that is computed on the policy's weights, or None."""
    backends = [source.asker.backend for source in sources if isinstance(source, JudgeSource)]
    return next((b for b in backends if isinstance(b, LocalBackend) and b.is_shared), None)


def check_groups(config: RewardConfig, num_samples: int, option: str) -> None:
    """UserError for a judge that compares the responses to a prompt, where there is only one response."""
    check(not config.judge.is_given or config.judge.mode == ABSOLUTE or num_samples > 1,
          f"reward.judge.mode is {config.judge.mode}, which compares the responses to a prompt, and {option} is "
          f"{num_samples}; give several, or choose absolute")
    check(config.judge.mode != RANKING or num_samples <= MAX_TOGETHER,
          f"reward.judge.mode ranking shows at most {MAX_TOGETHER} responses together, and {option} is {num_samples}; "
          "lower it, or choose pairwise")


def check_columns(sources: list[RewardSource], row: Mapping, has_episodes: bool = False) -> None:
    """UserError where a function needs a column that `row` of the data does not have; one line where it gets messages,
    as a function that expects text may score them all 0."""
    names = [c for c in row if c not in ("prompt", "prompt_ids", "text")]
    functions = [s for s in sources if isinstance(s, FunctionSource)]
    for source in functions:
        source.check_columns(names)
    custom = [s.name for s in functions if type(s.function) not in BUILTINS.values()]
    if custom and has_episodes:
        print_main(f"reward: {', '.join(custom)} get completions as lists of all messages behind the prompt: what the "
                   "model says last is completion[-1]['content']")
    elif custom and not isinstance(row.get("prompt", ""), str):
        print_main(f"reward: {', '.join(custom)} get completions as lists of one message, as the data's prompts are "
                   "read as messages: the text is completion[0]['content']")


def leave_unread(report: dict, sources: Sequence[RewardSource], environments: Environments | None) -> None:
    """Drop from the report's unread columns those that a function, or an environment's reset, is given."""
    has_reset = environments is not None and any(kind.make is not None for kind in environments.kinds)
    functions = [s for s in sources if isinstance(s, FunctionSource)]
    report["unread"] = {column: number for column, number in report.get("unread", {}).items()
                        if not has_reset and not any(function.takes(column) for function in functions)}


def combine(config: RewardConfig, model: ModelSource | None, others: list[RewardSource], scale: Scale | None,
            tokenizer: Tokenizer) -> tuple[RewardSource, Scale | None]:
    """The one source of the run, and the scale by which the trainer normalises its scores. scale: that of the stage-2
    model. tokenizer: the policy's.

    A model alone is scaled by the trainer. In a sum it is scaled by itself, and the sum is not scaled. Without any
    source, the run's source skips every response.
    """
    if model is not None and not others and config.weights is None:
        return model, scale
    for source in others:
        if isinstance(source, (ClassifierSource, ProcessSource, JudgeSource)):
            source.open()
        if isinstance(source, ProcessSource):
            source.policy_tokenizer = tokenizer
    parts = ([Part(model, scale=scale)] if model else []) + [Part(source) for source in others]
    for part, weight in zip(parts, config.weights or [1.0] * len(parts), strict=True):
        part.weight = weight
    return Mixture(parts), None
