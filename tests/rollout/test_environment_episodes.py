"""Episodes in environments: steps, rewards of turns and of the whole, rows that choose, and what ends a run."""

from __future__ import annotations

import os
import time

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.environments.contract import Environments, environment_of
from hybrid_rlhf.environments.isolated import open_isolated
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.rollout.episode_record import measure
from hybrid_rlhf.rollout.episodes import EpisodePlayer
from tests.factories.crashing_environment import FILE
from tests.factories.episodes import CALL, END, answered, play, prompt_text, script, times, tools
from tests.factories.scripted import conversation, scripted_causal_lm


class Guess:
    """A game of three turns."""

    def reset(self, secret: int) -> str:
        self.secret, self.num = secret, 0
        return " Go!"

    def step(self, messages):
        self.num += 1
        guess = int(messages[-1]["content"])
        if guess == self.secret:
            return [], True, 1.0
        return "higher" if guess < self.secret else "lower", False, -0.25

    def get_reward(self) -> float:
        return 0.1 * self.num


def test_an_environment_that_steps_rewards_its_turns_and_the_whole(tokenizer):
    own = Environments([environment_of("Guess", Guess, {}, "here")], False)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "Guess! Go!"}], tokenize=False,
                                          add_generation_prompt=True)
    told = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    parts = conversation(tokenizer, asked, "3" + END, told.format("higher"), "9" + END, told.format("lower"), "7" + END)
    rollout, _ = play(tokenizer, own, [parts], asked="Guess!", columns={"secret": [7]})
    [episode] = rollout.episodes
    assert rollout.prompts.ids == [parts[0]] and rollout.prompts.columns["prompt"][0][-1]["content"] == "Guess! Go!"
    assert rollout.response_ids.tolist() == [[token for part in parts[1:] for token in part]]
    assert episode.turn_rewards == [-0.25, -0.25, 1.0] and episode.reward == pytest.approx(0.3)
    assert rollout.episode_rewards == [pytest.approx(0.8)] and rollout.has_eos.item()
    placed = rollout.turn_rewards()[0]
    ends = [len(parts[1]), sum(map(len, parts[1:4])), sum(map(len, parts[1:6]))]
    assert placed.nonzero()[:, 0].tolist() == [end - 1 for end in ends]


@pytest.mark.parametrize(("method", "told"), [
    ("reset", "reset raised OSError: gone"), ("step", "step raised OSError: gone"),
    ("get_reward", "get_reward raised OSError: gone")])
def test_an_environment_that_fails_ends_the_run_in_one_line(tokenizer, method, told):
    def gone(self, **_row):
        raise OSError("gone")

    def lost(self, messages):
        raise OSError("gone")

    game = type("Game", (Guess,), {method: lost if method == "step" else gone})
    game.__module__ = __name__
    own = Environments([environment_of("Game", game, {}, "here")], False)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "Guess! Go!"}], tokenize=False,
                                          add_generation_prompt=True)
    parts = conversation(tokenizer, asked, "7" + END)
    with pytest.raises(UserError, match=told) as found:
        play(tokenizer, own, [parts], asked="Guess!", columns={"secret": [7]})
    assert found.value.is_before_update and "\n" not in str(found.value)


class Shop:
    """Another environment, of a tool."""

    def reset(self, **row) -> None:
        self.sold = 0

    def sell(self, what: str) -> str:
        """Sells something.

        Args:
            what: What is sold.
        """
        self.sold += 1
        return f"sold {what}"

    async def get_reward(self) -> float:
        return 10.0 * self.sold


def test_each_row_plays_in_the_environment_that_it_names(tokenizer):
    """The game's prompt shows no tool, the shop's its own; each has its own reward."""
    own = Environments([environment_of("game", Guess, {}, "here"), environment_of("shop", Shop, {}, "here")], True)
    sell = '<tool_call>\n{"name": "sell", "arguments": {"what": "a hat"}}\n</tool_call>'
    asked = ["Guess!", "Sell!"]
    first = tokenizer.apply_chat_template([{"role": "user", "content": "Guess! Go!"}], tokenize=False,
                                          add_generation_prompt=True)
    second = tokenizer.apply_chat_template([{"role": "user", "content": "Sell!"}], tools=own.kinds[1].schemas,
                                           tokenize=False, add_generation_prompt=True)
    talks = [conversation(tokenizer, first, "7" + END),
             conversation(tokenizer, second, sell + END, answered("sold a hat"), "Done." + END)]
    model = scripted_causal_lm(talks, vocab_size=len(tokenizer))
    engine = HybridEngine(model, model, eos_ids=[tokenizer.eos_token_id], pad_id=tokenizer.pad_token_id)
    player = EpisodePlayer(own, EnvironmentConfig(factory={"game": "a.py:a", "shop": "a.py:b"}), tokenizer)
    prompts = Prompts([[1], [1]], asked, {"prompt": asked, "environment": ["game", "shop"], "secret": [7, None]})
    with engine.inference():
        rollout = player.play(engine, prompts, SamplingConfig(max_new_tokens=300), 0, [0, 1])
    assert rollout.prompts.ids == [talks[0][0], talks[1][0]] and rollout.completions == ["7", "Done."]
    assert [type(e.environment) for e in rollout.episodes] == [Guess, Shop]
    assert rollout.episode_rewards == [pytest.approx(1.1), 10.0]
    chess = Prompts([[1]], ["x"], {"prompt": ["x"], "environment": ["chess"]})
    with pytest.raises(UserError, match="the column environment of a row is 'chess'"), engine.inference():
        player.play(engine, chess, SamplingConfig(), 0, [0])


class Hanging:
    """Its tool takes longer than it may; what it says of the episode is asked for meanwhile."""

    def reset(self, **row):
        self.calls = 0

    def times(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.calls += 1
        time.sleep(1.0)
        return a * b

    def get_reward(self) -> float:
        return 0.5 * self.calls


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_that_hangs_does_not_keep_the_environment_from_rewarding_the_episode(tokenizer, is_async):
    async def awaited(self) -> float:
        return 0.5 * self.calls

    kind = type("Waiting", (Hanging,), {"get_reward": awaited}) if is_async else Hanging
    own = Environments([environment_of("Hanging", kind, {}, "here")], False)
    parts = script(tokenizer, own, CALL + END, answered("error: no answer within 0.2 s (environment.timeout)"),
                   "No idea." + END)
    rollout, _ = play(tokenizer, own, [parts], timeout=0.2, sampling=SamplingConfig(max_new_tokens=300))
    [episode] = rollout.episodes
    assert (episode.num_late, episode.num_failed, episode.reward, episode.ended) == (1, 0, 0.5, "done")


def test_a_prompt_that_reset_makes_too_long_for_the_model_is_refused(tokenizer):
    """The scripted model has 4096 positions; rotary ones go on without end, and nobody would notice."""
    class Long(Guess):
        def reset(self, secret: int) -> str:
            return " word" * 4000

    own = Environments([environment_of("Long", Long, {}, "here")], False)
    parts = conversation(tokenizer, "a", "7" + END)
    with pytest.raises(UserError, match="exceeds the model's 4096 positions; lower max_new_tokens") as found:
        play(tokenizer, own, [parts], asked="Guess!", columns={"secret": [7]})
    assert found.value.is_before_update


def test_a_game_without_tools_has_no_share_of_calls(tokenizer):
    """Of two episodes the one that could call has called: 1, not 1/2. A game alone has no such metric, and no alarm."""
    game, able = Environments([environment_of("Guess", Guess, {}, "here")], False), tools(times)
    asked = prompt_text(tokenizer, game, "Guess! Go!")
    guess = conversation(tokenizer, asked, "7" + END)
    called = script(tokenizer, able, CALL + END, answered("36"), "It is 36." + END)
    alone, _ = play(tokenizer, game, [guess], asked="Guess!", columns={"secret": [7]})
    other, _ = play(tokenizer, able, [called])
    found = measure(alone.episodes).compute()
    assert found["episodes/turns"] == 1 and not [name for name in found if name.startswith("tools/")]
    assert measure(alone.episodes + other.episodes).compute()["tools/call_frequency"] == 1


# --- Episodes whose tools and environments live in other processes: what they count, and what ends the run

ASKED = "Do it."


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(FILE)
    return str(file)


def say(name: str, how: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"how": "{how}"}}}}\n</tool_call>{END}'


def player_of(tokenizer, **given) -> EpisodePlayer:
    config = EnvironmentConfig(isolate=True, timeout=1.0, max_turns=2, num_workers=2, **given)
    return EpisodePlayer(open_isolated(config), config, tokenizer)


def play_apart(player: EpisodePlayer, text: str, added: str = ""):
    """One episode of a model that says `text` first. added: what reset answers, at the end of the prompt."""
    tokenizer = player.tokenizer
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": ASKED + added}], tokenize=False,
                                           tools=player.environments.kinds[0].schemas, add_generation_prompt=True)
    model = scripted_causal_lm([conversation(tokenizer, prompt, text)], vocab_size=len(tokenizer))
    engine = HybridEngine(model, model, eos_ids=[tokenizer.eos_token_id], pad_id=tokenizer.pad_token_id)
    with engine.inference():
        rollout = player.play(engine, Prompts([[1]], [ASKED], {"prompt": [ASKED]}), SamplingConfig(max_new_tokens=300),
                              0, [0])
    return rollout.episodes[0]


@pytest.mark.slow
def test_a_tool_that_crashes_or_hangs_is_counted_as_one_that_fails_or_is_late(tokenizer, path):
    player = player_of(tokenizer, tools=[f"{path}:end"])
    for how, said, counts in (
            ("segfault", "error: end ended its process (SIGSEGV)", (1, 0)),
            ("regex", "error: no answer within 1 s (environment.timeout); its process was ended", (0, 1))):
        episode = play_apart(player, say("end", how))
        assert episode.messages[1]["content"] == said and (episode.num_failed, episode.num_late) == counts
    said, pid = play_apart(player, say("end", "well")).messages[1]["content"].split()
    assert said == "well" and int(pid) != os.getpid()


@pytest.mark.slow
def test_an_environment_that_is_gone_cannot_be_asked_for_its_reward_and_the_next_episode_has_a_new_one(tokenizer, path):
    player = player_of(tokenizer, factory=f"{path}:Count")
    with pytest.raises(UserError, match=r"environment Count: get_reward was not called: the environment is gone: an "
                                        r"earlier call ended its process \(exit code 7\); fix the environment"):
        play_apart(player, say("crash", "exit"), "['prompt'] 1")
    episode = play_apart(player, say("crash", "well"), "['prompt'] 1")  # constructed again
    assert episode.reward == 0.0 and episode.num_calls == 1 and not episode.num_failed
    assert episode.environment is None  # a reward function must not take what stands for it for the user's object
