"""Write docs/results/templates.md: what becomes of conversations under every chat template that TRL ships.

    python docs/write_templates.py         # writes the page
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hybrid_rlhf.data.chat import SkipRow, compose_messages, encode_all, encode_prompt  # noqa: E402
from hybrid_rlhf.models.template import dialect_of  # noqa: E402
from tests.factories.trl_templates import CONVERSATIONS, names, tokenizer_of  # noqa: E402

PAGE = ROOT / "docs" / "results" / "templates.md"
HEAD = """# Chat templates

`python docs/write_templates.py`; every cell and more is checked by
[tests/data/test_trl_templates.py](../../tests/data/test_trl_templates.py).
The {count} templates for inference that TRL {trl} ships, each with a byte-level tokenizer that has its markers as
special tokens.
Conversations of one turn, of three, of three behind a system message, of three with thoughts
(`<think>...</think>` before the answer), and of a tool call, its result and an answer. In every row that is not refused
the prompt tokens of a rollout are the beginning of the training row, what is trained is the assistant's words with the
template's end of turn, and that end is a token that a rollout stops at.

- *n rows*: the template rewrites history (it removes earlier thoughts, or ends an earlier answer otherwise), or ends
  no turn, so each answer is a row of its own, behind the prompt that generation sees at that turn.
- *folded*: the template refuses a system message, so it goes into the first user turn, in training, chat and server
  alike.
- *parts*: content is handed over as a list of parts.
- *refused*: the row is left out and counted under the reason, for the template would lose what it says.

| template | one turn | three turns | system | thoughts | tool calls | an answer ends with |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    rows = [f"| {' | '.join(_row(name))} |\n" for name in names()]
    return HEAD.format(count=len(rows), trl=version("trl")) + "".join(rows)


def _row(name: str) -> list[str]:
    tokenizer = tokenizer_of(name)
    dialect = dialect_of(tokenizer)
    cells = {kind: _cell(tokenizer, messages) for kind, messages in CONVERSATIONS.items()}
    cells["one turn"] += ", parts" if dialect.takes_parts else ""
    cells["system"] += "" if dialect.takes_system else ", folded"
    ends = " or ".join(f"`{end}`" for end in dialect.ends) or f"`{tokenizer.eos_token}` (added)"
    return [name, *cells.values(), ends.replace("|", "\\|")]


def _cell(tokenizer, messages: list[dict]) -> str:  # noqa: ANN001
    """How many rows, or why none. Raises AssertionError where a rollout would see another prompt than training."""
    try:
        rows = encode_all(tokenizer, compose_messages(tokenizer, messages))
    except SkipRow as reason:
        return f"refused: {reason}"
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for number, turn in enumerate(turns):
        prompt = encode_prompt(tokenizer, messages[:turn])
        assert rows[min(number, len(rows) - 1)].ids[: len(prompt)] == prompt
    return "1 row" if len(rows) == 1 else f"{len(rows)} rows"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
