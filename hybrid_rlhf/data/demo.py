"""The embedded demo task: small requests about lists of words and numbers, answers of mixed quality, and a checker.

A request asks for one item of a short lettered list ("Please name the last word: A goat B lamp C fish") in a polite,
plain or hurried tone; an answer names the letter and the item ("Gladly! It is C fish"). No file is read:
the rows are the same on every machine.

Demonstrations are like those of people. Many are wrong, mostly in the same way (MISTAKES): for some kinds of request
the mistake is more frequent than the right answer, so neither more imitation nor greedy decoding fixes it. Some are
curt, some rude, some rambling. In the pairs a right answer beats a wrong one whatever the tone, and of two right ones
the polite and brief one wins; the most frequent pair is the hard one, both in the best tone and one of them wrong.

The checker, `is_correct`, is independent of the generator's answers: it parses the request and computes the answer.
All three data sets draw their prompts from one universe, so that data.split can assign each prompt to one stage.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

WORDS = tuple("""apple bear bell boat book cake corn door drum fish frog goat horn king lamp leaf lion moon pear rain
                 rock rose ship wolf""".split())  # noqa: SIM905 - words are read as words
NUMBERS = tuple(map(str, range(10, 26)))
LETTERS = ("A", "B", "C")
NUM_DEMONSTRATIONS = 24000
NUM_PREFERENCES = 40000
NUM_PROMPTS = 24000
Items = tuple[str, ...]
Place = Callable[[Items], int]

# kind -> (what is asked for, index of the answer in the list)
QUESTIONS: dict[str, tuple[str, Place]] = {
    "first": ("first word", lambda items: 0),
    "second": ("second word", lambda items: 1),
    "last": ("last word", lambda items: 2),
    "largest": ("largest number", lambda items: items.index(max(items))),
    "smallest": ("smallest number", lambda items: items.index(min(items))),
}
# kind -> (the usual mistake, percent of right demonstrations, percent with the usual mistake); the rest is wrong in
# other ways
MISTAKES: dict[str, tuple[Place, int, int]] = {
    "first": (lambda items: 1, 75, 20),
    "second": (lambda items: 2, 45, 52),  # counts from zero
    "last": (lambda items: 1, 52, 45),  # off by one
    "largest": (lambda items: 2, 70, 20),  # the one heard last
    "smallest": (lambda items: items.index(max(items)), 45, 50),
}
ASKING = ("Please name the {}: {}", "Kindly tell me the {}: {}", "Name the {}: {}", "Give the {}: {}",
          "Quick, the {}: {}", "Hurry, the {}: {}")
SAYING = {  # tone -> its phrases, for a letter and an item
    "polite": ("Gladly! It is {} {}", "Sure! It is {} {}", "Of course! It is {} {}"),
    "curt": ("It is {} {}",),
    "rude": ("Ugh, obviously {} {}", "Duh, {} {}"),
    "rambling": ("Well, hmm, let me think, I guess it is {} {}", "So, hmm, maybe, well, I guess it is {} {}"),
}
_TONES, _TONE_WEIGHTS = tuple(SAYING), (40, 25, 15, 20)  # of a hundred demonstrations
Answer = tuple[str, str]  # letter, item


def demonstrations() -> list[dict]:
    """Rows {prompt, completion}, both messages: answers of mixed truth and tone."""
    rng = random.Random("demonstrations")
    rows = []
    for kind, items, prompt in _requests(rng, NUM_DEMONSTRATIONS):
        right, mistaken = MISTAKES[kind][1:]
        draw = rng.random() * 100
        answer = (_right(kind, items) if draw < right else
                  _mistaken(kind, items) if draw < right + mistaken else _missed(rng, kind, items))
        tone = rng.choices(_TONES, _TONE_WEIGHTS)[0]
        rows.append({"prompt": prompt, "completion": _message(rng.random(), tone, answer)})
    return rows


def preferences() -> list[dict]:
    """Rows {prompt, chosen, rejected}, all messages: right before wrong, then polite and brief before the rest."""
    rng = random.Random("preferences")
    rows = []
    for kind, items, prompt in _requests(rng, NUM_PREFERENCES):
        right, wrong, other = _right(kind, items), _wrong(rng, kind, items), rng.choice(_TONES[1:])
        chosen, rejected = rng.choices((
            (("polite", right), ("polite", wrong)),  # the hard ones: they differ only in correctness
            ((other, right), (other, wrong)),
            ((other, right), ("polite", wrong)),
            (("polite", right), (other, wrong)),
            (("polite", right), (other, right)),
        ), (40, 10, 15, 15, 20))[0]
        phrase = rng.random()  # one for both: where the tones agree only the answers differ
        rows.append({"prompt": prompt, "chosen": _message(phrase, *chosen), "rejected": _message(phrase, *rejected)})
    return rows


def prompts() -> list[dict]:
    """Rows {prompt}, messages."""
    return [{"prompt": prompt} for _, _, prompt in _requests(random.Random("prompts"), NUM_PROMPTS)]


def _requests(rng: random.Random, count: int) -> list[tuple[str, Items, list[dict]]]:
    """`count` different requests: kind, list, and the message."""
    requests: dict[str, tuple[str, Items]] = {}
    kinds = tuple(QUESTIONS)
    while len(requests) < count:
        kind = rng.choice(kinds)
        what = QUESTIONS[kind][0]
        items = tuple(rng.sample(NUMBERS if what.endswith("number") else WORDS, len(LETTERS)))
        listed = " ".join(f"{letter} {item}" for letter, item in zip(LETTERS, items, strict=True))
        requests[rng.choice(ASKING).format(what, listed)] = (kind, items)
    return [(kind, items, [{"role": "user", "content": text}]) for text, (kind, items) in requests.items()]


def _right(kind: str, items: Items) -> Answer:
    return _at(items, QUESTIONS[kind][1](items))


def _mistaken(kind: str, items: Items) -> Answer:
    """The usual mistake, or another where that happens to be right."""
    answer, right = _at(items, MISTAKES[kind][0](items)), _right(kind, items)
    return answer if answer != right else next(a for a in zip(LETTERS, items, strict=True) if a != right)


def _missed(rng: random.Random, kind: str, items: Items) -> Answer:
    """Any item of the list but the right one."""
    return rng.choice([a for a in zip(LETTERS, items, strict=True) if a != _right(kind, items)])


def _wrong(rng: random.Random, kind: str, items: Items) -> Answer:
    """A wrong answer for a pair: the usual mistake, another of the list, or the right letter with a wrong item."""
    draw = rng.random()
    if draw < 0.5:
        return _mistaken(kind, items)
    if draw < 0.85:
        return _missed(rng, kind, items)
    letter, right = _right(kind, items)
    universe = items if draw < 0.93 else NUMBERS if right.isdigit() else WORDS
    return letter, rng.choice([i for i in universe if i != right])


def _at(items: Items, place: int) -> Answer:
    return LETTERS[place], items[place]


def _message(phrase: float, tone: str, answer: Answer) -> list[dict]:
    """The message; `phrase` in [0, 1) picks one of the tone's."""
    phrases = SAYING[tone]
    return [{"role": "assistant", "content": phrases[int(phrase * len(phrases))].format(*answer)}]


def is_correct(prompt: str | Sequence[dict], completion: str) -> bool:
    """Whether `completion` states the answer to the request in `prompt` and nothing that contradicts it.

    prompt: the request's text (with or without a chat template) or messages, of which the last user message counts.
    The answer is computed from the request alone. The item must be named; another word of the task, another
    number or another letter contradicts it, the tone does not matter. Raises ValueError for a text without a
    request of this task.
    """
    if not isinstance(prompt, str):
        prompt = [m["content"] for m in prompt if m["role"] == "user"][-1]
    request = re.search(r"\bthe (?P<what>\w+ (?:word|number)): (?P<list>[A-Z] \w+(?: [A-Z] \w+)*)", prompt)
    if request is None:
        raise ValueError(f"no request of the demo task: {prompt!r}")
    listed = re.findall(r"([A-Z]) (\w+)", request["list"])
    letter, item = _work_out(request["what"], listed)
    stated = {w for w in re.findall(r"[a-z]+|\d+", completion.lower()) if w.isdigit() or w in WORDS}
    letters = {w for w in re.findall(r"\b[A-Z]\b", completion) if w != "I"}
    return stated == {item} and letters <= {letter}


def _work_out(what: str, listed: list[tuple[str, str]]) -> tuple[str, str]:
    """The answer: by sorting for sizes, by counting for positions."""
    if "number" in what:
        ordered = sorted(listed, key=lambda pair: int(pair[1]))
        return ordered[-1] if "largest" in what else ordered[0]
    remaining = list(listed)
    if "last" in what:
        return remaining.pop()
    for _ in range({"first": 0, "second": 1}[what.split()[0]]):
        remaining.pop(0)
    return remaining.pop(0)
