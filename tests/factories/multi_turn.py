"""Sequences of several turns, between which a test adds tokens of its own."""

from __future__ import annotations

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.request import Request, following

ADDED = [[7, 8, 9, 10, 11], [12], [13, 14, 15], [16, 17], [20, 21, 22, 23, 24, 25, 26], [30, 31, 32]]
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47], [50], [60, 61, 62, 63], [70, 71, 72, 73, 74], [80, 81]]
LIMITS = [4, 7, 2, 5, 3, 6]  # tokens of the first turn; the second has 3 more than the other end of the list


def engine_of(model, **changes) -> HybridEngine:
    return HybridEngine(model, model, eos_ids=[1], pad_id=0, **changes)


def play(engine, num_turns=3, order=lambda waiting: waiting, late=0, sampling=None):
    """Episodes of `num_turns` turns: (all tokens, logprobs or None where others wrote) of each. order: which of the
    turns that ended go on, and when; late: how many steps they wait."""
    sampling = sampling or SamplingConfig(max_new_tokens=64)
    said: dict[int, list] = {i: [] for i in range(len(PROMPTS))}
    rows: dict[int, list[int]] = {}
    turn = dict.fromkeys(said, 0)
    with engine.inference():
        turns = engine.open_turns(len(PROMPTS), 64, sampling)
        for i, prompt in enumerate(PROMPTS):
            turns.submit(Request(i, prompt, LIMITS[i], seed=3, may_go_on=True))
        waiting: list[tuple[int, Request]] = []
        steps = 0
        while turns.is_busy or waiting:
            steps += 1
            for request in turns.step():
                i = request.number
                said[i] += request.logprobs
                rows[i] = [*request.prompt, *request.tokens]
                turn[i] += 1
                if turn[i] == num_turns:
                    turns.release(request)
                    continue
                waiting.append((steps + late, request))
            due, waiting = [r for when, r in waiting if when <= steps], [w for w in waiting if w[0] > steps]
            for request in order(due):
                added = ADDED[(request.number + turn[request.number]) % len(ADDED)]
                said[request.number] += [None] * len(added)
                turns.submit(following(request, added, LIMITS[-1 - request.number] + 3))
    return [rows[i] for i in said], [said[i] for i in said]
