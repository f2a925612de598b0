"""Replay of recorded episodes without their environments: to see what a model did, and why."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.request import Request, following


def replay(engine: HybridEngine, records: Sequence[dict], sampling: SamplingConfig) -> list[tuple[list, list]]:
    """Sample the turns of each episode again: ([tokens of each turn], [logprobs of each]) per episode.

    records: `Episode.replay_record`, which samples.jsonl has for the samples that it shows ("replay"). With the weights
    and settings of the original, the same tokens are drawn; the environment's messages are taken from the record. An
    episode that is drawn differently ends at the turn that differs. Only inside `inference()`.
    """
    drawn: list[tuple[list, list]] = [([], []) for _ in records]
    if not records:
        return drawn
    length = max(len(r["prompt_ids"]) + sum(len(t["added"]) + t["limit"] for t in r["turns"]) for r in records)
    turns = engine.open_turns(len(records), length, sampling)
    places = {}
    for place, record in enumerate(records):
        request = Request(record["number"], record["prompt_ids"], record["turns"][0]["limit"], record["seed"],
                          may_go_on=True)
        places[id(request)] = place, 0
        turns.submit(request)
    while turns.is_busy:
        for request in turns.step():
            place, number = places.pop(id(request))
            drawn[place][0].append(list(request.tokens))
            drawn[place][1].append(list(request.logprobs))
            left = records[place]["turns"][number:]
            if len(left) < 2 or list(request.tokens) != left[0]["said"]:
                turns.release(request)
                continue
            after = following(request, left[1]["added"], left[1]["limit"])
            places[id(after)] = place, number + 1
            turns.submit(after)
    return drawn
