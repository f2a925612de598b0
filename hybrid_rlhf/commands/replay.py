"""hybrid-rlhf replay: take a run's steps again, score its rollouts by another reward, or go on from a step otherwise.

RUN stays as it is. Without more options its steps are taken again and compared with its metrics and samples.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_rlhf.core import own_files
from hybrid_rlhf.core.config import check, command_flags
from hybrid_rlhf.core.distributed import world_size
from hybrid_rlhf.core.errors import INTERRUPTED
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.report.summary import METRICS, SAMPLES
from hybrid_rlhf.training.registry import STAGES

if TYPE_CHECKING:
    from hybrid_rlhf.rewards.functions import FunctionSource
    from hybrid_rlhf.training.past_run import Past, Token, Watch

DIFFERENT = 1  # exit code: the steps were not the same again
MADE = "rollouts.json"  # in the output folder: of which run the rollouts there are, and how its steps compared


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the settings that a fork changes."""
    flags = command_flags("replay", __doc__ or "")
    flags.add_argument("run", nargs="?", type=expanded, metavar="RUN", help="the folder of a run that samples")
    flags.add_argument("--reward", metavar="FILE.py:NAME", help="also score all rollouts by this function")
    flags.add_argument("--recorded", action="store_true",
                       help="with --reward: only score the samples on record, a few a logged step; trains nothing")
    flags.add_argument("--from", dest="first", type=int, metavar="STEP",
                       help="begin at the newest checkpoint of at most so many steps; default: at the beginning")
    flags.add_argument("--to", type=int, metavar="STEP", help="the last step that is taken again")
    flags.add_argument("--fork", type=int, metavar="STEP",
                       help="go on after this step with the settings that follow, such as --ppo.kl_coef 0.1")
    flags.add_argument("--against", type=expanded, metavar="RUN",
                       help="say where the rollouts of RUN and of this run, both taken again or forks, differ first")
    flags.add_argument("--output_dir", type=expanded, metavar="DIR",
                       help="folder of the result; default: RUN_replay, RUN_replay_FROM_TO of a "
                            "part, RUN_fork_STEP of a fork")
    options, rest = flags.parse_known_args(argv)
    check(options.run is not None, "replay: no run; give its folder, such as outputs/grpo")
    check(not rest or options.fork is not None, f"replay: unknown argument {' '.join(rest[:1])}; settings are changed "
                                                "with --fork STEP, and --help lists the rest")
    check(not options.recorded or options.reward, "replay: --recorded is for --reward; add it, or leave it out")
    check(options.fork is None or not (options.reward or options.against),
          "replay: --fork makes a run of its own; score or compare that afterwards")
    return options, rest


def main(argv: list[str] | None = None) -> int:
    """0: done; 1: the steps were not the same again, and no other reward was asked for."""
    from hybrid_rlhf.core.startup import relaxed_gc
    from hybrid_rlhf.run.loop import Stopped
    from hybrid_rlhf.run.signals import stops_as_by_hand

    options, rest = parse(argv)
    words = ["hybrid-rlhf", "replay", *(sys.argv[2:] if argv is None else argv)]
    try:
        with stops_as_by_hand(), relaxed_gc():
            return _carry_out(options, rest, shlex.join(words))
    except Stopped as stopped:  # its notes may be of the run that was taken again, which is gone
        again = "goes on" if options.fork is not None else "begins again"
        print(f"{stopped}; the same command {again}", file=sys.stderr)
        return INTERRUPTED


def _carry_out(options: argparse.Namespace, rest: list[str], command: str) -> int:
    from hybrid_rlhf.rewards.functions import open_functions
    from hybrid_rlhf.training.past_run import ROLLOUTS

    run = Path(options.run)
    check(world_size() == 1, "replay runs in one process; start it without torchrun or deepspeed")
    _check_stage(run)
    if options.against:
        return _compare(run, Path(options.against))
    named = run if run.name not in ("", "..") else run.resolve()  # . and .. have no name to add to
    part = f"_{options.first or 1}_{options.to or 'end'}" if options.first or options.to else ""
    made = f"{named}_replay{part}" if options.fork is None else f"{named}_fork_{options.fork}"
    out = Path(options.output_dir or made)
    check(run.resolve() not in (out.resolve(), *out.resolve().parents),
          "replay: --output_dir is RUN itself or inside it, which stays as it is; give another one")
    if options.fork is not None:
        return _fork(run, out, options.fork, rest, command)
    source = open_functions([options.reward], {}, 60.0)[0] if options.reward else None
    code, kept = 0, run / ROLLOUTS  # of a fork
    if not options.recorded and (source is None or not kept.exists()):
        code, kept = _replay(run, out, options, is_needed=source is None), out / ROLLOUTS
    if source is None:
        return code
    _rescore(run / SAMPLES if options.recorded else kept, out, source, options)
    return 0  # on a card no run is the same again, and its rewards are scored all the same


def _check_stage(run: Path) -> None:
    from hybrid_rlhf.run.runfile import read_run

    stage = read_run(run).stage
    check(stage != "all", f"replay: {run} holds several stages; give that of one, such as {run / 'ppo'}")
    check(stage in STAGES, f"replay: {run} is a run of {stage}, whose step is a function from Python; start it again "
                           "from there")
    check(hasattr(importlib.import_module(STAGES[stage].module).Config, "method"),
          f"replay: {run} is a run of --stage {stage}, which samples no rollouts; there are those of ppo, grpo and "
          "their like, online_dpo, rejection and distill")


def _open(run: Path, words: list[str] = ()) -> tuple[Past, object, object]:  # type: ignore[assignment]
    """The run on record, its stage's module, and its settings with those in `words`."""
    from hybrid_rlhf.cli import prepare_device, read_settings
    from hybrid_rlhf.run.runfile import SETTINGS_FILE, read_run
    from hybrid_rlhf.training.past_run import open_past

    stage = read_run(run).stage
    file = ["--config", str(run / SETTINGS_FILE)]
    config, _ = read_settings(stage, file, "hybrid-rlhf")
    past = open_past(run, config)
    prepare_device(is_bounded=False)
    for line in past.changes():
        print(f"warning: {line}", file=sys.stderr)
    return past, importlib.import_module(STAGES[stage].module), read_settings(stage, [*file, *words], "hybrid-rlhf")[0]


def _replay(run: Path, out: Path, options: argparse.Namespace, *, is_needed: bool) -> int:
    """Take the steps again into out/rollouts.jsonl; is_needed: even where that has them already."""
    from hybrid_rlhf.report.rescored import FIGURES, PAGE, PICTURE
    from hybrid_rlhf.run import checkpoint, runfile
    from hybrid_rlhf.training.past_run import ROLLOUTS, RolloutFile, Watch, again

    made, record = out / MADE, runfile.run_at(run)
    wanted = {"run": str(run.resolve()), "started": record and record.started, "from": options.first, "to": options.to,
              "bytes": (run / METRICS).stat().st_size if (run / METRICS).exists() else 0}  # a run may have gone on
    known = json.loads(made.read_text(encoding="utf-8")) if made.exists() else {}
    check(known or not out.exists() or {path.name for path in out.iterdir()} <= {PAGE, FIGURES, PICTURE},
          f"replay: {out} holds something else; give another --output_dir")
    if known.get("compared") and known == wanted | {"compared": known["compared"]} and not is_needed:
        print(f"the rollouts are those in {out / ROLLOUTS}: {known['compared']}", file=sys.stderr)
        return 0
    past, stage, _ = _open(run)
    check(options.to is None or options.to >= 1,
          f"replay: --to {options.to}: the first step is 1; give that or a later one")
    last = min(options.to or past.last, past.last)
    start = past.start(options.first)
    check(start is None or checkpoint.number(start) < last,
          f"replay: {start} is of the last step, and none is left to take again; give an earlier --from")
    out.mkdir(parents=True, exist_ok=True)
    runfile.claim(out, ROLLOUTS)
    try:
        made.write_text(json.dumps(wanted), encoding="utf-8")  # ours, and not whole
        file = RolloutFile(out / ROLLOUTS)
        watch = Watch(file.take, last, past, begin=lambda _step: file.begin(0))
        with own_files.fresh_folder(out.parent) as folder:
            lines = again(past, stage.run, folder, start, watch)  # type: ignore[attr-defined]
        compared = _print_comparison(lines, watch)
        own_files.write_file(made, json.dumps(wanted | {"compared": compared}, indent=1) + "\n")
    finally:
        runfile.release(out)
    print(f"rollouts: {file.path} ({file.path.stat().st_size / 2**20:.1f} MiB)")
    return DIFFERENT if watch.differs else 0


def _print_comparison(lines: list[str], watch: Watch) -> str:
    """Print whether the steps were the same again; returns it in a sentence."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)
    if watch.differs:
        step, what, before, now = watch.differs
        text = f"step {step} is the first that is not the same again: {what} was {before}, and is {now}"
        text += f"; steps {watch.first} to {step - 1} are" * (step > watch.first)
    else:
        text = (f"steps {watch.first} to {watch.step} are the same again, to the bit: {watch.num_compared} metrics and "
                "samples on record (times and memory are not compared)")
    print(text)
    return text


def _rescore(path: Path, out: Path, source: FunctionSource, options: argparse.Namespace) -> None:
    """Score the responses in `path`, and write and print both curves."""
    from hybrid_rlhf.report import rescored
    from hybrid_rlhf.rewards.functions import parameters
    from hybrid_rlhf.training import past_run

    rows = next(past_run.read_rollouts(path), (0, []))[1]
    check(rows, f"replay: {path} has no samples; choose a run that has taken a step")
    source.check_columns([name for name in rows[0].get("columns", {}) if name != "prompt"])
    check(not options.recorded or "completion_ids" not in parameters(source.function)[0],
          f"replay: {source.name} takes completion_ids, and samples on record are texts; leave out --recorded")
    history = past_run.rescored(past_run.read_rollouts(path), source)
    out.mkdir(parents=True, exist_ok=True)
    of = f"{sum(row['responses'] for row in history)} responses of {len(history)} steps, from {path}"
    facts = {"run": options.run, "scored by": options.reward, "responses": of}
    if compared := _compared(path.parent):
        facts["taken again"] = compared  # they may be others than the run's
    paths = rescored.write(out, history, source.name, facts)
    print(*rescored.shown(history, source.name), rescored.verdict(history, source.name), rescored.RULE,
          f"written: {', '.join(map(str, paths))}", sep="\n")


def _compared(folder: Path) -> str | None:
    """How the steps of the rollouts in `folder` compared with their run; None for those of a fork, or not whole."""
    return json.loads((folder / MADE).read_text(encoding="utf-8")).get("compared") if (folder / MADE).exists() else None


def _fork(run: Path, out: Path, step: int, words: list[str], command: str) -> int:
    from hybrid_rlhf.run import checkpoint, resume
    from hybrid_rlhf.training import past_run

    past, stage, config = _open(run, [*words, "--output_dir", str(out)])
    check(1 <= step <= past.last, f"replay: --fork {step}: {run} has steps 1 to {past.last}; give one of them")
    check(not out.exists() or not any(out.iterdir()) or past_run.forked_at(out, run) == step,
          f"replay: {out} holds something else; give another --output_dir")
    with own_files.fresh_folder(out.parent) as folder:
        watch = past_run.fork(past, stage.run, config, step, folder / "before", command)  # type: ignore[attr-defined]
        if watch is not None:
            _print_comparison([], watch)
        if step == past.last:  # there is nothing to compare with
            return 0
        saved = checkpoint.at(folder / "before" / resume.FOLDER, step)
        token, count, watch = past_run.first_difference(
            past, stage.run, out / past_run.ROLLOUTS, folder / "after",  # type: ignore[attr-defined]
            saved if saved.exists() else None)
    line = _where(token, str(out), str(run), out / "model", count)
    if watch.differs:
        line += f" ({run} was not the same again: {watch.differs.what} of step {watch.differs.step})"
    past_run.note(out, line)
    print(line)
    return 0


def _where(token: Token | None, here: str, there: str, model: Path, count: int) -> str:
    """The first token that differs, in a sentence. count: steps that were compared."""
    from hybrid_rlhf.models.tokenizer import load_tokenizer

    if not count:
        return f"no rollouts were compared: {here} and {there} have them of no step in common"
    if token is None:
        return f"no token of {here} differs from {there} in the {count} steps that both have"
    place = f"step {token.step}, response {token.row + 1}"
    if token.place is None:
        return f"the rollouts of {here} and {there} differ from {place} on: it answers another prompt"
    tokenizer = load_tokenizer(str(model)) if model.exists() else None

    def word(number: int | None) -> str:
        return "its end" if number is None else repr(tokenizer.decode([number])) if tokenizer else f"token {number}"

    return (f"the first token that differs: {place}, token {token.place + 1}: {word(token.here)} in {here}, "
            f"{word(token.there)} in {there}")


def _compare(run: Path, other: Path) -> int:
    from hybrid_rlhf.training import past_run

    steps, notes = [], []
    for folder in (run, other):
        path = next((path for path in (folder / past_run.ROLLOUTS, Path(f"{folder}_replay") / past_run.ROLLOUTS)
                     if path.exists()), None)
        check(path is not None, f"replay: {folder} has no {past_run.ROLLOUTS}, as forks have; take its steps again "
                                f"first (hybrid-rlhf replay {folder})")
        steps.append(past_run.read_rollouts(path))
        notes += [f"of {folder}: {compared}"] if (compared := _compared(path.parent)) else []
    both = past_run.in_common(*steps)
    count, token = 0, None
    for count, (step, here, there) in enumerate(both, 1):  # noqa: B007 - the number of steps is printed
        if token := past_run.first_token(step, here, there):
            break
    check(count, f"replay: {run} and {other} have no step in common; give two that both have rollouts of one")
    print(_where(token, str(run), str(other), run / "model", count), *notes, sep="\n")
    return 0
