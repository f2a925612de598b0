"""What lies beside, behind and below the folders that a command is given; and settings that name code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from fault_tries.attempt import Group, Try, expect
from fault_tries.prepared import SFT, dies_before_step, take_killed
from fault_tries.product import command, contents, finished, refused, take

MINE = "years of work"
EXPORT = ["export", "--model", "straight"]


def mine(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(MINE)


def dies_at_rename(number: int) -> Callable[[], None]:
    """In a command's process: it ends, as by SIGKILL, before its so-manieth rename."""
    def prepare() -> None:
        numbers = count(1)

        def counted(act: Callable, *given: object, **named: object) -> object:
            return os._exit(9) if next(numbers) == number else act(*given, **named)

        os.replace, os.rename = partial(counted, os.replace), partial(counted, os.rename)

    return prepare


NEAR = ["exp/mine.tmp/thesis", "exp/mine.old/thesis", "exp/.mine/thesis", "exp/.mine.tmp/thesis", "exp/mine~/thesis",
        "exp/.hybrid_rlhf-mine/thesis", "exp/.hybrid_rlhf-0123456789abcdefg/thesis", "exp/mine.bak", "exp/model/thesis"]


def export_beside(names: list[str], place: Path) -> None:
    """Folders whose names are almost those of the export stay as they are."""
    take(place, "straight")
    for name in names:
        mine(name)
    before = contents("exp")
    finished(command(*EXPORT, "--output_dir", "exp/mine"))
    expect(contents("exp", besides=["mine"]) == before, "what lay beside the export was changed")


ONTO = {"a folder with a file": "full", "a file": "file", "the run itself": "straight", "its model": "straight/model",
        "a folder below a file": "file/mine", "a link to a full folder": "link", "a model": "base"}


def onto(words: list[str], target: str, said: str, place: Path) -> None:
    """What is there is never replaced."""
    take(place, "base", "sft.jsonl", "straight")
    mine("full/thesis"), mine("file")
    os.symlink("full", "link")
    before = contents(".", besides=["cache"])
    refused(command(*words, "--output_dir", target), said)
    expect(contents(".", besides=["cache"]) == before, "something was changed")


def export_killed(number: int, place: Path) -> None:
    """Killed at a rename: what was there stays, and the same command does it."""
    take(place, "straight")
    mine("exp/mine.tmp/thesis")
    Path("exp/mine").mkdir()
    words = [*EXPORT, "--output_dir", "exp/mine"]
    killed = command(*words, prepare=dies_at_rename(number))
    expect(Path("exp/mine.tmp/thesis").read_text() == MINE, "what lay beside it was changed")
    if killed.code != 0:
        expect(killed.code == 9, f"exit code {killed.code}")
        shutil.rmtree("exp/mine") if Path("exp/mine/model.safetensors").exists() else None
        finished(command(*words))
    expect(Path("exp/mine/model.safetensors").exists(), "no model")


def run_beside(place: Path) -> None:
    """A run leaves what it did not make in its folder, through kills, resume and a start anew."""
    take(place, "base", "sft.jsonl")
    expect(command(*SFT, prepare=dies_before_step(4)).code == 9, "was not killed")
    names = ["run/model.tmp/thesis", "run/notes.txt", "run/plots/mine.png", "run/checkpoints/.step-00000002.tmp/thesis",
             "run/checkpoints/mine/thesis", "run/not_finite/notes"]
    for name in names:
        mine(name)
    finished(command(*SFT))
    finished(command(*SFT, "--resume", "never"))
    gone = [name for name in names if not Path(name).exists() or Path(name).read_text() != MINE]
    expect(not gone, f"changed or removed: {gone}")


def link(name: str, kind: str, resume: str, place: Path) -> None:
    """A link, or a pipe, inside the output folder: refused, and what it leads to is untouched."""
    take_killed(place), take(place, "straight")
    path, outside = Path("run", name), Path("outside")
    if path.exists():
        path.rename(outside)
    elif kind == "file":
        mine("outside")
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        target = {"file": "outside", "nowhere": "none", "other": "straight"}[kind]
        path.symlink_to(os.path.relpath(target, path.parent))
    before = contents(".", besides=["cache"])
    refused(command(*SFT, "--resume", resume, seconds=20), name)
    expect(contents(".", besides=["cache"]) == before, "something was changed")


# --- settings that name code -----------------------------------------------------------------------------------------

EVIL = """
import pathlib
pathlib.Path("ran").touch()
class A:
    pass
"""
WORDS = [["--data.sources", "[{class_path: evilmod.A}]"],
         ["--data.sources", "{class_path: evilmod.A, init_args: {x: 1}}"],
         ["--data.sources+", "{class_path: evilmod.A}"], ["--data", "{class_path: evilmod.A}"], ["--data=evilmod.A"],
         ["--model", "{class_path: evilmod.A}"], ["--model.lora", "evilmod.A"], ["--train={class_path: evilmod.A}"],
         ["--model.class_path", "evilmod.A"], ["--model", "!!python/name:evilmod.A"],
         ["--model", "!!python/object/apply:evilmod.A []"], ["--train", "evilmod"], ["--engine", "evilmod.A"],
         ["--report_to", "[{class_path: evilmod.A}]"], ["--data.columns", "evilmod.A"], ["--seed", "evilmod.A"],
         ["--data.sources", "[evilmod.jsonl]"], ["--data.sources", "[evilmod]"], ["--data.sources", "evilmod.A"],
         ["--report_to", "[evilmod]"], ["--train.optim", "evilmod.A"], ["--model.attn_implementation", "evilmod.A"],
         ["--train.lr_scheduler_type", "evilmod.A"], ["--stage", "evilmod"]]
FILES = ["config: other.yaml", "data: evilmod.A", "data: {class_path: evilmod.A}",
         "data: {sources: [{class_path: evilmod.A}]}", "model: {lora: {class_path: evilmod.A}}",
         "report_to: [{init_args: 1, class_path: evilmod.A}]", "model.class_path: evilmod.A",
         "model+: {class_path: evilmod.A}", "data: {config: other.yaml}", "data.config: other.yaml",
         "__path__: evilmod.A", "data.sources.class_path: evilmod.A", "none: {a: evilmod.A}", "help: evilmod.A",
         "seed: !!python/object/apply:evilmod.A []", "seed: !!python/name:evilmod.A ''",
         "seed: !!python/module:evilmod ''", "stage: evilmod.A", "a: &a [*a]", "<<: {class_path: evilmod.A}",
         "train: {<<: {class_path: evilmod.A}}", "? {class_path: evilmod.A}\n: 1"]


def setting(words: list[str], text: str | None, place: Path) -> None:
    """Refused in one line; the module that it names is importable, and is not imported."""
    take(place, "base", "sft.jsonl")
    Path("evilmod.py").write_text(EVIL)
    Path("evilmod.jsonl").write_text("")
    Path("other.yaml").write_text("seed: 1")
    if text is not None:
        Path("a.yaml").write_text(text)
        words = ["--config", "a.yaml"]
    refused(command(*SFT, *words, prepare=lambda: os.sys.path.insert(0, os.getcwd())))
    expect(not Path("ran").exists(), "the module was imported")
    expect(not Path("run").exists(), "a folder was written")


LINKS = ["checkpoints", "checkpoints/step-00000004", "checkpoints/step-00000002/state.json", "metrics.jsonl",
         "samples.jsonl", "run.json", "config.yaml", "model", "model/config.json", "plots", "plots/loss.png",
         "report.md", "adapter", "rows", "answers.jsonl", "not_finite", ".run.json.tmp"]
EXPORTS = Group(
    "exports and runs beside a user's folders",
    "what the command did not make is there, byte for byte; where it cannot be left, one line and nothing written",
    [Try(f"export beside {' and '.join(NEAR[i::3])}", partial(export_beside, NEAR[i::3])) for i in range(3)]
    + [Try(f"export to {kind}", partial(onto, EXPORT, ONTO[kind], "export: ")) for kind in list(ONTO)[:-1]]
    + [Try(f"export killed at rename {number}", partial(export_killed, number)) for number in (1, 2, 3)]
    + [Try("a run, killed, resumed and started anew", run_beside)]
    + [Try(f"a run in {kind}", partial(onto, SFT, ONTO[kind], ""))
       for kind in ("a folder with a file", "a file", "a folder below a file", "a model")])
SETTINGS = Group(
    "settings that name code",
    "exit code 2 and one line; the module is not imported, no folder is written",
    [Try(" ".join(words), partial(setting, words, None)) for words in WORDS]
    + [Try(" ".join(text.split()), partial(setting, [], text)) for text in FILES])
INSIDE = Group(
    "links and pipes inside an output folder",
    "exit code 2 and one line that names it; nothing changed on either side",
    [Try(f"{name} is a link", partial(link, name, "file", "auto")) for name in LINKS]
    + [Try(f"{name} is a link, --resume never", partial(link, name, "file", "never")) for name in LINKS]
    + [Try(f"{name} is a link to nowhere", partial(link, name, "nowhere", "auto"))
       for name in ("model", "metrics.jsonl", "checkpoints")]
    + [Try("checkpoints are another run", partial(link, "checkpoints", "other", "never"))]
    + [Try(f"{name} is a pipe", partial(link, name, "pipe", "auto"))
       for name in ("run.json", "metrics.jsonl", "samples.jsonl", "config.yaml", "model")])
