"""Option words that several stages share, cut down to what each of them has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hybrid_rlhf.training.unread_options import of_stage as unused_by

_OF_TEXTS = ("data.max_length", "data.train_on", "data.append_eos")  # of ppo's only ppo.ptx_coef reads these


def used(stage: str, words: Iterable[str]) -> list[str]:
    """`words` ("--option value" or "--option=value") without the options that `stage` does not read."""
    words = list(words)
    gone = [*unused_by(stage), *(_OF_TEXTS if "roles.ref.tp" in unused_by(stage) and not _has_texts(words) else ())]
    return [word for given in _options(words) for word in given
            if not any(_name(given) == option or _name(given).startswith(f"{option}.") for option in gone)]


def _has_texts(words: list[str]) -> bool:
    return any(word.startswith("--ppo.ptx_coef") for word in words)


def _name(given: list[str]) -> str:
    return given[0].removeprefix("--").partition("=")[0]


def _options(words: list[str]) -> Iterator[list[str]]:
    """Each option with its value."""
    start = 0
    for end in range(1, len(words) + 1):
        if end == len(words) or words[end].startswith("--"):
            yield words[start:end]
            start = end
