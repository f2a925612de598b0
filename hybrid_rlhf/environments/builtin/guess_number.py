"""Number guessing, as a game of messages and as a game with a tool. Binary search is optimal."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from random import Random

from hybrid_rlhf.core.errors import check
from hybrid_rlhf.rewards.builtin import last_number, text_of

_RULES = "I think of a whole number from {low} to {high}. {how} I answer higher, lower or right. {guesses}"


@dataclass
class GuessNumber:
    """The model says a number, and hears higher, lower or right. The last number of a message is the guess.

    Columns of a row: `secret`, or `seed` that it is drawn from; low and high, to override those below. Made by
    `number_rows`.

    Attributes:
        low: The smallest number that it can be.
        high: The greatest.
        max_guesses: The game ends after as many messages, those without a number included.
        cost: Subtracted from the reward for each wrong guess; the right one adds 1.
        has_rules: Whether the rules are added to the row's prompt.
    """

    low: int = 1
    high: int = 100
    max_guesses: int = 10
    cost: float = 0.05
    has_rules: bool = True
    _secret: int = field(default=0, init=False, repr=False)
    _num_guesses: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_options("guess_number", self.low, self.high, self.max_guesses)

    def reset(self, secret: int | None = None, seed: int | None = None, low: int | None = None,
              high: int | None = None, **_: object) -> str | None:
        self.low_now, self.high_now = _ends(self.low if low is None else low, self.high if high is None else high)
        self._secret, self._num_guesses = drawn(secret, seed, self.low_now, self.high_now), 0
        return _rules(self.low_now, self.high_now, self.max_guesses,
                      "Say one number at a time.") if self.has_rules else None

    def step(self, messages: list[dict]) -> tuple[list[dict], bool, float]:
        guess = last_number(text_of(messages))
        self._num_guesses += 1
        is_right = guess == self._secret
        answer = (f"Say a number from {self.low_now} to {self.high_now}." if guess is None
                  else answer_to(guess, self._secret))
        is_over = is_right or self._num_guesses >= self.max_guesses
        return [{"role": "user", "content": answer}], is_over, 1.0 if is_right else -self.cost


@dataclass
class GuessNumberTool:
    """The same game with a tool: the model calls guess(number), and the reward is that of the whole game.

    Columns and attributes are those of GuessNumber. After the right guess, or max_guesses, the game is over, and the
    reward does not change.
    """

    low: int = 1
    high: int = 100
    max_guesses: int = 10
    cost: float = 0.05
    has_rules: bool = True
    _secret: int = field(default=0, init=False, repr=False)
    _num_guesses: int = field(default=0, init=False, repr=False)
    _is_right: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_options("guess_number_tool", self.low, self.high, self.max_guesses)

    def reset(self, secret: int | None = None, seed: int | None = None, low: int | None = None,
              high: int | None = None, **_: object) -> str | None:
        ends = _ends(self.low if low is None else low, self.high if high is None else high)
        self._secret, self._num_guesses, self._is_right = drawn(secret, seed, *ends), 0, False
        return _rules(*ends, self.max_guesses, "Call guess with one number at a time.") if self.has_rules else None

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
        return answer_to(number, self._secret)

    def get_reward(self) -> float:
        return float(self._is_right) - self.cost * (self._num_guesses - self._is_right)


def answer_to(guess: Decimal | int | float, secret: int) -> str:
    return "right" if guess == secret else "higher" if guess < secret else "lower"


def drawn(secret: object, seed: object, low: int, high: int) -> int:
    """The row's secret, or the one that its seed draws, the same on every machine. UserError where it has neither."""
    if secret is None:
        check(isinstance(seed, (int, str)), "guess_number: the row has neither a secret nor a seed; give it one of "
                                            "these columns")
        return Random(seed).randint(low, high)  # type: ignore[arg-type]  # checked above
    check(isinstance(secret, int) and low <= secret <= high,
          f"guess_number: the row's secret is {secret!r:.40}; it must be a whole number from {low} to {high}")
    return secret  # type: ignore[return-value]  # checked above


def _check_options(name: str, low: int, high: int, max_guesses: int) -> None:
    check(low <= high, f"environment.options of {name}: low is {low} and high {high}; low must not be above high")
    check(max_guesses >= 1, f"environment.options of {name}: max_guesses is {max_guesses}; it must be at least 1")


def _ends(low: int, high: int) -> tuple[int, int]:
    check(low <= high, f"guess_number: the row's low is {low} and its high {high}; low must not be above high")
    return low, high


def _rules(low: int, high: int, max_guesses: int, how: str) -> str:
    guesses = f"You have {max_guesses} guesses." if max_guesses > 1 else "You have one guess."
    return "\n" + _RULES.format(low=low, high=high, how=how, guesses=guesses)


def number_rows(num_rows: int, seed: int = 0, low: int = 1, high: int = 100) -> list[dict]:
    """Rows for either game: a prompt, the ends, and a secret drawn from `seed`."""
    random = Random(seed)
    return [{"prompt": [{"role": "user", "content": "Let us play a game."}], "low": low, "high": high,
             "secret": random.randint(low, high)} for _ in range(num_rows)]
