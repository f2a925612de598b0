"""What became of the rows of a stage, in numbers and in the lines that every run begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hybrid_rlhf.core.text_safety import escape_control

SHOWN = 12  # columns in a line
LOST = 0.1  # share of the rows whose loss is worth a line of its own


def add_up(parts: Sequence[dict], num_train: int, num_held_out: int) -> dict:
    """The sources' counts added up; train and held_out count the rows after blending."""
    total = {name: sum(p[name] for p in parts) for name in ("read", "other_stages", "truncated")}
    dropped, rendered, unread = (dict(sum((Counter(p[name]) for p in parts), Counter()))
                                 for name in ("dropped", "rendered", "unread"))
    usable = sum(p["train"] for p in parts)
    return {**total, "dropped": dropped, "rendered": rendered, "usable": usable, "train": num_train,
            "held_out": num_held_out, **({"unread": unread} if unread else {})}


def describe(report: dict) -> str:
    """A report in one line."""
    parts = [f"{report['read']} rows read", f"{report['train']} to train on", f"{report['held_out']} held out"]
    parts += [f"{report['other_stages']} left to other stages"] if report["other_stages"] else []
    parts += [f"{report['truncated']} truncated"] if report["truncated"] else []
    return ", ".join(parts + _rendered(report) + drops(report))


def _rendered(report: dict) -> list[str]:
    return [f"{n} {how}" for how, n in sorted(report.get("rendered", {}).items())]


def drops(report: dict) -> list[str]:
    """How many rows were dropped, by reason."""
    return [f"{n} dropped: {escape_control(reason)}" for reason, n in sorted(report["dropped"].items())]


def unread(report: dict) -> list[str]:
    """A line of the columns with text that nothing of the run reads, if there are any."""
    names = [escape_control(str(name)) for name in report.get("unread", {})]
    if not names:
        return []
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return [f"columns that are not read: {shown} (to read one, name it in the source's columns, such as {{context: "
            f"{names[0]}}})"]


def summary(report: dict, name: str | None = None) -> list[str]:
    """What became of the rows, as lines for the start of a run: one, one more for how they were rendered, one of the
    columns that are not read, and one more where over a tenth is lost.

    Lost is what is dropped, what loses its tail and what data.split leaves to other stages. name: of rows beside the
    stage's own.
    """
    usable, data = report.get("usable", report["train"]), f"data of {name}" if name else "data"
    lines = [f"{data}: {describe(report | {'rendered': {}})}"]
    if usable != report["train"]:
        lines[0] += f" (chosen from {usable} by weights and data.max_samples)"
    elif "distinct" in report:
        lines[0] += f" (by weights: {report['distinct']} different ones in an epoch, and others in the next)"
    lines += [f"{data}: {'; '.join(_rendered(report))}"] * bool(report.get("rendered"))
    lines += [f"{data}: {line}" for line in unread(report)]
    if report.get("not_used"):
        lines.append(f"{data}: nothing for {name or 'this stage'} in {', '.join(report['not_used'])}")
    faulty, elsewhere = sum(report["dropped"].values()) + report["truncated"], report["other_stages"]
    whole = usable + report["held_out"] + elsewhere + sum(report["dropped"].values())
    if faulty + elsewhere > LOST * whole:
        reasons = [f"{elsewhere} left to other stages (data.split null gives this stage every row)"] * bool(elsewhere)
        reasons += [f"{report['truncated']} cut to data.max_length"] * bool(report["truncated"]) + drops(report)
        lines.append(f"{'warning' if faulty > LOST * whole else 'note'}: {faulty + elsewhere} of {whole} rows "
                     f"({(faulty + elsewhere) / whole:.0%}) are lost to {name or 'this stage'}: {'; '.join(reasons)}")
    return lines
