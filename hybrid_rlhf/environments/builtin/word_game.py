"""Word guessing, as in Wordle: every answer marks which letters are in the right place."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from hybrid_rlhf.core.errors import check
from hybrid_rlhf.rewards.builtin import text_of

WORDS = ("apple", "beach", "bread", "chair", "cloud", "dance", "earth", "fruit", "glass", "grape", "green", "horse",
         "house", "juice", "knife", "lemon", "light", "money", "mouse", "music", "night", "ocean", "paper", "plant",
         "queen", "river", "sheep", "smile", "snake", "spoon", "stone", "sugar", "table", "tiger", "train", "water",
         "whale", "wheel", "woman", "world")
_WORD = re.compile(r"[^\W\d_]+")


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
    _secret: str = field(default="", init=False, repr=False)
    _num_guesses: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        at = "environment.options of word_game"
        check(self.words and all(isinstance(w, str) and _WORD.fullmatch(w) for w in self.words)
              and len({len(w) for w in self.words}) == 1, f"{at}: words must be a list of words of one length")
        check(self.max_guesses >= 1, f"{at}: max_guesses is {self.max_guesses}; it must be at least 1")

    def reset(self, secret: str | None = None, seed: int | None = None, **_: object) -> str | None:
        if secret is None:
            check(isinstance(seed, (int, str)), "word_game: the row has neither a secret nor a seed; give it one of "
                                                "these columns")
            secret = Random(seed).choice(self.words)
        check(isinstance(secret, str) and _WORD.fullmatch(secret),
              f"word_game: the row's secret is {secret!r:.40}; it must be one word")
        self._secret, self._num_guesses = secret.lower(), 0
        return (f"\nI think of a word of {len(secret)} letters. Say one such word at a time. For each of its letters I "
                "answer + (it is in the right place), ? (it belongs to another place) or - (it is not in the word). "
                f"You have {self.max_guesses} guesses.") if self.has_rules else None

    def step(self, messages: list[dict]) -> tuple[list[dict], bool, float]:
        guess = last_word(text_of(messages), len(self._secret))
        self._num_guesses += 1
        if guess == self._secret:
            return [{"role": "user", "content": "right"}], True, 1.0
        is_over = self._num_guesses >= self.max_guesses
        if guess is None:
            answer = f"Say a word of {len(self._secret)} letters."
            return [{"role": "user", "content": answer}], is_over, -self.cost
        signs = marks(guess, self._secret)
        reward = (self.partial * signs.count("+") / len(signs) if is_over else 0.0) - self.cost
        answer = " ".join(f"{letter}{sign}" for letter, sign in zip(guess, signs, strict=True))
        return [{"role": "user", "content": answer}], is_over, reward


def last_word(text: str, num_letters: int) -> str | None:
    """The last word of so many letters, in lower case, or None."""
    fitting = [word for word in _WORD.findall(text.lower()) if len(word) == num_letters]
    return fitting[-1] if fitting else None


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
