"""Episodes drawn again from their records, by an engine that says what a test wrote down."""

from __future__ import annotations

from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.rollout.episodes import replay


class Turns:
    """Says answers[number of the episode] in turn, two requests at most at a time, the newest first."""

    def __init__(self, answers: dict[int, list[list[int]]]) -> None:
        self.answers, self.waiting, self.asked, self.released = answers, [], [], []

    def submit(self, request) -> None:
        self.waiting.append(request)
        self.asked.append((request.number, list(request.prompt), request.limit, request.seed, request.num_drawn))
        assert request.may_go_on

    def release(self, request) -> None:
        self.released.append(request.number)

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list:
        ended = [self.waiting.pop() for _ in self.waiting[:2]]
        for request in ended:
            request.tokens = self.answers[request.number].pop(0)
            request.logprobs = [-0.5 * token for token in request.tokens]
        return ended


class Engine:
    def __init__(self, answers: dict[int, list[list[int]]]) -> None:
        self.turns, self.opened = Turns(answers), []

    def open_turns(self, *given) -> Turns:
        self.opened.append(given)
        return self.turns


def record(number: int, prompt: list[int], *turns: tuple[list[int], int, list[int]]) -> dict:
    return {"seed": 9, "number": number, "prompt_ids": prompt,
            "turns": [{"added": added, "limit": limit, "said": said} for added, limit, said in turns]}


THREE = record(4, [1, 2], ([], 5, [10, 11]), ([20], 6, [12]), ([21, 22], 7, [13, 14]))
ONE = record(6, [3], ([], 8, [15]))


def test_turns_are_drawn_by_the_numbers_limits_and_additions_of_the_record():
    engine, sampling = Engine({4: [[10, 11], [12], [13, 14]], 6: [[15]]}), SamplingConfig(temperature=0.5)
    found = replay(engine, [THREE, ONE], sampling)
    assert found == [([[10, 11], [12], [13, 14]], [[-5.0, -5.5], [-6.0], [-6.5, -7.0]]), ([[15]], [[-7.5]])]
    assert engine.opened == [(2, 2 + 5 + 1 + 6 + 2 + 7, sampling)]  # the longest: its prompt, all added, all limits
    assert engine.turns.asked == [
        (4, [1, 2], 5, 9, 0), (6, [3], 8, 9, 0), (4, [1, 2, 10, 11, 20], 6, 9, 2),
        (4, [1, 2, 10, 11, 20, 12, 21, 22], 7, 9, 3)]
    assert engine.turns.released == [6, 4]


def test_an_episode_that_is_drawn_otherwise_ends_there_and_the_others_go_on():
    other = record(5, [1], ([], 5, [10]), ([20], 6, [12]), ([21], 7, [13]))
    engine = Engine({4: [[10, 11], [99]], 5: [[10], [12], [13]]})
    found = replay(engine, [THREE, other], SamplingConfig())
    assert [tokens for tokens, _ in found] == [[[10, 11], [99]], [[10], [12], [13]]]
    assert sorted(engine.turns.released) == [4, 5]


def test_of_no_records_nothing_is_opened():
    engine = Engine({})
    assert replay(engine, [], SamplingConfig()) == [] and engine.opened == []
