"""The turns of episodes over an engine that says what a test wrote down: what is asked, added, counted and paid."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.environments.calls import CallPool, Outcome
from hybrid_rlhf.environments.contract import Environments, environment_of
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.rollout import episodes
from hybrid_rlhf.rollout.episodes import EpisodeTurns, Play, before_update, value_of

END = 3  # the token that ends a turn
FOREIGN = 4  # one that ends it too, and for the template is no end of a turn
CALL_END = 5  # one that the template has behind calls


class Turns:
    """Says answers[number of the episode] in turn, of log-probability -0.5 a token."""

    stops = frozenset([END, FOREIGN, CALL_END])

    def __init__(self, answers: dict[int, list[list[int]]]) -> None:
        self.answers, self.waiting, self.asked, self.released = answers, [], [], []

    def submit(self, request) -> None:
        self.waiting.append(request)
        self.asked.append((request.number, list(request.prompt), request.limit, request.seed))
        assert request.may_go_on

    def release(self, request) -> None:
        self.released.append(list(request.tokens))

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list:
        ended, self.waiting = self.waiting, []
        for request in ended:
            request.tokens = self.answers[request.number].pop(0)[: request.limit]
            request.logprobs = [-0.5] * len(request.tokens)
            request.kept = [torch.tensor([token], dtype=torch.int32) for token in request.tokens]
        return ended


class Adder:
    """Counts up; it is lost from 100 on."""

    def reset(self, **row) -> None:
        self.sum = 0

    def add(self, a: int) -> str:
        """Adds.

        Args:
            a: How much.
        """
        self.sum += a
        if self.sum >= 100:
            raise ValueError("too much")
        return "x" * self.sum

    def get_reward(self):
        return self.sum / 2


class Game:
    """Steps that a test wrote down: (messages, done, reward)."""

    def __init__(self, steps=()) -> None:
        self.steps, self.seen = list(steps), []

    def step(self, messages):
        self.seen.append([m["content"] for m in messages])
        return self.steps.pop(0)


def instance_of(kind, *given):
    own = Environments([environment_of(kind.__name__, lambda: kind(*given), {}, "here")], False)
    made = own.kinds[0].new()
    if hasattr(made.object, "reset"):
        made.reset({})
    return made


@pytest.fixture(autouse=True)
def template(monkeypatch) -> list:
    """A message is a token 50 + its length; a turn that has not ended is ended by END before that; calls are tokens
    from 60 on, of a - 60 each; 59 is a call that cannot be read. What was parsed is noted."""
    parsed = []

    def added_tokens(tokenizer, message, added, is_ended, kwargs=None):
        assert tokenizer is TOKENIZER and message["role"] == "assistant"
        return ([] if is_ended else [END]) + [50 + len(m["content"]) for m in added]

    def parse_turn(tokenizer, ids, tools, prefix):
        assert tokenizer is TOKENIZER and [tool["function"]["name"] for tool in tools] == ["add"]
        parsed.append((list(ids), prefix))
        calls = [{"function": {"name": "add", "arguments": {"a": i - 60}}} for i in ids if i >= 60]
        message = {"role": "assistant", "content": "said"} | ({"tool_calls": calls} if calls else {})
        return message, ["cannot be read"] * ids.count(59)

    monkeypatch.setattr(episodes, "added_tokens", added_tokens)
    monkeypatch.setattr(episodes, "parse_turn", parse_turn)
    monkeypatch.setattr(episodes, "turn_ends", lambda tokenizer: [
        END, CALL_END] if tokenizer is TOKENIZER else [])
    monkeypatch.setattr(episodes, "special_ids", lambda tokenizer: {
        "<end>": END, "<next>": FOREIGN} if tokenizer is TOKENIZER else {})
    return parsed


TOKENIZER = SimpleNamespace(decode=lambda ids, **options: " ".join(map(str, ids)), eos_token_id=END, pad_token_id=0)


def played(instance, *answers: list[int], most: int = 50, ids=(1, 2), pool=None, **settings) -> tuple[Play, Turns]:
    config = EnvironmentConfig(factory="a.py:a", num_workers=0, **settings)
    play, turns = Play(5, instance, [{"role": "user", "content": "asked"}], list(ids)), Turns({5: list(answers)})
    pool = pool or CallPool(0, 30.0)
    EpisodeTurns(config, TOKENIZER, turns, pool, SamplingConfig(max_new_tokens=most)).run([play], 8)
    return play, turns


class Late:
    """A pool whose calls are late, or answered by `value`, in turn; it notes their lanes."""

    def __init__(self, *late: bool, value=None) -> None:
        self.late, self.value, self.started, self.lanes = list(late), value, [], []

    def start(self, key, call, then, lane) -> None:
        self.started.append(key)
        self.lanes.append(lane)

    @property
    def num_waiting(self) -> int:
        return len(self.started)

    def finished(self, wait: bool) -> list:
        return [(key, Outcome(None, "too late", True) if self.late.pop(0) else Outcome(self.value)) for key in
                [self.started.pop() for _ in self.started[:1]]]


def test_a_call_is_made_and_its_answer_is_read_by_the_next_turn():
    play, turns = played(instance_of(Adder), [63, 8, END], [7, END])
    assert turns.asked == [(5, [1, 2], 50, 8), (5, [1, 2, 63, 8, END, 53], 50 - 3 - 1, 8)]  # the answer is xxx
    assert play.tokens == [63, 8, END, 53, 7, END] and play.is_sampled == [True] * 3 + [False, True, True]
    assert play.logprobs == [-0.5] * 3 + [0.0, -0.5, -0.5] and [int(k) for k in play.kept] == [63, 8, END, 7, END]
    episode = play.episode
    assert (episode.turn_starts, episode.turn_ends, episode.limits) == ([0, 4], [3, 6], [50, 46])
    assert [m["role"] for m in episode.messages] == ["assistant", "tool", "assistant"]
    assert episode.messages[1] == {"role": "tool", "name": "add", "content": "xxx"}
    assert (episode.ended, episode.reward, episode.seed, episode.number) == ("done", 1.5, 8, 5)
    assert (episode.num_calls, episode.num_failed, episode.num_late, episode.num_cut) == (1, 0, 0, 0)
    assert episode.turn_rewards == [] and turns.released == [[7, END]]


def test_several_calls_of_a_turn_are_made_in_their_order_and_counted_by_what_became_of_them():
    play, _ = played(instance_of(Adder), [61, 159, 60, END], [7, END], max_answer_chars=1)
    first, second, third = (m["content"] for m in play.episode.messages[1:4])  # 1, then 100, then 100
    assert first == "x" and second.startswith("error: add raised ValueError: too much")
    assert third.startswith("error: add raised ValueError: too much")
    assert (play.episode.num_calls, play.episode.num_failed, play.episode.num_cut) == (3, 2, 0)
    play, _ = played(instance_of(Adder), [62, END], [7, END], max_answer_chars=1)
    assert play.episode.messages[1]["content"].startswith("x\n[cut here") and play.episode.num_cut == 1


def test_a_call_that_cannot_be_read_is_answered_and_may_cost():
    for penalty, rewards in ((0.0, []), (0.5, [-0.5, -0.5, 0.0])):
        play, _ = played(instance_of(Adder), [59, 59, END], [59, END], [7, END], malformed_penalty=penalty)
        assert play.episode.num_malformed == 3 and play.episode.turn_rewards == rewards
        assert play.episode.messages[1:3] == [
            {"role": "tool", "name": "tool", "content": "error: cannot be read"}] * 2
        assert play.episode.num_calls == 0 and play.episode.ended == "done"


def test_a_turn_is_limited_by_itself_and_by_what_is_left_with_what_was_added():
    play, turns = played(instance_of(Adder), [60, END], [60, END], [8] * 9, most=9, max_new_tokens_per_turn=4)
    assert [limit for _, _, limit, _ in turns.asked] == [4, 4, 3]  # 9 less 2 + 1, less 2 + 1 again
    assert play.episode.ended == "length" and len(play.tokens) == 9 and play.episode.reward == 0.0


@pytest.mark.parametrize(("most", "ended", "num_turns"), [(4, "length", 2), (3, "no_room", 1)])
def test_an_answer_that_leaves_no_token_ends_the_episode_before_it(most, ended, num_turns):
    play, turns = played(instance_of(Adder), [60, END], [8, 8], most=most)
    assert (play.episode.ended, len(play.episode.turn_ends)) == (ended, num_turns)
    assert len(play.tokens) == (4 if ended == "length" else 2) and len(turns.released) == 1
    assert len(play.episode.messages) == (3 if ended == "length" else 1)


def test_the_last_turn_s_call_is_made_and_nobody_reads_its_answer():
    play, turns = played(instance_of(Adder), [64, END], [64, END], [7, END], max_turns=2)
    assert play.episode.ended == "max_turns" and play.episode.reward == 4.0  # 4 + 4, by two
    assert play.tokens == [64, END, 54, 64, END] and turns.released == [[64, END]]


def test_a_turn_that_ends_with_the_header_of_the_next_reads_it_once(monkeypatch, template):
    monkeypatch.setattr(episodes, "added_tokens", lambda *given: [FOREIGN, 50])
    play, _ = played(instance_of(Adder), [8, 60, FOREIGN], [7, END])
    assert play.tokens == [8, 60, FOREIGN, 50, 7, END]
    assert [ids for ids, _ in template] == [[8, 60], [7, END]]  # what was said is without the header
    monkeypatch.setattr(episodes, "special_ids", lambda tokenizer: {"<end>": END})  # a word of the user's choice
    played(instance_of(Adder), [60, FOREIGN], [7, END])
    assert [ids for ids, _ in template[2:]] == [[60, FOREIGN], [7, END]]


def test_the_last_64_tokens_before_a_turn_may_open_a_thought(template):
    played(instance_of(Adder), [7, END], ids=range(100, 200))
    assert template[0][1] == " ".join(map(str, range(136, 200)))


def test_a_template_is_told_whether_the_turn_ended_by_its_own_end():
    play, _ = played(instance_of(Adder), [60, FOREIGN], [7, END])
    assert play.tokens == [60, FOREIGN, END, 50, 7, END]
    play, _ = played(instance_of(Adder), [60, 8, 8, CALL_END], [7, END])
    assert play.tokens == [60, 8, 8, CALL_END, 50, 7, END]  # it is not ended twice


def test_a_game_s_steps_pay_their_turns_and_end_the_episode():
    game = instance_of(Game, [("go", False, 0.25), ("on", False, None), ("over", True, 2.0)])
    play, _ = played(game, [7, END], [8, END], [9, END])
    assert play.episode.turn_rewards == [0.25, 0.0, 2.0] and play.episode.reward is None
    assert play.episode.ended == "done" and play.tokens == [7, END, 52, 8, END, 52, 9, END]
    said = "7"
    assert game.object.seen == [["asked", said], ["asked", said, "go", "8"],
                                ["asked", said, "go", "8", "on", "9"]]
    assert [m["content"] for m in play.episode.messages][-1] == "over"  # for who reads the episode
    assert [m["role"] for m in play.episode.messages] == ["assistant", "user"] * 3
    assert play.episode.num_calls == 0


def test_a_call_that_is_late_is_counted_as_that_and_told_to_the_model():
    made, pool = instance_of(Adder), Late(True, True, False, value=2)
    made.lane = "its own"
    play, _ = played(made, [61, 62, END], [7, END], pool=pool)
    assert (play.episode.num_late, play.episode.num_failed, play.episode.num_calls) == (2, 0, 2)
    assert [m["content"] for m in play.episode.messages[1:3]] == ["error: too late"] * 2
    assert play.episode.reward == 2.0 and pool.lanes == ["its own"] * 3


@pytest.mark.parametrize(("kind", "what"), [(Adder, "get_reward"), (Game, "step")])
def test_an_environment_that_is_late_with_what_an_episode_needs_ends_the_run(kind, what):
    with pytest.raises(UserError) as found:
        played(instance_of(kind), [7, END], pool=Late(True))
    assert str(found.value) == (f"environment {kind.__name__}: too late; {what} needs longer: raise "
                                "environment.timeout")


def test_two_episodes_go_on_side_by_side_each_with_its_own_answers():
    plays = [Play(number, instance_of(Adder), ids=[number]) for number in (2, 9)]
    turns = Turns({2: [[61, END], [7, END]], 9: [[8, END]]})
    config = EnvironmentConfig(factory="a.py:a", num_workers=2)
    EpisodeTurns(config, TOKENIZER, turns, CallPool(2, 30.0), SamplingConfig(max_new_tokens=20)).run(plays, 1)
    assert [play.tokens for play in plays] == [[61, END, 51, 7, END], [8, END]]
    assert [play.episode.reward for play in plays] == [0.5, 0.0] and [p.episode.number for p in plays] == [2, 9]


def test_what_the_user_can_mend_has_changed_no_weight():
    game = instance_of(Game, [("go", False, "much")])
    with pytest.raises(UserError, match="step answered the reward 'much'") as found:
        played(game, [7, END])
    assert found.value.is_before_update
    with pytest.raises(UserError) as found, before_update():
        raise UserError("mend it")
    assert found.value.is_before_update


def test_an_answer_that_failed_says_what_would_help():
    made = instance_of(Adder)
    assert value_of(Outcome(5), made, "step") == 5
    for is_late, cure in ((True, "step needs longer: raise environment.timeout"), (False, "fix the environment")):
        with pytest.raises(UserError) as found:
            value_of(Outcome(None, "why", is_late), made, "step")
        assert str(found.value) == f"environment Adder: why; {cure}"


@pytest.mark.parametrize(("answer", "reward"), [
    (2, 2.0), (None, None), (torch.tensor(1.5), 1.5), (float("inf"), "inf"), ("high", "'high'"), ([1], "[1]")])
def test_the_reward_of_an_episode_is_a_finite_number_or_none(answer, reward):
    made = instance_of(type("Paying", (Adder,), {"get_reward": lambda self: answer}))
    if isinstance(reward, str):
        with pytest.raises(UserError) as found:
            played(made, [7, END])
        assert str(found.value) == (f"environment Paying: get_reward answered {reward}, where a finite number or None "
                                    "is needed")
    else:
        play, _ = played(made, [7, END])
        assert play.episode.reward == reward and (reward is None or isinstance(play.episode.reward, float))
