"""The private parts of jsonargparse's parsers (they are argparse's) that are used here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hybrid_rlhf.core.compat import Dependency

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

JSONARGPARSE = Dependency("jsonargparse")


def hide(parser: ArgumentParser, is_hidden: Callable[[str], bool]) -> None:
    """Take options out of a parser, sections among them; their parts of the settings keep the defaults."""
    actions, flags = JSONARGPARSE.part(parser, "_actions"), JSONARGPARSE.part(parser, "_option_string_actions")
    groups = JSONARGPARSE.part(parser, "_action_groups")
    for action in [a for a in actions if is_hidden(a.dest)]:
        actions.remove(action)
        for flag in action.option_strings:
            del flags[flag]
        for group in groups:
            if action in JSONARGPARSE.part(group, "_group_actions"):
                group._group_actions.remove(action)
    parser._action_groups = [g for g in groups if JSONARGPARSE.part(g, "_group_actions")]


def option_names(parser: ArgumentParser) -> list[str]:
    """The dotted names of a parser's options."""
    return [a.dest for a in JSONARGPARSE.part(parser, "_actions") if a.dest not in ("help", "==SUPPRESS==")]


def texts(parser: ArgumentParser) -> dict[str, str]:
    """What the help says of each option, by its dotted name."""
    return {a.dest: " ".join((a.help or "").split()) for a in JSONARGPARSE.part(parser, "_actions")}
