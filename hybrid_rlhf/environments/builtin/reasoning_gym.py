"""Tasks of reasoning-gym as an environment of one turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rlhf.rewards.builtin import text_of
from hybrid_rlhf.rewards.reasoning_task import INSTRUCTION, ReasoningTask


@dataclass
class ReasoningGym:
    """A question of a task, one answer, its score by the task's own rules; then the episode is over.

    Columns of a row: `index`, the entry's number; `answer`, if there is one, must equal the entry's, so that rows made
    with other settings are refused. A prompt that holds the question stays as it is; to any other one the question
    and the instruction are added. Rows are made by `rewards.reasoning_task.task_rows`.

    Attributes:
        task: Its name, such as chain_sum.
        settings: The task's own options, such as {min_terms: 2, seed: 7}. The default seed is 0.
        tag: The answer is the text in the last <tag>...</tag>; None takes all of the message.
        instruction: Added after the question.
        allow_eval: Whether tasks may be used whose scoring runs the answer as Python code.
    """

    task: str
    settings: dict = field(default_factory=dict)
    tag: str | None = "answer"
    instruction: str = INSTRUCTION
    allow_eval: bool = False

    def __post_init__(self) -> None:
        self._task = ReasoningTask(self.task, self.settings, self.tag, self.allow_eval)
        self._entry: dict = {}

    def reset(self, index: int | None = None, answer: str | None = None, prompt: object = "", **_: object
              ) -> str | None:
        self._entry = self._task.entry(index, answer)
        question = self._entry["question"].strip()
        texts = [message["content"] for message in prompt] if isinstance(prompt, list) else [prompt]
        if any(question in text for text in texts if isinstance(text, str)):
            return None
        return f"\n{question}\n{self.instruction}".rstrip()

    def step(self, messages: list[dict]) -> tuple[list[dict], bool, float]:
        return [], True, self._task.score(text_of(messages), self._entry)
