"""Episodes begun and put together: whose environment plays, what is asked of the model, and what the rollout holds."""

from __future__ import annotations

import gc
from datetime import date
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.data.chat import Rendered
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.environments.calls import Outcome
from hybrid_rlhf.environments.contract import Environments, environment_of
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.rollout import Prompts, episodes
from hybrid_rlhf.rollout.episodes import EpisodePlayer
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


class Able(Quiet):
    made = 0

    def wave(self) -> str:
        """Waves."""
        return "waved"


class Game(Quiet):
    made = 0


class Run:
    """In the place of EpisodeTurns: every response is of the episode's number, an addition and 3."""

    def __init__(self, *given) -> None:
        self.seen.append(given)

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

    def __init__(self) -> None:
        self.opened = []

    def open_turns(self, *given):
        self.opened.append(given)
        if given[1] > 1000:
            raise UserError("too long")
        return "turns"


@pytest.fixture
def run(monkeypatch):
    """How EpisodeTurns was made (`seen`) and what it was to play (`plays`)."""
    kind = type("Noted", (Run,), {"seen": [], "plays": [], "fails": False})
    monkeypatch.setattr(episodes, "EpisodeTurns", kind)
    for each in (Quiet, Able, Game):
        each.made = 0
    return kind


@pytest.fixture
def written(monkeypatch) -> list:
    """Prompts become the token 90 and the lengths of their messages; what was to be written is noted."""
    seen = []

    def compose(tokenizer, messages):
        assert tokenizer.chat_template == "{{ messages }}"
        seen.append(messages)
        return Rendered("+".join(m["content"] for m in messages), [], False)

    monkeypatch.setattr(episodes.chat, "compose_prompt", compose)
    monkeypatch.setattr(episodes.chat, "encode_all", lambda tokenizer, texts: [
        SimpleNamespace(ids=[90, len(text.text)]) for text in texts if tokenizer.chat_template == "{{ messages }}"])
    return seen


def player_of(*kinds, **settings) -> EpisodePlayer:
    own = Environments([environment_of(kind.__name__, kind, {}, "here") for kind in kinds], len(kinds) > 1)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    return EpisodePlayer(own, EnvironmentConfig(factory="a.py:a", num_workers=0, **settings), tokenizer)


def asked(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


def test_episodes_are_opened_for_the_longest_prompt_and_put_together_as_a_rollout(run):
    player, engine = player_of(Quiet), Engine()
    prompts = Prompts([[1, 2], [4]], ["a", "b"], {"n": [10, 11]})
    made = player.play(engine, prompts, SamplingConfig(max_new_tokens=20, temperature=0.5), 6, [7, 8])
    sampling = SamplingConfig(max_new_tokens=20, temperature=0.5)
    assert engine.opened == [(2, 22, sampling, False)]
    assert run.seen == [(player.config, player.tokenizer, "turns", player._pool, sampling)]
    plays, seed = run.plays[0]
    assert seed == 6 and [play.number for play in plays] == [7, 8] and plays[0].asked == asked("a")
    assert made.prompts == Prompts([[1, 2], [4]], ["a", "b"], {"n": [10, 11]})
    assert made.response_ids.tolist() == [[7, 50, 3], [8, 50, 3]] and made.has_eos.tolist() == [True, False]
    assert made.action_mask.tolist() == [[True, False, True]] * 2 and made.completions == ["said 7", "said 8"]
    assert made.sampled_logprobs.tolist() == [[-1.0, 0.0, -2.0]] * 2 and made.temperature == 0.5 and made.kept is None
    assert made.sampled_logprobs.dtype == torch.float32
    assert made.episodes == [play.episode for play in plays]


def test_shorter_episodes_are_filled_up_and_greedy_ones_scored_as_they_are(run, monkeypatch):
    plain = run.run

    def shortened(self, plays, seed):
        plain(self, plays, seed)
        plays[1].tokens, plays[1].is_sampled, plays[1].logprobs = [9], [True], [-0.5]

    monkeypatch.setattr(run, "run", shortened)
    greedy = SamplingConfig(max_new_tokens=20, temperature=0.0)
    made = player_of(Quiet).play(Engine(), Prompts([[1]] * 2, ["a"] * 2), greedy, 0, [7, 8])
    assert made.response_ids.tolist() == [[7, 50, 3], [9, 77, 77]] and made.temperature == 1.0
    assert made.sampled_logprobs.tolist() == [[-1.0, 0.0, -2.0], [-0.5, 0.0, 0.0]]


@pytest.mark.parametrize(("keeps", "top_p", "sizes"), [(True, 0.9, [2, 1]), (False, 0.9, None), (True, 1.0, None)])
def test_words_are_kept_where_that_is_asked_for_and_sampling_is_truncated(run, keeps, top_p, sizes):
    engine = Engine()
    made = player_of(Quiet).play(engine, Prompts([[1]], ["a"]), SamplingConfig(top_p=top_p), 0, [7], keeps)
    assert engine.opened[0][3] is keeps and (made.kept and made.kept.sizes[0].tolist()) == sizes


def test_of_no_prompts_nothing_is_opened(run):
    engine = Engine()
    assert len(player_of(Quiet).play(engine, Prompts([], []), SAMPLING, 0, [])) == 0 and engine.opened == []


def test_what_the_model_has_no_room_for_is_the_user_s_before_any_update(run):
    with pytest.raises(UserError, match="too long") as found:
        player_of(Quiet).play(Engine(), Prompts([[1] * 990], ["a"]), SAMPLING, 0, [7])
    assert found.value.is_before_update


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


def test_each_row_plays_in_its_own_environment_which_is_not_told_its_name(run):
    player = player_of(Quiet, Game)
    rows = {"environment": ["Game", "Quiet"], "n": [1, 2]}
    for _ in range(2):
        player.play(Engine(), Prompts([[1], [2]], ["a", "b"], rows), SAMPLING, 0, [0, 1])
        game, quiet = (play.instance.object for play in run.plays[-1][0])
        assert type(game) is Game and type(quiet) is Quiet
        assert game.rows[-1] == {"n": 1} and quiet.rows[-1] == {"n": 2}
    assert (Quiet.made, Game.made) == (1, 1)  # the one that was made to look at plays, and plays again
    assert not run.plays[0][0][0].episode.has_tools


def test_an_environment_of_another_process_is_no_object_of_the_episode(run):
    player = player_of(Able, isolate=True)
    monkeyed = Prompts([[1]], ["a"], {"prompt": [asked("a")]})
    episodes_of = player._begin(monkeyed, [3])
    assert episodes_of[0].episode.environment is None and episodes_of[0].episode.has_tools
    assert episodes_of[0].asked == asked("a") and episodes_of[0].number == 3


def test_what_reset_says_ends_the_last_user_message_and_equal_prompts_are_written_once(run, written):
    player, engine = player_of(Quiet), Engine()
    before = [{"role": "system", "content": "be"}]
    rows = {"prompt": [asked("one"), before + asked("two"), asked("one"), asked("one"), "four"],
            "more": [" go", " on", " go", None, " by"]}
    made = player.play(engine, Prompts([[1], [2], [3], [4, 5, 6], [7]], list("abcde"), rows), SAMPLING, 0, range(5))
    assert written == [asked("one go"), before + asked("two on"), asked("four by")]
    assert made.prompts.ids == [[90, 6], [90, 9], [90, 6], [4, 5, 6], [90, 7]]
    assert made.prompts.texts == ["one go", "be+two on", "one go", "d", "four by"]
    assert made.prompts.columns["prompt"] == [asked("one go"), before + asked("two on"), asked("one go"), asked("one"),
                                              asked("four by")]
    assert made.prompts.columns["more"] == rows["more"] and rows["prompt"][4] == "four"
    assert engine.opened[0][1] == 23


def test_tools_are_shown_in_the_first_message_of_every_prompt(run, written):
    player = player_of(Able)
    rows = {"prompt": [asked("one"), "one", "two"]}
    made = player.play(Engine(), Prompts([[1], [2], [3]], list("abc"), rows), SAMPLING, 0, range(3))
    schemas = player.environments.kinds[0].schemas
    assert written == [[{**asked("one")[0], "tools": schemas}], [{**asked("two")[0], "tools": schemas}]]
    assert made.prompts.columns["prompt"] == [asked("one"), "one", "two"]  # as they were given: nothing was added
    assert made.prompts.ids == [[90, 3]] * 3 and [e.has_tools for e in made.episodes] == [True] * 3


@pytest.mark.parametrize("prompt", [[{"role": "assistant", "content": "x"}], []])
def test_text_of_reset_needs_a_user_s_message_at_the_end(run, prompt):
    rows = {"prompt": [prompt], "more": [" go"]}
    with pytest.raises(UserError) as found:
        player_of(Quiet).play(Engine(), Prompts([[1]], ["a"], rows), SAMPLING, 0, [0])
    assert str(found.value) == (
        "environment: reset answered text, and the prompt does not end with a user message to put it in; give prompts "
        "of messages, or reset that returns None")
    assert found.value.is_before_update


def test_without_a_chat_template_a_prompt_is_text_and_has_no_messages(run):
    player = player_of(Quiet)
    player.tokenizer.chat_template = None
    made = player.play(Engine(), Prompts([[1]], ["a"], {"prompt": ["a"]}), SAMPLING, 0, [0])
    assert run.plays[0][0][0].asked == [] and made.prompts.columns["prompt"] == ["a"]


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


def test_a_prompt_is_the_same_in_whatever_order_its_keys_stand_and_may_hold_what_is_no_json(run, written):
    one = {"content": "one", "role": "user", "on": date(2020, 1, 2)}
    two = {"role": "user", "on": date(2020, 1, 2), "content": "one"}
    prompts = Prompts([[1], [2]], ["a", "b"], {"prompt": [[one], [two]], "more": [" go"] * 2})
    made = player_of(Quiet).play(Engine(), prompts, SAMPLING, 0, [0, 1])
    assert len(written) == 1 and made.prompts.ids == [[90, 6]] * 2


def test_threads_of_who_plays_no_more_are_given_up(run):
    player = player_of(Quiet)
    player.play(Engine(), Prompts([[1]], ["a"]), SAMPLING, 0, [0])
    pool = player._pool
    del player
    gc.collect()
    assert pool._is_closed


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
