"""How long a run says that it takes, beside how long it takes: before its first step, and after ten.

    python benchmarks/time_left.py [--models tiny 3m=FOLDER 135m=FOLDER] [--stages sft ...] [--json FILE]
                                   [--page docs/results/time_left.md]

Each case is a run of train.py with its defaults but for steps and lengths, in a process of its own, on rows of ragged
lengths (2 to 40 words). A ratio is said over real: of the line before the first step, the seconds from there to the end
of the run, its evaluation, answers, checkpoint, report and export included; and the same after ten steps. The aims: at
most 25% off, and at most 10% after ten steps. --cpu-time takes the processor time of one thread as the clock of the
whole run, on a machine that others use too: waiting for the disk is then no part of either side.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import machine, parser_of, run_apart, shown, table_of, write_rows, write_tables
from random_models import make_folders, tokenizer_of

STAGES = ("sft", "reward", "dpo", "grpo", "ppo")
AIMS = {"before": 0.25, "after10": 0.10}
STEPS = {"tiny": 60, "3m": 40, "135m": 14}
SHAPES = {"tiny": "tiny", "3m": "llama4m", "135m": "llama134m"}  # random weights, where no folder is named
TEXT = ("the film is a slow and lovely story of two friends who lose their way in a city that they never knew but find "
        "what they had looked for at home")


def write_data(folder: Path, words: Sequence[str], count: int = 800) -> None:
    """Rows for each kind of stage."""
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(least, most)))

    rows = [{"prompt": text(2, 10), "chosen": text(2, 40), "rejected": text(2, 40)} for _ in range(count)]
    kinds = {"sft": lambda r: {"prompt": r["prompt"], "completion": r["chosen"]}, "pairs": lambda r: r,
             "prompts": lambda r: {"prompt": r["prompt"]}}
    for name, of in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(of(row)) + "\n" for row in rows), encoding="utf-8")


def words_of(stage: str, folder: Path, model: str, steps: int) -> list[str]:
    """The command line of a case."""
    data = {"sft": "sft", "grpo": "prompts", "ppo": "prompts"}.get(stage, "pairs")
    words = ["--stage", stage, "--model.model_name_or_path", model, "--data.sources", str(folder / f"{data}.jsonl"),
             "--output_dir", str(folder / stage), "--train.max_steps", str(steps)]
    if data != "prompts":
        return words
    size = {"ppo": "16", "grpo": "4"}[stage]
    return [*words, "--roles.reward.model_name_or_path", str(folder / "reward"), "--data.max_prompt_length", "64",
            "--ppo.sampling.max_new_tokens", "32", "--train.per_device_train_batch_size", size]


def run_case(words: list[str], cpu_time: bool) -> dict:
    """The run, in this process: seconds said and real from the first estimate on, and from the tenth step on; and of
    each phase."""
    if cpu_time:
        time.perf_counter = time.process_time
    from hybrid_rlhf.cli import main
    from hybrid_rlhf.run.reporter import Reporter

    said: dict[str, tuple[float, float]] = {}
    paces, tell, step = [], Reporter.estimate, Reporter.step

    def note(name: str, pace) -> None:  # noqa: ANN001
        said.setdefault(name, (time.perf_counter(), pace.seconds_left()))

    def estimate(self: Reporter) -> None:
        tell(self)
        if self._has_estimate:
            note("before", self.progress.pace)

    def stepped(self: Reporter, number: int, *values: object) -> None:
        step(self, number, *values)
        paces[:] = [self.progress.pace]
        if number == 10:
            note("after10", self.progress.pace)

    Reporter.estimate, Reporter.step = estimate, stepped
    code = main(words)
    end = time.perf_counter()
    if code:
        raise SystemExit(f"the run ended with {code}: {' '.join(words)}")
    return {name: {"said": seconds, "real": end - at} for name, (at, seconds) in said.items()} | {
        "step": paces[0].step_seconds(), "phases": paces[0]._measured}


def rows_of(options: argparse.Namespace) -> Iterator[dict]:
    for named in options.models:
        name, _, path = named.partition("=")
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            if not path:
                path = str(folder / "models" / "base")
                make_folders(SHAPES[name], folder / "models", has_reward=False)
                tokenizer_of(512).save_pretrained(path)
            write_data(folder, TEXT.split() if named != name else [f"<{i}>" for i in range(3, 99)])
            needed = {*options.stages, *(["reward"] if {"grpo", "ppo"} & {*options.stages} else [])}
            for stage in (stage for stage in STAGES if stage in needed):
                steps = 11 if options.quick else STEPS[name]
                found = run_apart(run_case, words=words_of(stage, folder, path, steps), cpu_time=options.cpu_time)
                if stage in options.stages:
                    yield row_of(name, stage, steps, found)


def row_of(name: str, stage: str, steps: int, found: dict) -> dict:
    ratios = {at: found[at]["said"] / found[at]["real"] for at in AIMS}
    print(f"{name:5} {stage:7}" + "   ".join(f"{at} {shown(found[at]['said'])}/{shown(found[at]['real'])} s = "
                                             f"{ratios[at]:.2f}" for at in AIMS), found["phases"], flush=True)
    return {"case": f"{name} {stage}", "model": name, "stage": stage, "steps": steps, **found, "ratios": ratios,
            "machine": machine()}


def tables_of(rows: Sequence[dict]) -> list[str]:
    errors = {at: [abs(row["ratios"][at] - 1) for row in rows] for at in AIMS}
    return [table_of(("model", "stage", "steps", "a step, s", "before the first step: said / real s",
                      "after ten: said / real s"),
                     [(row["model"], row["stage"], row["steps"], f"{row['step']:.3g}",
                       *(f"{row[at]['said']:.3g} / {row[at]['real']:.3g} = **{row['ratios'][at]:.2f}**" for at in AIMS))
                      for row in rows]),
            table_of(("how far off", "asked", "median", "worst", "within"),
                     [(at, f"{aim:.0%}", f"{statistics.median(errors[at]):.0%}", f"{max(errors[at]):.0%}",
                       f"{sum(e <= aim for e in errors[at])} of {len(rows)}") for at, aim in AIMS.items()]),
            table_of(("machine",), [(rows[0]["machine"],)])]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), help="tiny, 3m or 135m, each with =FOLDER or of "
                        "random weights")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--cpu-time", action="store_true", help="processor time in place of the wall's")
    parser.add_argument("--page", help="write the tables to this Markdown page")
    options = parser.parse_args(argv)
    rows = write_rows(rows_of(options), options.json)
    if options.page:
        write_tables(Path(options.page), *tables_of(rows))


if __name__ == "__main__":
    sys.exit(main())
