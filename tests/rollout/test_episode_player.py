"""Episodes begun and put together: whose environment plays, what is asked of the model, and what the rollout holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.environments.calls import CallPool, Outcome
from hybrid_rlhf.environments.contract import Environments, environment_of
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.rollout import Prompts, episodes
from hybrid_rlhf.rollout.episodes import EpisodePlayer, EpisodeTurns, Play, before_update
from tests.factories.tiny import tiny_tokenizer

SAMPLING = SamplingConfig(max_new_tokens=20)


class Quiet:
    """Nothing to call; reset notes its row, and says what the row has as `more`."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.rows = []

    def reset(self, **row):
        self.rows.append(row)
        if row.get("breaks"):
            raise OSError("gone")
        return row.get("more")

    def step(self, messages):
        return [], True, 0.0


class Run:
    """In the place of EpisodeTurns: every response is of the episode's number, an addition and 3."""

    def __init__(self, *_given) -> None:
        pass

    def run(self, plays, seed) -> None:
        self.plays.append((list(plays), seed))
        if self.fails:
            raise UserError("broken off")
        for play in plays:
            play.tokens, play.is_sampled, play.logprobs = [play.number, 50, 3], [True, False, True], [-1.0, 0.0, -2.0]
            play.kept = [torch.tensor([play.number, 8], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)]
            play.episode.ended = "done" if play.number % 2 else "length"
            play.episode.messages = [{"role": "assistant", "content": f"said {play.number}"}]


class Engine:
    pad_id = 77

    def open_turns(self, *_given):
        return "turns"


@pytest.fixture
def run(monkeypatch):
    """What EpisodeTurns was to play (`plays`)."""
    kind = type("Noted", (Run,), {"plays": [], "fails": False})
    monkeypatch.setattr(episodes, "EpisodeTurns", kind)
    Quiet.made = 0
    return kind


def player_of(*kinds, **settings) -> EpisodePlayer:
    own = Environments([environment_of(kind.__name__, kind, {}, "here") for kind in kinds], len(kinds) > 1)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    return EpisodePlayer(own, EnvironmentConfig(factory="a.py:a", num_workers=0, **settings), tokenizer)


def test_environments_are_made_once_and_play_again_but_for_one_that_is_still_busy(run):
    player, two = player_of(Quiet), Prompts([[1], [2]], ["a", "b"])
    player.play(Engine(), two, SAMPLING, 0, [0, 1])
    first = [play.instance for play in run.plays[0][0]]
    assert Quiet.made == 2 and first[0].object is not first[1].object
    player.play(Engine(), Prompts([[1]], ["a"]), SAMPLING, 0, [0])
    assert run.plays[1][0][0].instance is first[0]
    first[0]._lock.acquire()  # a call whose time was up still runs in it
    player.play(Engine(), two, SAMPLING, 0, [0, 1])
    again = [play.instance for play in run.plays[2][0]]
    assert again[0] is first[1] and again[1] not in first and Quiet.made == 3
    assert [play.episode.environment for play in run.plays[2][0]] == [each.object for each in again]


@pytest.mark.parametrize("prompt", [[{"role": "assistant", "content": "x"}], []])
def test_text_of_reset_needs_a_user_s_message_at_the_end(run, prompt):
    rows = {"prompt": [prompt], "more": [" go"]}
    with pytest.raises(UserError) as found:
        player_of(Quiet).play(Engine(), Prompts([[1]], ["a"], rows), SAMPLING, 0, [0])
    assert str(found.value) == (
        "environment: reset answered text, and the prompt does not end with a user message to put it in; give prompts "
        "of messages, or reset that returns None")
    assert found.value.is_before_update


def test_a_reset_that_fails_ends_the_run_and_the_next_rollout_has_calls_of_its_own(run):
    player, prompts = player_of(Quiet), Prompts([[1]], ["a"], {"breaks": [True]})
    with pytest.raises(UserError, match=r"^environment Quiet: reset raised OSError: gone.*; fix the env") as found:
        player.play(Engine(), prompts, SAMPLING, 0, [0])
    assert found.value.is_before_update and player._pool is None
    player.play(Engine(), Prompts([[1]], ["a"]), SAMPLING, 0, [0])
    pool = player._pool
    assert (pool._num_workers, pool._timeout) == (0, 30.0)
    player.play(Engine(), Prompts([[1]], ["a"]), SAMPLING, 0, [0])
    assert player._pool is pool and not pool._is_closed  # of all rollouts
    run.fails = True
    with pytest.raises(UserError, match="broken off"):
        player.play(Engine(), Prompts([[1]], ["a"]), SAMPLING, 0, [0])
    assert player._pool is None and pool._is_closed


def test_resets_wait_in_the_lanes_of_their_environments_and_one_that_is_late_says_what_would_help(run):
    player, started = player_of(Quiet), []
    prompts = Prompts([[1]], ["a"], {"n": [5]})

    class Pool:
        num_waiting = 1

        def start(self, key, call, lane):
            started.append((key, call.func.__name__, call.args, lane))

        def finished(self, wait):
            assert wait
            return [(0, Outcome(None, "too late", True))]

    player._pool = Pool()
    plays = player._begin(prompts, [0])
    plays[0].instance.lane = "its own"
    with pytest.raises(UserError) as found:
        player._reset(plays, prompts, player._pool)
    assert started == [(0, "reset", ({"n": 5},), "its own")]
    assert str(found.value) == "environment Quiet: too late; reset needs longer: raise environment.timeout"


# --- The turns of episodes over an engine that says what a test wrote down: what is asked, added, counted and paid

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


class Steps:
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


def test_a_turn_that_ends_with_the_header_of_the_next_is_parsed_without_it(monkeypatch, template):
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


@pytest.mark.parametrize(("kind", "what"), [(Adder, "get_reward"), (Steps, "step")])
def test_an_environment_that_is_late_with_what_an_episode_needs_ends_the_run(kind, what):
    with pytest.raises(UserError) as found:
        played(instance_of(kind), [7, END], pool=Late(True))
    assert str(found.value) == (f"environment {kind.__name__}: too late; {what} needs longer: raise "
                                "environment.timeout")


def test_what_the_user_can_mend_has_changed_no_weight():
    game = instance_of(Steps, [("go", False, "much")])
    with pytest.raises(UserError, match="step answered the reward 'much'") as found:
        played(game, [7, END])
    assert found.value.is_before_update
    with pytest.raises(UserError) as found, before_update():
        raise UserError("mend it")
    assert found.value.is_before_update


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
