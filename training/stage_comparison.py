"""Compare the stages on held-out prompts: SFT, SFT continued for as long as PPO took, and PPO."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from hybrid_rlhf.core.distributed import is_main
from hybrid_rlhf.core.options import check_values, one_of
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.core.tensors import masked_mean
from hybrid_rlhf.data import collate, datasets
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.report.alarms import compared
from hybrid_rlhf.report.summary import compare_stages, conclude_comparison
from hybrid_rlhf.rewards.model import ModelSource
from hybrid_rlhf.roles import Reference, Reward
from hybrid_rlhf.run import runfile
from hybrid_rlhf.training import builders, step1_sft
from hybrid_rlhf.training.registry import READS
from hybrid_rlhf.training.scored_answers import CHECKERS, is_right, judge, open_actor, respond, share

NUM_SHOWN = 8  # prompts whose answers the report shows side by side


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


def run(config, configs: dict, seconds: dict[str, float], command: str) -> dict:  # noqa: ANN001
    """Measure the three policies, print the table, write output_dir/summary.json and return it. Without a held-out
    prompt (of few rows) nothing is measured, and one line says so."""
    folders = {"sft": configs["sft"].output_dir, "ppo": configs["ppo"].output_dir}
    took = _recorded_seconds(configs)
    if not _has_prompts(config, folders["sft"]):
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


def _recorded_seconds(configs: dict) -> dict[str, float]:
    """Seconds of each stage by its run's record: a rerun that skips a finished stage must not report zero."""
    return {name: runfile.read_run(stage.output_dir).seconds for name, stage in configs.items()}


def longer_sft(config, sft, limit: float, command: str) -> str:  # noqa: ANN001
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


def measure(config, configs: dict, folder: str) -> tuple[dict[str, float], list[dict]]:  # noqa: ANN001
    """accuracy (sampled as PPO samples, and greedy), score, KL to SFT, entropy and length on held-out prompts; and the
    first few prompts with their answers."""
    def open_one(path: str) -> ModelConfig:
        return ModelConfig(builders.model_folder(path), dtype=config.model.dtype)

    checker, sampling = config.compare.checker, dataclasses.replace(configs["ppo"].ppo.sampling, num_samples=1)
    tokenizer = builders.open_tokenizer(open_one(folder), config.data, READS["ppo"], config.seed)
    actor = open_actor(open_one(folder), tokenizer)
    sft = open_actor(open_one(configs["sft"].output_dir), tokenizer)
    reward = Reward(builders.scalar_engine(builders.open_scalar(open_one(configs["reward"].output_dir), tokenizer),
                                           tokenizer))
    prompts = _prompts(config, tokenizer)
    rollout = respond(actor, prompts, sampling, config.seed)
    judge(rollout, ModelSource(reward), Reference(sft.engine))
    out = {"score": float(rollout.scores.mean()), "kl": rollout.mean_kl(),
           "entropy": -float(masked_mean(rollout.logprobs, rollout.action_mask)),
           "length": float(rollout.action_mask.sum(1).float().mean())}
    if checker:
        greedy = SamplingConfig(max_new_tokens=sampling.max_new_tokens, temperature=0)
        out = {"accuracy": share(is_right(checker, rollout))} | out
        out["accuracy_greedy"] = share(is_right(checker, respond(actor, prompts, greedy, 0)))
    answers = [{"prompt": text, "completion": completion, "score": float(score)} for text, completion, score, _ in
            zip(rollout.prompts.texts, rollout.completions, rollout.scores, range(NUM_SHOWN), strict=False)]
    return out, answers


def side_by_side(answers: dict[str, list[dict]]) -> list[dict]:
    """One row per prompt, one column per model: its answer and the answer's score."""
    first = next(iter(answers.values()), [])
    return [{"prompt": row["prompt"]} | {name: f"{rows[i]['completion']}\n(score {rows[i]['score']:.2f})"
                                         for name, rows in answers.items()} for i, row in enumerate(first)]


def _has_prompts(config, folder: str) -> bool:  # noqa: ANN001
    model = ModelConfig(builders.model_folder(folder), dtype=config.model.dtype)
    tokenizer = builders.open_tokenizer(model, config.data, READS["ppo"], config.seed)
    return len(datasets.build(config.data, READS["ppo"], tokenizer, config.seed).held_out) > 0


def _prompts(config, tokenizer):  # noqa: ANN001, ANN202
    held_out = datasets.build(config.data, READS["ppo"], tokenizer, config.seed).held_out
    rows = [held_out[i] for i in range(min(config.compare.num_prompts, len(held_out)))]
    return collate.collate_prompts(rows)


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
