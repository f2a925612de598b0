"""The variables of a chat template, such as enable_thinking and reasoning_effort: which it reads, and their values.

Values for all messages become the template's own defaults, so that training, chat, server and whatever loads the saved
model render alike. Those of one conversation travel as `chat_template_kwargs` of its first message.
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
    except TemplateSyntaxError:  # what renders it says so
        return frozenset()
    kept = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    asked = {test.node.name for test in parsed.find_all((nodes.Test, nodes.Filter))
             if test.name in ("defined", "undefined", "default", "d") and isinstance(test.node, nodes.Name)}
    found = meta.find_undeclared_variables(parsed) - _PASSED - (kept - asked)  # what a loop sets seems undeclared
    return frozenset(name for name in found if not name.endswith("_token"))


def split_kwargs(tokenizer, kwargs: Mapping) -> tuple[dict, list[str]]:  # noqa: ANN001
    """(what of `kwargs` the tokenizer's chat template reads, the names of the rest)."""
    known = _known(tokenizer)
    return {name: kwargs[name] for name in kwargs if name in known}, [name for name in kwargs if name not in known]


def _known(tokenizer) -> frozenset[str]:  # noqa: ANN001
    templates = tokenizer.chat_template or ""
    return names_read(templates if isinstance(templates, str) else "".join(templates.values()))


def check_kwargs(kwargs: object, where: str) -> None:
    """UserError for what is no mapping of a template's variables to their values."""
    check(isinstance(kwargs, Mapping) and all(isinstance(name, str) and name.isidentifier() for name in kwargs),
          f"{where} must be a mapping of a chat template's variables to values, such as {{enable_thinking: false}}, "
          f"not {kwargs!r:.60}")


def set_defaults(tokenizer, kwargs: Mapping, where: str) -> None:  # noqa: ANN001
    """Make `kwargs` the defaults of the tokenizer's chat template. UserError for names that it does not read."""
    names, known, templates = split_kwargs(tokenizer, kwargs)[1], sorted(_known(tokenizer)), tokenizer.chat_template
    check(not names, f"{where}: the chat template does not read {', '.join(names)}"
                     f"{nearest(names[0], known) if names else ''}; it reads {', '.join(known) or 'no variable'}")
    lines = "".join(f"{{%- set {name} = {name} | default({_literal(value)}) %}}\n" for name, value in kwargs.items())
    if isinstance(templates, str):
        tokenizer.chat_template = lines + templates.removeprefix(lines)
    elif templates:
        tokenizer.chat_template = {name: lines + text.removeprefix(lines) for name, text in templates.items()}


def _literal(value: object) -> str:
    """A JSON value as Jinja writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(k))}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
