"""The entry point of `hybrid-rlhf` and train.py: a stage's name and its settings become a run."""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from hybrid_rlhf import __version__
from hybrid_rlhf.core.config import UserError, check, nearest, parse
from hybrid_rlhf.core.errors import error_line, escape_control
from hybrid_rlhf.core.memory import bound_product_caches, grow_segments
from hybrid_rlhf.core.options import value_of
from hybrid_rlhf.core.own_files import refusal
from hybrid_rlhf.core.startup import lasting_streams, quiet_libraries, relaxed_gc
from hybrid_rlhf.training.registry import STAGES, variant_options

SWITCHES = ("preview", "check_signal", "plan", "memory", "cards")  # options of every stage that are not settings
COMMANDS = {"chat": "hybrid_rlhf.commands.learning_chat", "doctor": "hybrid_rlhf.commands.doctor",
            "qualify": "hybrid_rlhf.commands.qualify", "init": "hybrid_rlhf.commands.init",
            "export": "hybrid_rlhf.commands.export", "label": "hybrid_rlhf.commands.label",
            "serve": "hybrid_rlhf.commands.learning_server", "studio": "hybrid_rlhf.studio.command",
            "replay": "hybrid_rlhf.commands.replay"}

USAGE = """usage: {prog} demo
       {prog} --stage STAGE [--config FILE.yaml] [--dotted.key value ...]
       {prog} chat --model DIR
       {prog} serve --model DIR [--reward_model DIR] [--port 8000]
       {prog} studio [--outputs DIR]
       {prog} label --data FILE [--model DIR] --judge.model DIR --output FILE
       {prog} export --model DIR --output_dir DIR [--gguf f16] [--ollama]
       {prog} replay RUN [--reward FILE.py:NAME] [--fork STEP --dotted.key value ...]
       {prog} init
       {prog} doctor
       {prog} qualify
       {prog} --version

Stages:
{stages}

demo trains the embedded task through all three stages in a few minutes, without network.
The first word may be a stage's name: {prog} sft is {prog} --stage sft, and --model DIR is short for
--model.model_name_or_path DIR. {prog} --stage STAGE --help lists every option of a stage with its default.
--preview prints three rendered examples of its data; --print_config its complete settings; --plan the memory that it
needs, before any weight is loaded (exit code 3: more than there is), with --cards 2x8x80GiB on cards that are not
here. --memory 24GiB chooses what fits, and trains. --check_signal says in a minute whether a stage that samples has
anything to learn from.
--preset 8gb, 12gb, 16gb, 24gb, 48gb, 80gb or cpu: settings for a card of that size; what you give beside it wins.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code (0 done, 2 the input is wrong, 3 a plan does not fit, 130 stopped
    with a checkpoint)."""
    words = sys.argv[1:] if argv is None else argv
    argv = [word for word in words if not word.startswith("--local_rank=")]  # deepspeed's launcher adds it
    quiet_libraries()
    grow_segments()  # before torch allocates anything
    bound_product_caches()
    if argv == ["--version"]:
        print(f"hybrid-rlhf {__version__}")
        return 0
    if argv and argv[0] in COMMANDS:
        with lasting_streams(*(["stderr"] if argv[0] == "chat" else [])):  # a chat ends where its reader is gone
            try:
                return importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
            except UserError as error:
                return _fail(2, error_line(error))
            except KeyboardInterrupt:
                return _fail(130, f"stopped\ngo on: {_again(argv)} (it begins again)")
            except Exception as error:
                if line := _refusal_line(error, "give the same command again"):
                    return _fail(2, line)
                raise
    with lasting_streams():
        return _main(argv)


def _main(argv: list[str]) -> int:
    try:
        _join()
        with relaxed_gc():
            return _train(argv)
    except UserError as error:
        return _fail(2, error_line(error), error)
    except KeyboardInterrupt as error:
        if not hasattr(error, "__notes__"):  # before the run began, or between two
            error.add_note(f"go on: {_again(argv)}")
        return _fail(130, "stopped", error)
    except Exception as error:
        if lost := _lost_process(error):  # first: its text may name any system error
            return _fail(1, lost)
        if short := _shortage(error):  # where no block inside gave better advice
            return _fail(2, short, error)
        if line := _refusal_line(error, "the same command goes on from the last checkpoint"):
            return _fail(2, line, error)
        if not _is_one_of_several():
            raise
        return _fail(1, traceback.format_exc())


def _again(argv: Sequence[str]) -> str:
    """The command line that started this process."""
    program = sys.argv[0]
    return shlex.join([*(["python", program] if program.endswith(".py") else ["hybrid-rlhf"]), *argv])


def _lost_process(error: Exception) -> str | None:
    """One line where `error` comes from another process that has died or failed; else None."""
    if not _is_one_of_several():
        return None
    from hybrid_rlhf.core.failure import lost_process

    return lost_process(error)


def _shortage(error: Exception) -> str | None:
    """One line where `error` says that memory ran out: what was going on, and what would help; else None."""
    from hybrid_rlhf.core import activity
    from hybrid_rlhf.core.memory import SMALLER, is_out_of_memory

    if not is_out_of_memory(error):
        return None
    return error_line(UserError(f"out of memory{f' ({activity.now()})' if activity.now() else ''}; {SMALLER}"))


def _refusal_line(error: Exception, then: str) -> str | None:
    """One line where the system refused a file, wherever that was: the reason, its name, what to do; else None."""
    if (refused := refusal(error)) is None:
        return None
    where = f"{error.filename}: " if getattr(error, "filename", None) else ""
    return error_line(UserError(f"{where}{refused}, and {then}"))


def _is_one_of_several() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def _join() -> None:
    """Join the other processes of a launcher before anything can go wrong, and leave the terminal to the main one."""
    if not _is_one_of_several():
        return
    from hybrid_rlhf.core import distributed, failure

    try:
        failure.join()
    except (ValueError, RuntimeError) as error:
        raise UserError(f"cannot join the other processes: {str(error).splitlines()[0]}; start them by torchrun or "
                        "deepspeed") from error
    if not distributed.is_main():
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process


def _fail(code: int, message: str, error: BaseException | None = None) -> int:
    """End with `message` and the notes of `error`, in which a run says what is where and how to resume."""
    message = "\n".join([message, *map(escape_control, getattr(error, "__notes__", []))])
    if _is_one_of_several():
        from hybrid_rlhf.core.failure import fail

        return fail(code, message)
    print(message, file=sys.stderr)
    return code


def _train(argv: list[str]) -> int:
    prog = "hybrid-rlhf" if os.path.basename(sys.argv[0]).startswith("hybrid") else "train.py"
    name, rest = _take_stage(argv, prog)
    if name is None:
        return 0
    card, rest = _take_preset(rest)
    stage = importlib.import_module(STAGES[name].module)
    default = stage.default_config(rest) if hasattr(stage, "default_config") else None
    config, switches = read_settings(name, [*_flags(card), *_with_model(rest)], prog, default)
    if default:
        print(f"no --config, model or data given: the embedded demo ({os.path.relpath(default)})", file=sys.stderr)
    _check_sources(config)
    if switches["preview"]:
        _preview(stage, config)
        return 0
    check(not switches["check_signal"] or hasattr(stage, "check_signal"),
          f"--check_signal is for stages that sample and learn from rewards (ppo, grpo, rejection, ...); --stage "
          f"{name} learns from what is there, and --preview shows it")
    check(switches["cards"] is None or switches["plan"], "--cards is for --plan; add it, or leave --cards out")
    if switches["plan"] or switches["memory"] is not None:
        config, code = _plan(config, switches)
        if code or switches["plan"]:
            return code
    prepare_device(is_bounded=switches["memory"] is not None)
    if card and (warning := _other_card(card)):
        print(warning, file=sys.stderr)
    if switches["check_signal"]:
        stage.check_signal(config)
        return 0
    return _run(stage, config, command=_again(argv))


def read_settings(name: str, words: list[str], prog: str = "hybrid-rlhf", default: str | None = None
                  ) -> tuple[object, dict]:
    """The settings of a stage from a command line, and the switches. default: a file with settings that come before
    these. UserError, in one line, for options that the stage does not have; nothing is read but files of settings."""
    from hybrid_rlhf.training import unread_options

    row, base = STAGES[name], STAGES[name].base or name
    config, switches = parse(importlib.import_module(row.module).Config, [*row.preset, *words],
                             prog=f"{prog} --stage {name}", description=row.help, default_config=default,
                             extra=SWITCHES, unused=unread_options.of_stage(name))
    # a variant's settings run under its base too
    variant_base = STAGES[config.stage].base if config.stage in STAGES else None
    check(config.stage in (name, base) or variant_base == name,
          f"--stage {name}, but the settings say stage: {config.stage}; give --stage {config.stage}, or another file")
    _check_variant(name, config)
    return dataclasses.replace(config, stage=name), switches


def _preview(stage: ModuleType, config: object) -> None:
    """Print rendered examples of the data, trained tokens marked."""
    from hybrid_rlhf.data.preview import show

    for preview in stage.previews(config):
        show(preview)


def _check_sources(config: object) -> None:
    """UserError for missing data, before a model is loaded."""
    from hybrid_rlhf.data.sources import check_there

    for source in config.data.sources if hasattr(config, "data") else ():
        check_there(source)


def _check_variant(name: str, config: object) -> None:
    """UserError where the settings turn a variant into another method than the one that its name says."""
    base = STAGES[name].base
    for option, value in variant_options(name).items():
        actual = value_of(config, option)
        check(actual == value, f"--stage {name} is --stage {base} with {option} {value}, and the settings say "
                              f"{option} {actual}; leave that out, or give --stage {base}")


def _plan(config: object, switches: dict) -> tuple[object, int]:
    """Carry out --plan and --memory: the settings to go on with, and the exit code to stop with."""
    from hybrid_rlhf.memory_plan.amounts import parse_bytes, parse_cards
    from hybrid_rlhf.training.memory_options import carry_out

    memory, cards = switches["memory"], switches["cards"]
    check(cards is None or memory is None, "--cards and --memory: a plan for cards knows their memory; leave out one")
    memory = None if memory is None else parse_bytes(memory, "--memory")
    cards = None if cards is None else parse_cards(cards, "--cards")
    return carry_out(config, memory=memory, only_plan=switches["plan"], cards=cards)


def prepare_device(*, is_bounded: bool) -> None:
    """Set how this process allocates and frees memory. On a CPU with --memory, saving memory counts for more than the
    time that the system takes to map blocks again. With a card, the computer's memory is for loading and offloading,
    and freed blocks go back."""
    from hybrid_rlhf.core.accelerator import keep_within_card
    from hybrid_rlhf.core.distributed import device
    from hybrid_rlhf.core.memory import give_back_freed_blocks, keep_freed_blocks

    if device().type == "cpu":
        (give_back_freed_blocks if is_bounded else keep_freed_blocks)()
    keep_within_card()


def _run(stage: ModuleType, config: object, command: str) -> int:
    from hybrid_rlhf.core.distributed import shutdown, world_size
    from hybrid_rlhf.core.errors import shown
    from hybrid_rlhf.run.loop import Stopped
    from hybrid_rlhf.run.signals import stops_as_by_hand
    from hybrid_rlhf.training import announce

    code, has_failed = 0, True
    try:
        with stops_as_by_hand():
            stage.run(config, command=command)
            announce.after(config, sys.argv[0])
        has_failed = False
    except Stopped as stopped:
        print(shown(stopped), file=sys.stderr)
        if stopped.is_finished and config.stage == "all":  # the stages after it are not
            print(f"go on: {command}", file=sys.stderr)
        elif stopped.is_finished:
            announce.onward(config, sys.argv[0])
        code, has_failed = 130, False
    finally:
        # At exit, not here: a second run in this process needs the group, which DeepSpeed holds on to. One of several
        # processes that failed would wait for others that wait for it.
        if not has_failed or world_size() == 1:
            atexit.unregister(shutdown)
            atexit.register(shutdown)
    return code


def _with_model(argv: list[str]) -> list[str]:
    """argv with --model DIR in its long form."""
    return [f"--model.model_name_or_path{word.removeprefix('--model')}" if word.split("=")[0] == "--model" else word
            for word in argv]


def _take_preset(argv: list[str]) -> tuple[str | None, list[str]]:
    """The CARD of `--preset CARD`, and the other arguments."""
    place = next((i for i, word in enumerate(argv) if word.split("=")[0] == "--preset"), None)
    if place is None:
        return None, argv
    _, has_value, value = argv[place].partition("=")
    after = argv[place + 1:] if has_value else argv[place + 2:]
    value = value if has_value else next(iter(argv[place + 1:]), "")
    return value, [*argv[:place], *after]


def _flags(card: str | None) -> list[str]:
    from hybrid_rlhf.memory_plan.presets import flags

    return flags(card) if card is not None else []


def _other_card(name: str) -> str | None:
    import torch

    from hybrid_rlhf.core.distributed import device
    from hybrid_rlhf.memory_plan.presets import mismatch

    return mismatch(name, torch.cuda.mem_get_info()[1] / 2**30 if device().type == "cuda" else None)


def _take_stage(argv: list[str], prog: str) -> tuple[str | None, list[str]]:
    """The value of --stage (--stage=X too, or the first word; demo is all) and the other arguments; prints the usage
    where it alone is asked for."""
    rest, name = [], None
    if argv and argv[0] == "demo":
        argv = ["all", *argv[1:]]
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # its models gain nothing from a second; torch comes later
    first = next(iter(argv), "-")
    check(first[:1] == "-" or first in STAGES, f"{first}: there is no such command or stage; choose demo, "
          f"{', '.join([*COMMANDS, *STAGES])}{nearest(first, ['demo', *COMMANDS, *STAGES])}")
    words = iter(["--stage", *argv] if first in STAGES else argv)
    for word in words:
        if word == "--stage":
            name = next(words, None)
            check(name is not None, f"--stage needs a value: {', '.join(STAGES)}")
        elif word.startswith("--stage="):
            name = word.split("=", 1)[1]
        else:
            rest.append(word)
    if name is None:
        check(not rest or rest[0] in ("-h", "--help"), f"--stage is missing: choose {', '.join(STAGES)}")
        table = "\n".join(f"  {key:12} {row.help}" for key, row in STAGES.items())
        print(USAGE.format(prog=prog, stages=table))
        return None, rest
    check(name in STAGES, f"--stage {name}: there is no such stage; choose {', '.join(STAGES)}{nearest(name, STAGES)}")
    return name, rest
