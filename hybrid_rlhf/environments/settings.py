"""The settings of environments and tools."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.options import check_values, within


@dataclass(frozen=True)
class EnvironmentConfig:
    """Environments and tools of the model. Without a factory or tools a response is one turn.

    Attributes:
        factory: The environment's class, path.py:name or builtin:name; or a mapping of names to classes, of which each
            row names one in its column `environment`. Its reset(**row) begins an episode; its public methods, with type
            hints and docstrings, are tools; get_reward() is a reward beside reward.functions. Or step(messages) ->
            (messages, done, reward), for games without tools. A class for TRL's environment_factory works as it is.
        tools: Functions that the model may call, path.py:name or builtin:name (calculator, python_expression), one or
            a list; their type hints and docstrings are shown to the model.
        options: Keywords of the factory; for several environments, by name.
        max_turns: Most turns of the model in one episode.
        max_new_tokens_per_turn: Most tokens of one turn; null: the rest of max_new_tokens, which counts all turns and
            the messages between them.
        timeout: Seconds that one call of a tool or of the environment may take; then the model is shown an error.
        num_workers: Calls that run at once, while others generate; 0 makes them one by one in the order of the
            episodes, which is reproducible.
        isolate: Whether code of files and modules runs in worker processes, num_workers of them (at least one), and as
            many for tools: for code that may crash, hang in compiled code, or take all memory. Builtin ones stay in
            this process.
        max_answer_chars: Most characters of one answer of a tool; the rest is cut, with a note.
        malformed_penalty: Subtracted at a turn whose tool calls cannot be parsed.
    """

    factory: str | dict[str, str] | None = None
    tools: list[str] | str = field(default_factory=list)
    options: dict[str, object] = field(default_factory=dict)
    max_turns: int = within(10, "[1,")
    max_new_tokens_per_turn: int | None = within(None, "[1,")
    timeout: float = within(30.0, "(0, inf)")
    num_workers: int = within(16, "[0,")
    isolate: bool = False
    max_answer_chars: int = within(4000, "[1,")
    malformed_penalty: float = within(0.0, "[0, inf)")

    def __post_init__(self) -> None:
        check_values(self, "environment.")
        check(bool(self.factory) or not self.options, "environment.options are those of environment.factory; there is "
                                                      "none")

    @property
    def tool_list(self) -> list[str]:
        return [self.tools] if isinstance(self.tools, str) else list(self.tools)

    @property
    def is_given(self) -> bool:
        """Whether responses are episodes."""
        return bool(self.factory or self.tool_list)
