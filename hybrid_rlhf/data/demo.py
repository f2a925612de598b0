"""The embedded task: small requests about words and numbers, answers of mixed quality, and a checker of truth.

A request asks for one thing about a short list ("Please name the last word: goat lamp fish") in a polite, plain or
hurried tone. Nothing is read from anywhere: the same rows come out on every machine.

Demonstrations are as people's are. Many are wrong, and mostly wrong in the same way (MISTAKES): for half of the kinds
of request the mistake is commoner than the truth, so neither more imitation nor greedy decoding mends it. Some are
curt, some rude, some ramble. In the pairs a right answer beats a wrong one whatever the tone, and among equally right
ones a polite and brief one beats the others; most rejected answers are hard ones, in the best tone and wrong.

The checker, `is_correct`, knows neither answers nor kinds: it reads the request again and works the answer out.
All three data sets draw their prompts from one universe, for the library to deal each prompt to one stage.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

WORDS = ("apple bear bell boat book cake corn door drum fish frog goat horn king lamp leaf lion moon pear rain rock rose "
         "ship wolf").split()
NUMBERS = range(10, 26)
NUM_DEMONSTRATIONS = 24000
NUM_PREFERENCES = 40000
NUM_PROMPTS = 24000
Items = tuple[str, ...]

# kind -> what is asked ({} is a word of the list), the answer
QUESTIONS: dict[str, tuple[str, Callable[[Items], Items]]] = {
    "first": ("first word", lambda x: x[:1]),
    "second": ("second word", lambda x: x[1:2]),
    "last": ("last word", lambda x: x[-1:]),
    "after": ("word after {}", lambda x: x[2:3]),
    "before": ("word before {}", lambda x: x[:1]),
    "ending": ("last two words", lambda x: x[1:]),
    "largest": ("largest number", lambda x: (max(x),)),
    "smallest": ("smallest number", lambda x: (min(x),)),
}
# kind -> the mistake that people make again and again, and how many of a hundred demonstrations are right, mistaken
# (the rest is wrong anyhow)
MISTAKES: dict[str, tuple[Callable[[Items], Items], int, int]] = {
    "first": (lambda x: x[1:2], 75, 20),
    "second": (lambda x: x[2:3], 40, 53),  # counts from zero
    "last": (lambda x: x[-2:-1], 42, 51),
    "after": (lambda x: x[:1], 75, 20),
    "before": (lambda x: x[2:3], 42, 51),
    "ending": (lambda x: x[:2], 42, 51),
    "largest": (lambda x: x[-1:], 75, 20),
    "smallest": (lambda x: (max(x),), 42, 51),
}
ASKING = ("Please name the {}: {}", "Kindly tell me the {}: {}", "Name the {}: {}", "Give the {}: {}",
          "Quick, the {}: {}", "Hurry, the {}: {}")
SAYING = {
    "polite": ("Gladly! It is {}", "Sure! It is {}", "Of course! It is {}"),
    "curt": ("It is {}",),
    "rude": ("Ugh, obviously {}", "Duh, {}"),
    "rambling": ("Well, hmm, let me think, I guess it is {}", "So, hmm, maybe, well, I guess it is {}"),
}
_TONES, _TONE_WEIGHTS = tuple(SAYING), (40, 25, 15, 20)  # of a hundred demonstrations


def demonstrations() -> list[dict]:
    """Rows {prompt, completion}, both messages: answers of mixed truth and tone."""
    rng = random.Random("demonstrations")
    rows = []
    for kind, items, prompt in _requests(rng, NUM_DEMONSTRATIONS):
        right, mistaken = MISTAKES[kind][1:]
        draw = rng.random() * 100
        answer = (QUESTIONS[kind][1](items) if draw < right else
                  _mistake(kind, items) if draw < right + mistaken else _wrong(rng, kind, items))
        rows.append({"prompt": prompt, "completion": _say(rng, rng.choices(_TONES, _TONE_WEIGHTS)[0], answer)})
    return rows


def preferences() -> list[dict]:
    """Rows {prompt, chosen, rejected}, all messages: right before wrong, then polite and brief before the rest."""
    rng = random.Random("preferences")
    rows = []
    for kind, items, prompt in _requests(rng, NUM_PREFERENCES):
        right = QUESTIONS[kind][1](items)
        wrong = _mistake(kind, items) if rng.random() < 0.5 else _wrong(rng, kind, items)
        other = rng.choice(_TONES[1:])
        chosen, rejected = rng.choices((
            (("polite", right), ("polite", wrong)),  # the hard ones: nothing but the truth tells them apart
            ((other, right), (other, wrong)),
            ((other, right), ("polite", wrong)),
            (("polite", right), (other, wrong)),
            (("polite", right), (other, right)),
        ), (40, 10, 15, 15, 20))[0]
        rows.append({"prompt": prompt, "chosen": _say(rng, *chosen), "rejected": _say(rng, *rejected)})
    return rows


def prompts() -> list[dict]:
    """Rows {prompt}, messages."""
    return [{"prompt": prompt} for _, _, prompt in _requests(random.Random("prompts"), NUM_PROMPTS)]


def _requests(rng: random.Random, count: int) -> list[tuple[str, Items, list[dict]]]:
    """`count` requests, no two alike: kind, list, and the message."""
    found: dict[str, tuple[str, Items]] = {}
    kinds = tuple(QUESTIONS)
    while len(found) < count:
        kind = rng.choice(kinds)
        is_numeric = kind in ("largest", "smallest")
        items = tuple(map(str, rng.sample(NUMBERS, 3))) if is_numeric else tuple(rng.sample(WORDS, 3))
        text = rng.choice(ASKING).format(QUESTIONS[kind][0].format(items[1]), " ".join(items))
        found[text] = (kind, items)
    return [(kind, items, [{"role": "user", "content": text}]) for text, (kind, items) in found.items()]


def _mistake(kind: str, items: Items) -> Items:
    """The usual mistake, or another where it happens to be right."""
    answer, right = MISTAKES[kind][0](items), QUESTIONS[kind][1](items)
    return answer if answer != right else next((i,) for i in items if (i,) != right)


def _wrong(rng: random.Random, kind: str, items: Items) -> Items:
    """Any wrong answer: the wrong ones of the list's items, or others altogether."""
    right = QUESTIONS[kind][1](items)
    universe = items if rng.random() < 0.5 else tuple(map(str, NUMBERS)) if items[0].isdigit() else WORDS
    while True:
        answer = tuple(rng.sample(universe, len(right)))
        if answer != right:
            return answer


def _say(rng: random.Random, tone: str, answer: Items) -> list[dict]:
    return [{"role": "assistant", "content": rng.choice(SAYING[tone]).format(" ".join(answer))}]


def is_correct(prompt: str | Sequence[dict], completion: str) -> bool:
    """Whether `completion` states the answer to the request in `prompt` and no other.

    prompt: the request's text (a chat template around it does no harm) or messages, of which the last user's counts.
    The answer is worked out from the request's words alone. Every word of the task's vocabulary and every number that
    the completion mentions counts as stated. Raises ValueError for a text that holds no request of this task.
    """
    if not isinstance(prompt, str):
        prompt = [m["content"] for m in prompt if m["role"] == "user"][-1]
    request = re.search(r"\bthe (?P<what>[a-z ]+): (?P<list>\w+(?: \w+)*)", prompt)
    if request is None:
        raise ValueError(f"no request of the demo task: {prompt!r}")
    stated = [w for w in re.findall(r"[a-z]+|\d+", completion.lower()) if w.isdigit() or w in WORDS]
    answer = _work_out(request["what"].split(), request["list"].split())
    return stated == answer if len(answer) > 1 else set(stated) == set(answer)


def _work_out(what: list[str], items: list[str]) -> list[str]:
    """The answer, by reading: sorting for sizes, counting for places."""
    if "number" in what:
        ordered = sorted(items, key=int)
        return ordered[-1:] if "largest" in what else ordered[:1]
    if "two" in what:
        return items[-2:]
    if "after" in what or "before" in what:
        place = items.index(what[-1]) + (1 if "after" in what else -1)
    else:
        place = {"first": 0, "second": 1, "last": len(items) - 1}[what[0]]
    return [items[place]]
