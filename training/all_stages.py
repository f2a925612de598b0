"""Run the three stages in order, in one process, and compare the models that they leave."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import is_main
from hybrid_rlhf.core.options import check_values, one_of
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.core.tensors import masked_mean
from hybrid_rlhf.data import collate, datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.preview import Preview, look
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.report.alarms import compared
from hybrid_rlhf.report.summary import compare_stages, conclude_comparison
from hybrid_rlhf.rewards.model import ModelSource
from hybrid_rlhf.roles import Reference, Reward
from hybrid_rlhf.roles.sharing import RolesConfig
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.ppo import PPOConfig
from hybrid_rlhf.training import (
    builders,
    defaults,
    on_policy,
    reward_sources,
    step1_sft,
    step2_reward,
    step3_ppo,
    unread_options,
)
from hybrid_rlhf.training.build_roles import judge_base
from hybrid_rlhf.training.registry import READS
from hybrid_rlhf.training.scored_answers import CHECKERS, is_right, judge, open_actor, respond
from hybrid_rlhf.training.step2_reward import RewardModelConfig

RECIPES = {"sft": step1_sft, "reward": step2_reward, "ppo": step3_ppo}
ORDER = tuple(RECIPES)
DEMO = Path(__file__).parent / "presets" / "demo.yaml"
NUM_SHOWN = 8  # prompts whose answers the report shows side by side


@dataclass(frozen=True)
class StagesConfig:
    """The schedule of each stage.

    Attributes:
        sft: Stage 1.
        reward: Stage 2.
        ppo: Stage 3.
    """

    sft: TrainConfig = field(default_factory=TrainConfig)
    reward: TrainConfig = field(default_factory=TrainConfig)
    ppo: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class CompareConfig:
    """The table at the end of `--stage all`.

    Attributes:
        checker: Name of an independent checker of answers (demo), for the accuracy column; null leaves it out.
        num_prompts: Held-out prompts to answer.
        longer_sft: Also continue SFT for as long as PPO took, and compare with that: a baseline of equal time.
    """

    checker: str | None = one_of(None, CHECKERS)
    num_prompts: int = 256
    longer_sft: bool = False

    def __post_init__(self) -> None:
        check_values(self, "compare.")


@dataclass(frozen=True)
class Config:
    """All three stages. Sections that several stages share (model, data, engine) are given once.

    Attributes:
        stage: Name of the stage.
        output_dir: Folder of the runs; each stage gets a folder of its own in it.
        seed: Seed of everything random.
        resume: auto (finished stages are left as they are, an unfinished one goes on) or never (start again).
        report_to: Trackers (tensorboard, wandb, trackio, ...).
        run_stages: The stages to run. Without sft, reward and ppo start from `model` as it is.
        model: The model to start from.
        data: The data; each source says by `stages` what it serves.
        engine: How training is laid out.
        stages: The schedule of each stage.
        reward: The reward model's own settings.
        roles: The four roles of PPO.
        reward_sources: PPO's reward sources beside the model of stage 2 (`reward` of stage ppo); that model comes
            first in reward_sources.weights. To do without it, leave reward out of run_stages.
        ppo: PPO's own settings.
        compare: The table at the end.
    """

    stage: str = "all"
    output_dir: str = "outputs/all"
    seed: int = 0
    resume: str = "auto"
    report_to: list[str] = field(default_factory=list)
    run_stages: list[str] = field(default_factory=lambda: list(ORDER))
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(split=[2.0, 4.0, 4.0]))
    engine: ZeroConfig = field(default_factory=ZeroConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    reward: RewardModelConfig = field(default_factory=RewardModelConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    reward_sources: reward_sources.RewardConfig = field(default_factory=reward_sources.RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)

    def __post_init__(self) -> None:
        unread_options.refuse(self)
        unknown = [s for s in self.run_stages if s not in ORDER]
        check(not unknown and bool(self.run_stages),
              f"run_stages is {self.run_stages}; choose one or more of {', '.join(ORDER)}")


def default_config(argv: list[str]) -> str | None:
    """The embedded demo, for a command line without a configuration, model or data."""
    if any(word.startswith(("--config", "--model", "--data", "--run_stages")) for word in argv):
        return None
    return str(DEMO)


def stage_configs(config: Config) -> dict[str, object]:
    """The settings of each stage to run, as its own recipe takes them."""
    later = dataclasses.replace(config.model, preset=None, tokenizer_name_or_path=None)
    models = {"sft": config.model}
    if "sft" in config.run_stages:  # the later stages find the sft run beside them
        later = dataclasses.replace(later, model_name_or_path=None)
    out = {}
    for name in (s for s in ORDER if s in config.run_stages):
        fields = {f.name for f in dataclasses.fields(RECIPES[name].Config)}
        shared = {k: getattr(config, k) for k in fields if hasattr(config, k)}
        if name == "ppo":  # `reward` is stage 2's section here
            shared |= {"reward": config.reward_sources, "roles": _ppo_roles(config)}
        shared |= {"stage": name, "output_dir": str(Path(config.output_dir) / name),
                   "model": models.get(name, later), "train": getattr(config.stages, name)}
        out[name] = RECIPES[name].Config(**unread_options.without(name, shared))
    return out


def _ppo_roles(config: Config) -> RolesConfig:
    """PPO's roles, with the path of stage 2's model where other reward sources would otherwise replace it."""
    roles = config.roles
    if "reward" not in config.run_stages or config.reward_sources.has_model(roles):
        return roles
    path = str(Path(config.output_dir) / "reward")
    return dataclasses.replace(roles, reward=dataclasses.replace(roles.reward, model_name_or_path=path))


def previews(config: Config) -> Iterator[Preview]:
    """Rendered examples of every stage's data, all in stage 1's tokens."""
    for name in config.run_stages:
        tokenizer = builders.open_tokenizer(config.model, config.data, READS["sft"], config.seed)
        yield look(config.data, READS[name], tokenizer)


def check_all(config: Config, configs: dict[str, object]) -> None:
    """Raise before the first stage trains what a later one would refuse: missing data, lengths beyond the model."""
    lengths = {"data.max_length": min(each.data.max_length for each in (config, *configs.values()))}
    if "ppo" in configs:
        lengths["data.max_prompt_length + ppo.sampling.max_new_tokens"] = (
            config.data.max_prompt_length + config.ppo.sampling.max_new_tokens)
        start = config.model.model_name_or_path
        reward_sources.open_sources(configs["ppo"].reward, configs["ppo"].roles,
                                    judge_base=start and judge_base(configs["ppo"], start))
        reward_sources.check_groups(configs["ppo"].reward, config.ppo.sampling.num_samples, "ppo.sampling.num_samples")
        on_policy.require_more_data(configs["ppo"])
        on_policy.check_more_data(configs["ppo"], config.model)
    for name in configs:
        builders.require_data(config.data, name)
        datasets.open_sources(config.data, READS[name])
    builders.check_lengths(config.model, **lengths)


def run(config: Config, command: str = "") -> dict:
    """Run the stages, then compare their models; returns the summary (also in output_dir/summary.json)."""
    configs = {name: defaults.resolve(stage, config.model) for name, stage in stage_configs(config).items()}
    check_all(config, configs)
    for number, (name, stage) in enumerate(configs.items(), 1):
        print(f"\n== stage {number} of {len(configs)}: {name}", file=sys.stderr)
        RECIPES[name].run(stage, command)
        gc.collect()
    seconds = {name: runfile.read_run(stage.output_dir).seconds for name, stage in configs.items()}
    return compare(config, configs, seconds, command) if len(configs) == len(ORDER) else {"seconds": seconds}


# -- the comparison at the end -----------------------------------------------------------------------------------------


def compare(config: Config, configs: dict, took: dict[str, float], command: str) -> dict:
    """Measure the three policies, print the table, write output_dir/summary.json and return it. Without a held-out
    prompt (of few rows) nothing is measured, and one line says so."""
    folders = {"sft": configs["sft"].output_dir, "ppo": configs["ppo"].output_dir}
    if not len(_held_out(config, _tokenizer(config, folders["sft"]))):
        print("the stages are not compared: no prompt was held out; raise data.eval_fraction, or give more rows",
              file=sys.stderr)
        return {"seconds": {k: round(v, 1) for k, v in took.items()}}
    if config.compare.longer_sft:
        folders = {"sft": folders["sft"], "sft_longer": longer_sft(config, configs["sft"], took["ppo"], command),
                   "ppo": folders["ppo"]}
        took["sft_longer"] = runfile.read_run(folders["sft_longer"]).seconds
    measured = {name: measure(config, configs, folder) for name, folder in folders.items()}
    summary = {name: figures for name, (figures, _) in measured.items()}
    summary["reward"] = {"accuracy": runfile.read_run(configs["reward"].output_dir).metrics.get("eval/accuracy")}
    summary["seconds"] = {k: round(v, 1) for k, v in took.items()}
    path = Path(config.output_dir) / "summary.json"
    if is_main():
        write_file(path, json.dumps(summary, indent=1) + "\n")
        page = compare_stages(Path(config.output_dir), list(configs), table(summary),
                              side_by_side({name: answers for name, (_, answers) in measured.items()}))
        show(summary, path, config.compare.num_prompts)
        print(f"report with curves and answers: {page}")
    return summary


def longer_sft(config: Config, sft: step1_sft.Config, limit: float, command: str) -> str:
    """Continue the SFT run on its own data for about `limit` seconds; returns the longer run's folder.

    Seconds become steps by the first run's time per step, but at least its number of steps, as a busy machine distorts
    the time.
    Warm-up and decay start anew at half the rate: the full rate would first undo what the first run had learned.
    """
    done = runfile.read_run(sft.output_dir)
    steps = max(sft.train.max_steps, 1, round(limit / done.metrics["time/per_step"]))
    folder = str(Path(config.output_dir) / "sft_longer")
    model = dataclasses.replace(sft.model, preset=None, model_name_or_path=builders.model_folder(sft.output_dir))
    train = dataclasses.replace(sft.train, max_steps=steps, learning_rate=sft.train.learning_rate / 2)
    print("\n== for comparison: sft continued for as long as ppo took", file=sys.stderr)
    step1_sft.run(dataclasses.replace(sft, output_dir=folder, model=model, train=train), command)
    return folder


def measure(config: Config, configs: dict, folder: str) -> tuple[dict[str, float], list[dict]]:
    """accuracy (sampled as PPO samples, and greedy), score, KL to SFT, entropy and length on held-out prompts; and the
    first few prompts with their answers."""
    checker, sampling = config.compare.checker, dataclasses.replace(configs["ppo"].ppo.sampling, num_samples=1)
    tokenizer = _tokenizer(config, folder)
    actor = open_actor(_model(config, folder), tokenizer)
    sft = open_actor(_model(config, configs["sft"].output_dir), tokenizer)
    scalar = builders.open_scalar(_model(config, configs["reward"].output_dir), tokenizer)
    reward = Reward(builders.scalar_engine(scalar, tokenizer))
    held_out = _held_out(config, tokenizer)
    prompts = collate.collate_prompts([held_out[i] for i in range(min(config.compare.num_prompts, len(held_out)))])
    rollout = respond(actor, prompts, sampling, config.seed)
    judge(rollout, ModelSource(reward), Reference(sft.engine))
    out = {"score": float(rollout.scores.mean()), "kl": rollout.mean_kl(),
           "entropy": -float(masked_mean(rollout.logprobs, rollout.action_mask)),
           "length": float(rollout.action_mask.sum(1).float().mean())}
    if checker:
        greedy = SamplingConfig(max_new_tokens=sampling.max_new_tokens, temperature=0)
        out = {"accuracy": fmean(is_right(checker, rollout))} | out
        out["accuracy_greedy"] = fmean(is_right(checker, respond(actor, prompts, greedy, 0)))
    answers = [{"prompt": text, "completion": completion, "score": float(score)} for text, completion, score, _ in
            zip(rollout.prompts.texts, rollout.completions, rollout.scores, range(NUM_SHOWN), strict=False)]
    return out, answers


def side_by_side(answers: dict[str, list[dict]]) -> list[dict]:
    """One row per prompt, one column per model: its answer and the answer's score."""
    first = next(iter(answers.values()), [])
    return [{"prompt": row["prompt"]} | {name: f"{rows[i]['completion']}\n(score {rows[i]['score']:.2f})"
                                         for name, rows in answers.items()} for i, row in enumerate(first)]


def _model(config: Config, folder: str) -> ModelConfig:
    return ModelConfig(builders.model_folder(folder), dtype=config.model.dtype)


def _tokenizer(config: Config, folder: str):  # noqa: ANN202
    return builders.open_tokenizer(_model(config, folder), config.data, READS["ppo"], config.seed)


def _held_out(config: Config, tokenizer) -> Sequence[dict]:  # noqa: ANN001
    return datasets.build(config.data, READS["ppo"], tokenizer, config.seed).held_out


def table(summary: dict) -> list[dict]:
    """One row per model: its figures and the seconds of its training."""
    names = [n for n in ("sft", "sft_longer", "ppo") if n in summary]
    return [{"model": n, **summary[n], "seconds": summary["seconds"][n]} for n in names]


def show(summary: dict, path: Path, num_prompts: int) -> None:
    """Show the table, and the alarms of PPO against SFT, on the terminal and in report.md beside `path`."""
    from hybrid_rlhf.report.terminal import summary_table

    summary_table(table(summary), title="Held-out prompts")
    accuracy = summary["reward"]["accuracy"]
    print("reward model: " + ("no pair was held out" if accuracy is None else f"held-out accuracy {accuracy:.3f}")
          + f"\nwritten to {path}")
    alarms = compared(summary["sft"], summary["ppo"], num_prompts)
    conclude_comparison(path.parent, "SFT and PPO on held-out prompts", table(summary), alarms)
    for alarm in alarms:
        print(f"alarm, {alarm.name}: {alarm.text}")
