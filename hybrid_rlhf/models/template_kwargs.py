"""The variables of a chat template, such as enable_thinking and reasoning_effort, and their values.

Values for all messages become defaults in the template itself, so that training, chat, server and any user of the saved
model render alike. Those of one conversation are in `chat_template_kwargs` of its first message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache

from hybrid_rlhf.core.config import check, nearest

KWARGS = "chat_template_kwargs"
_PASSED = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # transformers' own block


@lru_cache(32)
def names_read(template: str) -> frozenset[str]:
    """The variables that a template reads, but for those that transformers sets: messages, tools, special tokens."""
    from jinja2 import TemplateSyntaxError, meta, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        parsed = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(_TAG.sub("", template))
    except TemplateSyntaxError:  # reported when it renders
        return frozenset()
    stored = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    tested = {test.node.name for test in parsed.find_all((nodes.Test, nodes.Filter))
              if test.name in ("defined", "undefined", "default", "d") and isinstance(test.node, nodes.Name)}
    names = meta.find_undeclared_variables(parsed) - _PASSED - (stored - tested)  # set in loops: seem undeclared
    return frozenset(name for name in names if not name.endswith("_token"))


def split_kwargs(tokenizer, kwargs: Mapping) -> tuple[dict, list[str]]:  # noqa: ANN001
    """(the `kwargs` that the tokenizer's chat template reads, the names of the others)."""
    known = _known(tokenizer)
    return {name: kwargs[name] for name in kwargs if name in known}, [name for name in kwargs if name not in known]


def _known(tokenizer) -> frozenset[str]:  # noqa: ANN001
    templates = tokenizer.chat_template or ""
    return names_read(templates if isinstance(templates, str) else "".join(templates.values()))


def check_kwargs(kwargs: object, where: str) -> None:
    """UserError unless `kwargs` is a mapping of variable names to values."""
    check(isinstance(kwargs, Mapping) and all(isinstance(name, str) and name.isidentifier() for name in kwargs),
          f"{where} must be a mapping of a chat template's variables to values, such as {{enable_thinking: false}}, "
          f"not {kwargs!r:.60}")


def set_defaults(tokenizer, kwargs: Mapping, where: str) -> None:  # noqa: ANN001
    """Write `kwargs` as defaults into the tokenizer's chat template. UserError for names that it does not read."""
    names, known, templates = split_kwargs(tokenizer, kwargs)[1], sorted(_known(tokenizer)), tokenizer.chat_template
    check(not names, f"{where}: the chat template does not read {', '.join(names)}"
                     f"{nearest(names[0], known) if names else ''}; it reads {', '.join(known) or 'no variable'}")
    lines = "".join(f"{{%- set {name} = {name} | default({_literal(value)}) %}}\n" for name, value in kwargs.items())
    if isinstance(templates, str):
        tokenizer.chat_template = lines + templates.removeprefix(lines)
    elif templates:
        tokenizer.chat_template = {name: lines + text.removeprefix(lines) for name, text in templates.items()}


def _literal(value: object) -> str:
    """A JSON value in Jinja syntax."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(k))}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
