"""Write an Ollama Modelfile: weights, chat template in Ollama's template language, and stop tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Turns:
    """A chat template that writes every message between two fixed strings.

    around: role -> the strings before and after its content; opening: start of the prompt; marker: string before the
    answer; default: string in place of a missing system message (SmolLM2, Qwen2.5: their default system message).
    """

    around: dict[str, tuple[str, str]]
    opening: str
    marker: str
    default: str = ""

    def render(self, messages: list[dict[str, str]]) -> str:
        default = "" if messages[0]["role"] == "system" else self.default
        text = "".join(self.around[m["role"]][0] + m["content"] + self.around[m["role"]][1] for m in messages)
        return self.opening + default + text + self.marker


def turns_of(render: Callable[[list[dict[str, str]]], str], bos: str = "") -> Turns | None:
    """The template behind `render` (messages -> prompt text) as fixed strings around each message. bos: the token text
    that a rendering may begin with.

    None for a template that is not of this kind: it strips content, numbers turns, or treats some of them differently.
    Ollama's language cannot run Jinja, so only a template that is verified to be the same is written.
    """
    try:
        turns = _probe(render, bos)
        return turns if turns and all(turns.render(m) == render(m) for m in _TRIALS) else None
    except Exception:  # templates raise any error on messages that they do not support
        return None


def _chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}] * (system is not None) + turns


_TRIALS = [_chat("why?"), _chat("a", "b", "c"), _chat(" spaces \n", "x", "y", "z", "end"),
           _chat("a", system="be brief"), _chat("a", "b", "c", system="two\nlines")]


def _probe(render: Callable[[list[dict[str, str]]], str], bos: str) -> Turns | None:
    """Render sentinels and cut the results at them. Between two contents are the end of one message and the beginning
    of the next; the beginning of a user's message is known from the first one, which has nothing before it."""
    first, last = render(_chat("\0A")).split("\0A")
    three = render(_chat("\0A", "\0B", "\0C"))
    after_user, after_answer = (three.split(f"\0{x}")[1].split(f"\0{y}")[0] for x, y in ("AB", "BC"))
    system_first, rest = render(_chat("\0A", system="\0S")).split("\0S")
    after_system = rest.split("\0A")[0]
    opening = bos if first.startswith(bos) else ""
    user, default = first[len(opening):], ""
    system_begin = system_first[len(opening):]
    if system_begin and user.startswith(system_begin) and user.endswith(after_system):  # a default system message
        begins = max(range(len(after_system)), key=lambda i: _num_alike(after_system[i:], system_begin))
        user, default = after_system[begins:], user.removesuffix(after_system[begins:])
    if not (after_answer.endswith(user) and after_system.endswith(user) and system_first.startswith(opening)):
        return None
    user_end = after_user[:_num_alike(after_user, last)]  # after_user also has the answer's beginning
    around = {"system": (system_begin, after_system.removesuffix(user)),
              "user": (user, user_end),
              "assistant": (after_user[len(user_end):], after_answer.removesuffix(user))}
    return _balanced(Turns(around, opening, last[len(user_end):], default))


def _num_alike(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    return [*(a == b for a, b in zip(one, other, strict=False)), False].index(False)


def _balanced(turns: Turns) -> Turns:
    """Move the answer's beginning out of the user's end, where the answer's end shows how long an end is."""
    before, after = turns.around["user"]
    answer, end = turns.around["assistant"]
    if not end or not after.startswith(end):
        return turns
    rest = after[len(end):]
    return replace(turns, around=turns.around | {"user": (before, end), "assistant": (rest + answer, end)},
                   marker=rest + turns.marker)


def template_text(turns: Turns) -> str:
    """`turns` in Ollama's template language (Go's text/template)."""
    parts = [f'{{{{ if eq .Role "{role}" }}}}{_literal(before)}{{{{ .Content }}}}{_literal(after)}{{{{ end }}}}'
             for role, (before, after) in turns.around.items()]
    default = f"{{{{ if not .System }}}}{_literal(turns.default)}{{{{ end }}}}" if turns.default else ""
    return (f"{_literal(turns.opening)}{default}{{{{ range .Messages }}}}{''.join(parts)}{{{{ end }}}}"
            f"{_literal(turns.marker)}")


def _literal(text: str) -> str:
    """Text as a literal in Go's templates, with {{ quoted."""
    return text.replace("{{", '{{ "{{" }}') if "{{" in text else text


def modelfile(weights: str, turns: Turns | None, stops: list[str], settings: dict[str, float | int]) -> str:
    """The text of a Modelfile. weights: path of the GGUF file or model folder, relative to the Modelfile. settings:
    Ollama's parameters, such as temperature, num_ctx. turns None: no template, with a comment about it."""
    lines = [f"FROM {weights}", ""]
    if turns is None:
        lines += ["# The chat template of this model cannot be written in Ollama's language without changing it;",
                  "# Ollama takes the one in the GGUF file if it knows it. Compare an answer before you rely on it."]
    else:
        lines += [f'TEMPLATE """{template_text(turns)}"""']
    lines += ["", *(f"PARAMETER stop {_quoted(stop)}" for stop in stops),
              *(f"PARAMETER {name} {value}" for name, value in settings.items()), ""]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
