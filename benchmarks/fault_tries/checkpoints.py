"""A run that was killed and is started again: on other rows, on damaged checkpoints; and checkpoints while updates are
skipped."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fault_tries.attempt import Group, Try, expect
from fault_tries.prepared import GRPO, JUDGE, PAID, SFT, same_run, take_killed
from fault_tries.product import command, contents, done_or_refused, finished, read_rows, refused, take, write_rows
from tests.crash.place import CLOCKED

Rows = list[dict]


def at(number: int, **values: str) -> Callable[[Rows], Rows]:
    def change(rows: Rows) -> Rows:
        rows[number] |= values
        return rows

    return change


OTHER_ROWS: dict[str, Callable[[Rows], Rows]] = {
    "a letter of the first answer": at(0, completion="rad"),
    "a letter of the last answer": at(-1, completion="old bock"),
    "a letter of a held-out answer": at(14, completion="fix"), "a prompt": at(7, prompt="say that 0"),
    "a space": at(3, completion="cat "), "a capital": at(11, completion="Blue"),
    "a row less at the end": lambda rows: rows[:-1], "a row less at the beginning": lambda rows: rows[1:],
    "a held-out row more": lambda rows: [*rows, {"prompt": "say x", "completion": "x"}],
    "a row more": lambda rows: [*rows, {"prompt": "say y 9", "completion": "y"}],
    "a row twice": lambda rows: [*rows, rows[4]], "two rows exchanged": lambda rows: [rows[1], rows[0], *rows[2:]],
    "the answers of two rows exchanged": lambda rows: at(20, completion=rows[21]["completion"])(
        at(21, completion=rows[20]["completion"])(rows)), "all in reverse": lambda rows: rows[::-1],
    "an answer emptied, which drops its row": at(9, completion="")}


def other_rows(change: Callable[[Rows], Rows], place: Path) -> None:
    take_killed(place)
    before, rows = contents("run/checkpoints"), read_rows("sft.jsonl")
    write_rows("sft.jsonl", change([dict(row) for row in rows]))
    refused(command(*SFT), "rows")
    expect(contents("run/checkpoints") == before, "checkpoints were changed")
    write_rows("sft.jsonl", rows)
    finished(command(*SFT))
    same_run(place)


def same_rows(place: Path) -> None:
    """What must not be refused: the same rows in a file that is written otherwise, and is newer."""
    take_killed(place)
    lines = [json.dumps(dict(reversed(r.items())), separators=(" ,", " : ")) for r in read_rows("sft.jsonl")]
    Path("sft.jsonl").write_text("\n\n".join(lines))
    expect("goes on after step 4" in finished(command(*SFT)).err, "did not go on after step 4")
    same_run(place)


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(share: float) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[int(share * (len(raw) - 1))] ^= 4
        path.write_bytes(raw)

    return damage


def cut(share: float) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit at the beginning": flip(0), "a bit in the midst": flip(0.5), "a bit at the end": flip(1),
    "half of it": cut(0.5), "its last bytes": cut(0.99), "emptied": cut(0), "gone": Path.unlink,
    "zeros": lambda p: p.write_bytes(bytes(p.stat().st_size)), "a folder": as_folder,
    "grown": lambda p: p.write_bytes(p.read_bytes() + b"x" * 99),
    "of the checkpoint before": lambda p: shutil.copy(p.parents[1] / "step-00000002" / p.name, p)}
FILES = ("state.safetensors", "state.json", "manifest.json")


def damaged(name: str, damage: Callable[[Path], object], place: Path, of: tuple[str, ...] = ("step-00000004",)) -> None:
    """The newest checkpoint is damaged: named, and the run goes on from the one before, or from the beginning."""
    take_killed(place)
    for each in of:
        damage(Path("run/checkpoints", each, name))
    said = finished(command(*SFT)).err
    expect(all(each in said for each in of), f"the damage is not told: {said[:300]}")
    if len(of) == 1:
        expect("goes on after step 2" in said, "did not go on after step 2")
    same_run(place)


def damaged_record(name: str, damage: Callable[[Path], object], place: Path) -> None:
    """Another file of the run is damaged: refused in one line, or written anew; never another result. Of a file of
    lines, what comes after the checkpoint is as it should be."""
    take_killed(place)
    damage(Path("run", name))
    before = contents("run/checkpoints")
    if not done_or_refused(command(*SFT)):
        expect(contents("run/checkpoints") == before, "refused, and the checkpoints were changed")
        return
    if name.endswith(".jsonl"):
        here, there = (Path(run, name).read_text(errors="replace").splitlines() for run in ("run", place / "straight"))
        expect(len(here) > 0 and _told(here[-1]) == _told(there[-1]), "its last line is not that of an undamaged run")
        shutil.copy(place / "straight" / name, Path("run", name))
    same_run(place)


def _told(line: str) -> dict | str:
    """A line without the times; itself where it is none."""
    try:
        return {key: value for key, value in json.loads(line).items() if not key.startswith(CLOCKED)}
    except ValueError:
        return line


# --- skipped updates -------------------------------------------------------------------------------------------------


def ruined(words: list[str], place: Path) -> None:
    """A learning rate that ruins the weights in the first update: every later one is skipped, and the checkpoint after
    the first stays although only one is kept otherwise."""
    take(place, "base", "sft.jsonl")
    done = command(*SFT, "--train.learning_rate", "1e30", "--train.lr_scheduler_type", "constant", "--train.max_steps",
                   "9", "--train.save_steps", "1", "--train.save_total_limit", "1", "--train.eval_steps", "0",
                   "--train.max_skipped_updates", "5", *words)
    _kept(refused(done, "not finite", "from before is"))


BAD_LATER = """
import pathlib
def bad(completions, **_):
    calls = pathlib.Path("calls")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    return [(-1.0) ** i * 3e38 * (len(calls.read_text()) > 3) for i in range(len(completions))]
"""


def paid_without_bounds(words: list[str], place: Path) -> None:
    """Scores that are finite and whose squares are not, from the fourth step on."""
    take(place, "base", "paid.jsonl")
    Path("pay.py").write_text(BAD_LATER + JUDGE)
    done = command(*GRPO, *PAID, "--train.max_steps", "12", "--train.save_total_limit", "1",
                   "--train.max_skipped_updates", "5", *words)
    if not done_or_refused(done):
        _kept(done.errors[0])


def _kept(line: str) -> None:
    found = re.search(r"from before is \S*step-0*(\d+)", line)
    if found is None:  # refused for another reason, such as the scores themselves
        expect("reward source" in line or "scores" in line, f"no checkpoint from before is named: {line[:300]}")
        return
    rows = read_rows("run/metrics.jsonl")
    skipped = [next((v for k, v in row.items() if k.endswith("/skipped_updates")), 0) for row in rows]
    good = [row["step"] for row, count in zip(rows, skipped, strict=True) if not count]
    expect(int(found[1]) == max(good), f"step {found[1]} is named, and {max(good)} was the last without a skip")
    expect(Path(f"run/checkpoints/step-{max(good):08d}/manifest.json").exists(), "the last good checkpoint has gone")


ROWS = Group(
    "changed rows at resume",
    "refused in one line, with the checkpoints untouched; with the rows as they were the same "
    "command ends in the same bits as without interruption. The same rows written otherwise are taken",
    [Try(name, partial(other_rows, change)) for name, change in OTHER_ROWS.items()]
    + [Try("the same rows in another spelling", same_rows)])
SKIPPED = Group(
    "checkpoints while updates are skipped",
    "one line at the end names the last checkpoint from before, and it is there",
    [Try("SFT", partial(ruined, [])),
     Try("SFT with LoRA", partial(ruined, ["--model.lora.r", "4"])),
     Try("SFT in bfloat16", partial(ruined, ["--model.dtype", "bfloat16"])),
     Try("GRPO, scores near the largest number", partial(paid_without_bounds, [])),
     Try("RLOO, scores near the largest number", partial(paid_without_bounds, ["--stage", "rloo"]))])
DAMAGED = Group(
    "damaged checkpoints and run files",
    "checkpoints: named, the run goes on from the one before and ends in the same bits "
    "as without interruption. Other files: the same, or one line with the checkpoints untouched",
    [Try(f"{file}: {name}", partial(damaged, file, damage)) for file in FILES for name, damage in DAMAGE.items()]
    + [Try(f"both checkpoints, {file}: gone",
           partial(damaged, file, Path.unlink, of=("step-00000004", "step-00000002")))
       for file in FILES]
    + [Try(f"{file}: {name}", partial(damaged_record, file, DAMAGE[name]))
       for file in ("run.json", "config.yaml", "metrics.jsonl", "answers.jsonl")
       for name in ("a bit in the midst", "half of it", "emptied", "a folder")]
    + [Try("samples.jsonl: a folder", partial(damaged_record, "samples.jsonl", DAMAGE["a folder"]))])
