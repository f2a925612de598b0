"""Games of one player: guessing numbers by messages or by a tool, guessing words, and the tasks of reasoning-gym."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from random import Random

from hybrid_rlhf.core.errors import check
from hybrid_rlhf.rewards import text_of
from hybrid_rlhf.rewards.builtin import last_number
from hybrid_rlhf.rewards.reasoning_task import INSTRUCTION, ReasoningTask

WORDS = ("apple", "beach", "bread", "chair", "cloud", "dance", "earth", "fruit", "glass", "grape", "green", "horse",
         "house", "juice", "knife", "lemon", "light", "money", "mouse", "music", "night", "ocean", "paper", "plant",
         "queen", "river", "sheep", "smile", "snake", "spoon", "stone", "sugar", "table", "tiger", "train", "water",
         "whale", "wheel", "woman", "world")
_WORD = re.compile(r"[^\W\d_]+")


# -- numbers -----------------------------------------------------------------------------------------------------------


@dataclass
class _NumberOptions:
    low: int = 1
    high: int = 100
    max_guesses: int = 10
    cost: float = 0.05
    has_rules: bool = True


@dataclass
class GuessNumber(_NumberOptions):
    """The model says a number, and hears higher, lower or right. The last number of a message is the guess.

    Columns of a row: `secret`, or `seed` that it is drawn from; low and high, to override those below. Made by
    `number_rows`. Binary search is optimal.

    Attributes:
        low: The smallest number that it can be.
        high: The greatest.
        max_guesses: The game ends after as many messages, those without a number included.
        cost: Subtracted from the reward for each wrong guess; the right one adds 1.
        has_rules: Whether the rules are added to the row's prompt.
    """

    def __post_init__(self) -> None:
        _check_options("guess_number", self.max_guesses, (self.low, self.high))

    def reset(self, secret: int | None = None, seed: int | None = None, low: int | None = None,
              high: int | None = None, **_: object) -> str | None:
        self._ends = _ends(self, low, high)
        self._secret, self._num_guesses = _drawn(secret, seed, *self._ends), 0
        return _rules(self, self._ends, "Say one number at a time.")

    def step(self, messages: list[dict]) -> tuple[list[dict], bool, float]:
        guess = last_number(text_of(messages))
        self._num_guesses += 1
        is_right = guess == self._secret
        answer = "Say a number from {} to {}.".format(*self._ends) if guess is None else _hint(guess, self._secret)
        is_over = is_right or self._num_guesses >= self.max_guesses
        return [{"role": "user", "content": answer}], is_over, 1.0 if is_right else -self.cost


@dataclass
class GuessNumberTool(_NumberOptions):
    """The same game with a tool: the model calls guess(number), and the reward is that of the whole game.

    Columns and attributes are those of GuessNumber. After the right guess, or max_guesses, the game is over, and the
    reward does not change.
    """

    def __post_init__(self) -> None:
        _check_options("guess_number_tool", self.max_guesses, (self.low, self.high))

    def reset(self, secret: int | None = None, seed: int | None = None, low: int | None = None,
              high: int | None = None, **_: object) -> str | None:
        ends = _ends(self, low, high)
        self._secret, self._num_guesses, self._is_right = _drawn(secret, seed, *ends), 0, False
        return _rules(self, ends, "Call guess with one number at a time.")

    def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: The whole number to try.

        Returns:
            higher, lower or right.
        """
        if self._is_right or self._num_guesses >= self.max_guesses:
            return "The game is over."
        self._num_guesses += 1
        self._is_right = number == self._secret
        return _hint(number, self._secret)

    def get_reward(self) -> float:
        return float(self._is_right) - self.cost * (self._num_guesses - self._is_right)


def _hint(guess: Decimal | int | float, secret: int) -> str:
    return "right" if guess == secret else "higher" if guess < secret else "lower"


def _ends(game: _NumberOptions, low: int | None, high: int | None) -> tuple[int, int]:
    """The smallest and the greatest number in a row's game."""
    low, high = game.low if low is None else low, game.high if high is None else high
    check(low <= high, f"guess_number: the row's low is {low} and its high {high}; low must not be above high")
    return low, high


def _drawn(secret: object, seed: object, low: int, high: int) -> int:
    """The row's secret, or the one that its seed draws, the same on every machine. UserError where it has neither."""
    if secret is None:
        return _random_of(seed, "guess_number").randint(low, high)
    check(isinstance(secret, int) and low <= secret <= high,
          f"guess_number: the row's secret is {secret!r:.40}; it must be a whole number from {low} to {high}")
    return secret  # type: ignore[return-value]  # checked above


def _rules(game: _NumberOptions, ends: tuple[int, int], how: str) -> str | None:
    guesses = f"You have {game.max_guesses} guesses." if game.max_guesses > 1 else "You have one guess."
    return (f"\nI think of a whole number from {ends[0]} to {ends[1]}. {how} I answer higher, lower or right. "
            f"{guesses}") if game.has_rules else None


def number_rows(num_rows: int, seed: int = 0, low: int = 1, high: int = 100) -> list[dict]:
    """Rows for either game: a prompt, the ends, and a secret drawn from `seed`."""
    random = Random(seed)
    return [{"prompt": [{"role": "user", "content": "Let us play a game."}], "low": low, "high": high,
             "secret": random.randint(low, high)} for _ in range(num_rows)]


# -- words -------------------------------------------------------------------------------------------------------------


@dataclass
class WordGame:
    """The model guesses a word and gets a mark for each letter: + (right place), ? (another place) or - (not in it).

    The last word of a message that has as many letters as the secret is the guess. Columns of a row: `secret`, or
    `seed` that draws one of `words`. Made by `word_rows`.

    Attributes:
        words: What the secret is drawn from, all of one length.
        max_guesses: The game ends after as many messages, those without such a word included.
        cost: Subtracted from the reward for each wrong guess; the right one adds 1.
        partial: Added to the reward of the last guess, times the share of letters in their place, if it is not right.
        has_rules: Whether the rules are added to the row's prompt.
    """

    words: list[str] = field(default_factory=lambda: list(WORDS))
    max_guesses: int = 6
    cost: float = 0.05
    partial: float = 0.0
    has_rules: bool = True

    def __post_init__(self) -> None:
        check(self.words and all(isinstance(w, str) and _WORD.fullmatch(w) for w in self.words)
              and len({len(w) for w in self.words}) == 1,
              "environment.options of word_game: words must be a list of words of one length")
        _check_options("word_game", self.max_guesses)

    def reset(self, secret: str | None = None, seed: int | None = None, **_: object) -> str | None:
        secret = _random_of(seed, "word_game").choice(self.words) if secret is None else secret
        check(isinstance(secret, str) and _WORD.fullmatch(secret),
              f"word_game: the row's secret is {secret!r:.40}; it must be one word")
        self._secret, self._num_guesses = secret.lower(), 0
        return (f"\nI think of a word of {len(secret)} letters. Say one such word at a time. For each of its letters I "
                "answer + (it is in the right place), ? (it belongs to another place) or - (it is not in the word). "
                f"You have {self.max_guesses} guesses.") if self.has_rules else None

    def step(self, messages: list[dict]) -> tuple[list[dict], bool, float]:
        fitting = [w for w in _WORD.findall(text_of(messages).lower()) if len(w) == len(self._secret)]
        self._num_guesses += 1
        if fitting[-1:] == [self._secret]:
            return [{"role": "user", "content": "right"}], True, 1.0
        is_over = self._num_guesses >= self.max_guesses
        if not fitting:
            answer = f"Say a word of {len(self._secret)} letters."
            return [{"role": "user", "content": answer}], is_over, -self.cost
        signs = marks(fitting[-1], self._secret)
        reward = (self.partial * signs.count("+") / len(signs) if is_over else 0.0) - self.cost
        answer = " ".join(f"{letter}{sign}" for letter, sign in zip(fitting[-1], signs, strict=True))
        return [{"role": "user", "content": answer}], is_over, reward


def marks(guess: str, secret: str) -> str:
    """+, ? or - for each letter of the guess. A letter gets as many + and ? as the secret has of it, + first."""
    left = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    signs = []
    for letter, right in zip(guess, secret, strict=True):
        is_elsewhere = letter != right and left[letter] > 0
        left[letter] -= is_elsewhere
        signs.append("+" if letter == right else "?" if is_elsewhere else "-")
    return "".join(signs)


def word_rows(num_rows: int, seed: int = 0, words: list[str] | None = None) -> list[dict]:
    """Rows for the game: a prompt, and a secret that `seed` draws from the words."""
    random = Random(seed)
    return [{"prompt": [{"role": "user", "content": "Let us play a game."}], "secret": random.choice(words or WORDS)}
            for _ in range(num_rows)]


def _check_options(name: str, max_guesses: int, ends: tuple[int, int] = (0, 0)) -> None:
    at = f"environment.options of {name}"
    check(ends[0] <= ends[1], f"{at}: low is {ends[0]} and high {ends[1]}; low must not be above high")
    check(max_guesses >= 1, f"{at}: max_guesses is {max_guesses}; it must be at least 1")


def _random_of(seed: object, name: str) -> Random:
    check(isinstance(seed, (int, str)), f"{name}: the row has neither a secret nor a seed; give it one of these "
                                        "columns")
    return Random(seed)  # type: ignore[arg-type]  # checked above


# -- tasks of reasoning-gym --------------------------------------------------------------------------------------------


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
        self._task = ReasoningTask(self.task, self.settings, self.tag, allow_eval=self.allow_eval)
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
