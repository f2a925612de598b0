"""Write settings as a readable YAML file: the chosen options, and other common ones as comments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

from hybrid_rlhf.commands.init import comment, of_card
from hybrid_rlhf.core.config import check, in_line, to_yaml
from hybrid_rlhf.memory_plan.presets import WHY
from hybrid_rlhf.memory_plan.presets import card as card_of
from hybrid_rlhf.training.registry import STAGES, by_table

_ORDER = ("output_dir", "seed", "model", "data", "train", "stages", "engine", "roles", "reward", "reward_sources",
          "environment")  # first sections; the method's sections follow
_PLAIN = re.compile(r"(?:[A-Za-z]|\.{0,2}/)[\w./@+-]*(?::[\w./@+-]+)*", re.ASCII)
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"}  # not read as text by YAML or by us
# -- options to show first, in order
_MODEL = ("model.lora.r", "model.load_in_4bit", "model.gradient_checkpointing")
_SCHEDULE = ("train.learning_rate", "train.num_train_epochs", "train.max_steps", "train.per_device_train_batch_size")
_TEXTS = (*_SCHEDULE, *_MODEL, "data.max_length", "train.eval_steps", "seed")
_SAMPLED = ("train.max_steps", "train.per_device_train_batch_size", *_MODEL, "data.max_prompt_length")
# base stage -> options; a variant leaves out those that it does not read
_COMMON: dict[str, tuple[str, ...]] = {
    "sft": (*_TEXTS, "data.packing"),
    "reward": _TEXTS,
    "dpo": ("dpo.beta", *_TEXTS),
    "ppo": ("roles.actor.learning_rate", "roles.critic.learning_rate", *_SAMPLED, "ppo.sampling.max_new_tokens",
            "ppo.sampling.num_samples", "ppo.sampling.temperature", "ppo.kl_coef", "seed"),
    "online_dpo": ("roles.actor.learning_rate", "dpo.beta", *_SAMPLED, "online.sampling.max_new_tokens",
                   "online.sampling.num_samples", "online.sampling.temperature", "seed"),
    "rejection": ("roles.actor.learning_rate", *_SAMPLED, "rejection.sampling.max_new_tokens",
                  "rejection.sampling.num_samples", "rejection.sampling.temperature", "seed"),
    "distill": ("roles.actor.learning_rate", *_SAMPLED, "distill.divergence", "distill.lmbda",
                "distill.sampling.max_new_tokens", "distill.sampling.temperature", "seed"),
    "all": ("stages.sft.num_train_epochs", "stages.reward.num_train_epochs", "stages.ppo.max_steps", *_MODEL,
            "data.max_length", "data.max_prompt_length", "data.split", "ppo.sampling.max_new_tokens",
            "ppo.sampling.temperature", "ppo.kl_coef", "seed"),
    "evaluate": ("evaluate.num_prompts", "evaluate.sampling.max_new_tokens", "evaluate.sampling.temperature",
                 "data.max_prompt_length", "seed"),
}
_NOT_OF = {"roles.critic.learning_rate": ("ppo",)}  # its variants have no critic


def common_options(stage: str) -> tuple[str, ...]:
    """Dotted names of the common options of a stage; KeyError for an unknown stage."""
    row = STAGES[stage]
    base = "sft" if stage == "conditional_sft" else row.base or stage
    return tuple(name for name in _COMMON[base] if stage in _NOT_OF.get(name, (stage,)))


def with_card(settings: Mapping[str, object], card: str | None) -> dict[str, object]:
    """The settings with defaults of a GPU preset. UserError for an unknown GPU."""
    return {**(card_of(card, "card").settings if card else {}), **settings}


def check_names(settings: Mapping[str, object]) -> None:
    """UserError for invalid option names, and for an option inside of another one."""
    for name in settings:
        check(all(re.fullmatch(r"\w+", part, re.ASCII) for part in name.split(".")),
              f"unknown option {name!r:.60}; --help lists all options")
        inside = next((other for other in settings if name.startswith(f"{other}.")), None)
        check(inside is None, f"{inside} and {name} are both given; one is a part of the other")


def settings_text(stage: str, settings: Mapping[str, object], defaults: Mapping[str, object],
                  card: str | None = None) -> str:
    """The text of the file. settings: with those of the GPU preset (`with_card`). Other options of `common_options` are
    comments, with their defaults."""
    row = STAGES[stage]
    lines = [f"# {row.help}. Try it: hybrid-rlhf --stage {stage} --config THIS --plan",
             f"# Every other option with its default: hybrid-rlhf --stage {stage} --help"]
    worth_knowing = [name for name in common_options(stage)
                     if not any(f"{name}.".startswith(f"{option}.") for option in settings)]
    written = {}
    for name in sorted([*settings, *worth_knowing], key=_place):
        last, note = name.rpartition(".")[2], (WHY.get(name) if card else None) or comment(stage, name)
        written[name] = _line(last, settings[name], note if _fits(name, settings[name]) else "") if (
            name in settings) else _comment(last, defaults.get(name), note, by_table(stage, name))
    return "\n".join([*lines, *_written(nested(written), "", {"model": of_card(card)} if card else {}), ""])


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted option -> value as sections of sections."""
    tree: dict = {}
    for name, value in options.items():
        *sections, last = name.split(".")
        reduce(lambda inner, section: inner.setdefault(section, {}), sections, tree)[last] = value
    return tree


def flat(settings: Mapping, prefix: str = "") -> dict[str, object]:
    """Dotted option -> value; lists are values."""
    options: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            options |= flat(value, f"{prefix}{name}.")
        else:
            options[f"{prefix}{name}"] = value
    return options


def _place(name: str) -> tuple[int, str]:
    first = name.partition(".")[0]
    return (_ORDER.index(first) if first in _ORDER else len(_ORDER), first)


def _fits(name: str, value: object) -> bool:
    """Whether the comment of an option applies to the chosen value."""
    wanted = {"reward.functions": "builtin:", "reward.options": "numeric_match"}.get(name, "")
    return wanted in str(value)


def _line(name: str, value: object, note: str) -> str:
    return f"{name}: {flow(value)}" + (f"  # {note}" if note else "")


def _comment(name: str, default: object, note: str, means: str | None) -> str:
    """The line of an option that is not set, as a comment."""
    text = "; ".join(filter(None, (f"by the table: {means}" if means else "", note)))
    return f"# {_line(name, default, text)}"


def _written(tree: dict, indent: str, notes: Mapping[str, str]) -> list[str]:
    """The lines of a section. A section without set options is a comment."""
    lines = []
    for key, inner in tree.items():
        if isinstance(inner, str):
            lines.append(f"{indent}{inner}")
            continue
        note = f"  # {notes[key]}" if key in notes else ""
        body = _written(inner, f"{indent}  ", {})
        is_given = any(not line.lstrip().startswith("#") for line in body)
        lines.append(f"{indent}{key}:{note}" if is_given else f"{indent}# {key}:{note}")
        lines += body
    return lines


def flow(value: object) -> str:
    """A value as one line of YAML, with the same meaning in all versions of YAML."""
    if value is None or isinstance(value, (bool, int, float)):
        return in_line(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{flow(str(k))}: {flow(v)}' for k, v in value.items())}}}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return to_yaml(text, default_style='"', width=10**9).strip()
