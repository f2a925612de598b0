"""An Ollama Modelfile: the weights, the chat template in Ollama's language, and where an answer ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Turns:
    """A chat template that writes every message between two fixed strings.

    around: role -> what stands before and after its content; opening: what the whole begins with; marker: what the
    answer follows; default: what stands where the first message is no system message (SmolLM2, Qwen2.5: one of theirs).
    """

    around: dict[str, tuple[str, str]]
    opening: str
    marker: str
    default: str = ""

    def render(self, messages: list[dict[str, str]]) -> str:
        default = "" if messages[0]["role"] == "system" else self.default
        said = "".join(self.around[m["role"]][0] + m["content"] + self.around[m["role"]][1] for m in messages)
        return self.opening + default + said + self.marker


def turns_of(render: Callable[[list[dict[str, str]]], str], bos: str = "") -> Turns | None:
    """The template behind `render` (messages -> prompt text) as fixed strings around each message. bos: the token text
    that a rendering may begin with.

    None for a template that is not of this kind: it strips content, numbers turns, or treats some of them differently.
    Ollama's language cannot run Jinja, so what cannot be shown to be the same is not written.
    """
    try:
        found = _probe(render, bos)
        return found if found and all(found.render(m) == render(m) for m in _TRIALS) else None
    except Exception:  # templates raise what they like on messages that they do not take
        return None


def _say(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    spoken = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}] * (system is not None) + spoken


_TRIALS = [_say("why?"), _say("a", "b", "c"), _say(" spaces \n", "x", "y", "z", "end"), _say("a", system="be brief"),
           _say("a", "b", "c", system="two\nlines")]


def _probe(render: Callable[[list[dict[str, str]]], str], bos: str) -> Turns | None:
    """Cut the renderings of sentinels at the sentinels. Between two messages stand the end of the one and the beginning
    of the next, and the beginning of a user's message is known from where nothing stands before it."""
    first, last = render(_say("\0A")).split("\0A")
    three = render(_say("\0A", "\0B", "\0C"))
    after_user, after_answer = (three.split(f"\0{x}")[1].split(f"\0{y}")[0] for x, y in ("AB", "BC"))
    system_first, rest = render(_say("\0A", system="\0S")).split("\0S")
    after_system = rest.split("\0A")[0]
    opening = bos if first.startswith(bos) else ""
    user, default = first[len(opening):], ""
    own_system = system_first[len(opening):]
    if own_system and user.startswith(own_system) and user.endswith(after_system):  # a system message of its own
        begins = max(range(len(after_system)), key=lambda i: _num_alike(after_system[i:], own_system))
        user, default = after_system[begins:], user.removesuffix(after_system[begins:])
    if not (after_answer.endswith(user) and after_system.endswith(user) and system_first.startswith(opening)):
        return None
    user_end = after_user[:_num_alike(after_user, last)]  # the answer's beginning may be in it
    around = {"system": (own_system, after_system.removesuffix(user)),
              "user": (user, user_end),
              "assistant": (after_user[len(user_end):], after_answer.removesuffix(user))}
    return _balanced(Turns(around, opening, last[len(user_end):], default))


def _num_alike(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    return [*(a == b for a, b in zip(one, other, strict=False)), False].index(False)


def _balanced(found: Turns) -> Turns:
    """The user's end without what is the answer's beginning, where the answer's own end shows how long an end is."""
    before, after = found.around["user"]
    answer, end = found.around["assistant"]
    if not end or not after.startswith(end):
        return found
    rest = after[len(end):]
    return replace(found, around=found.around | {"user": (before, end), "assistant": (rest + answer, end)},
                   marker=rest + found.marker)


def template_text(turns: Turns) -> str:
    """`turns` in Ollama's template language (Go's text/template)."""
    parts = [f'{{{{ if eq .Role "{role}" }}}}{_literal(before)}{{{{ .Content }}}}{_literal(after)}{{{{ end }}}}'
             for role, (before, after) in turns.around.items()]
    default = f"{{{{ if not .System }}}}{_literal(turns.default)}{{{{ end }}}}" if turns.default else ""
    return (f"{_literal(turns.opening)}{default}{{{{ range .Messages }}}}{''.join(parts)}{{{{ end }}}}"
            f"{_literal(turns.marker)}")


def _literal(text: str) -> str:
    """Text that Go's templates print as it is; braces of its own are quoted."""
    return text.replace("{{", '{{ "{{" }}') if "{{" in text else text


def modelfile(weights: str, turns: Turns | None, stops: list[str], settings: dict[str, float | int]) -> str:
    """The text of a Modelfile. weights: path of the GGUF file or model folder, relative to the Modelfile. settings:
    Ollama's parameters, such as temperature, num_ctx. turns None leaves the template to Ollama, and says so."""
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


def write_modelfile(folder: str | Path, text: str) -> Path:
    path = Path(folder) / "Modelfile"
    path.write_text(text, encoding="utf-8")
    return path
