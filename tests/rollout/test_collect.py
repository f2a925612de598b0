"""From prompts to a scored rollout, by roles that only write down what they are asked: what is asked when, and what is
kept and reported of it."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import KeptSets
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.rewards import BadScore
from hybrid_rlhf.rollout import Prompts, Rollout, best_of_n
from hybrid_rlhf.rollout import collect as collect_module
from hybrid_rlhf.rollout.best_of_n import BestOfNSampler
from hybrid_rlhf.rollout.collect import collect, collect_held_out, samples_of, signal_of
from hybrid_rlhf.rollout.episode_record import Episode

T, NAN = torch.tensor, float("nan")
TWO = Prompts([[5], [6]], ["five", "six"])
PAIRS = SamplingConfig(num_samples=2)


class Engine:
    """What is told something once: can be remembered weakly."""

    device, kv_bytes, num_preempted = torch.device("cpu"), 77, 3


class Group:
    """An actor, a reference and a critic. Responses are 8 3 and 9 in turn; `told` has what was asked."""

    def __init__(self, fails: str = "", kept: KeptSets | None = None) -> None:
        self.told, self.fails, self.kept = [], fails, kept
        engine = Engine()
        self.actor = SimpleNamespace(engine=engine, resident=lambda: self.block("resident"),
                                     inference=lambda: self.block("inference"), generate=self.generate,
                                     logprobs=self.say("actor", -1.0))
        self.ref = SimpleNamespace(logprobs=self.say("ref", -1.5))
        self.critic = SimpleNamespace(values=self.say("critic", 4.0))

    @contextmanager
    def block(self, name: str):
        self.told.append(f"{name} begins")
        yield
        self.told.append(f"{name} ends")

    def say(self, name: str, number: float):
        def asked(rollout: Rollout) -> torch.Tensor:
            self.ask(name)
            assert not torch.is_grad_enabled()
            return torch.full(rollout.action_mask.shape, number)

        return asked

    def ask(self, name: str) -> None:
        self.told.append(name)
        if name == self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def generate(self, prompts: Prompts, sampling: SamplingConfig, seed: int, keeps: bool) -> Rollout:
        self.ask("generate")
        self.asked = (prompts.ids, sampling, seed, keeps)
        tokens = [[8, 3] if i % 2 == 0 else [9] for i in range(len(prompts))]
        texts = ["x" if len(t) == 2 else " " for t in tokens]
        made = Rollout.from_responses(prompts, tokens, [len(t) == 2 for t in tokens], 0, texts)
        made.sampled_logprobs = torch.full(made.action_mask.shape, -1.25)
        made.kept = self.kept
        return made

    def score(self, rollout: Rollout) -> torch.Tensor:
        self.ask("source")
        return T([0.0, 2.0, 5.0, 5.0])[: len(rollout)]

    name = "marks"


@pytest.fixture
def peaks(monkeypatch) -> list[tuple]:
    """The phases whose memory was measured, each with its device."""
    seen = []

    @contextmanager
    def peak_in(metrics, name, device):
        seen.append((name, device.type))
        yield

    monkeypatch.setattr(collect_module, "peak_in", peak_in)
    return seen


def test_who_is_asked_when_and_what_is_kept_of_it(peaks, monkeypatch):
    clock = count(10.0, 2.0)  # two seconds pass between any two looks
    monkeypatch.setattr(collect_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    group, metrics, said = Group(), Metrics(), []
    with activity.listening(said.append):
        made = collect(TWO, group, group, PAIRS, 42, metrics, keep_candidates=True)
    assert group.asked == ([[5], [5], [6], [6]], PAIRS, 42, True)
    assert group.told == ["resident begins", "inference begins", "generate", "inference ends", "actor", "resident ends",
                          "ref", "source", "critic"]
    assert said == ["sampling 4 responses", "scoring the responses"]
    assert peaks == [(name, "cpu") for name in ("actor/generate", "actor/score", "ref/score", "reward/score",
                                                "critic/score")]
    assert (made.logprobs == -1.0).all() and (made.ref_logprobs == -1.5).all() and (made.values == 4.0).all()
    assert made.scores.tolist() == made.source_scores["marks"].tolist() == [0.0, 2.0, 5.0, 5.0]
    found = metrics.compute()
    assert found.pop("time/generate") > 0 and found.pop("time/score") > 0
    assert found == pytest.approx({
        "engine/tokens_per_second": 6 / 2, "engine/kv_bytes": 77.0, "engine/preempted": 3.0,
        "engine/logprob_drift": 0.25,  # -1.25 to -1
        "prompts/num_responses": 2.0, "prompts/with_spread": 0.5, "prompts/best_score": (2 + 5) / 2})


@pytest.mark.parametrize(("fails", "told"), [
    ("generate", "out of memory while generating; "), ("actor", "out of memory while scoring; "),
    ("ref", "out of memory while scoring; "), ("source", "out of memory while scoring; "),
    ("critic", "out of memory while scoring; ")])
def test_running_out_of_memory_says_what_was_going_on(fails, told):
    group = Group(fails)
    with pytest.raises(UserError) as found:
        collect(TWO, group, group, PAIRS, 0, Metrics())
    assert str(found.value).startswith(told)


def test_a_source_that_fails_does_so_before_the_update_and_a_response_without_a_score_is_told_once(caplog):
    group = Group()
    skipping = SimpleNamespace(name="some", score=lambda rollout: [1.0, None, 2.0, 3.0])
    for _ in range(2):
        made = collect(TWO, group, skipping, PAIRS, 0, Metrics())
        assert made.scores.isnan().tolist() == [False, True, False, False]
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "every reward source skipped 1 of 4 responses (None)"]
    skipping.score = lambda rollout: [1.0, "two", 2.0, 3.0]
    with pytest.raises(BadScore, match="score 'two' for response 1") as found:
        collect(TWO, group, skipping, PAIRS, 0, Metrics())
    assert found.value.is_before_update


def test_the_words_kept_are_counted_in_bytes_and_where_they_are_many_it_is_said_once(monkeypatch, caplog):
    kept = KeptSets([torch.zeros(6, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)], [T([2, 4]), T([3])])
    group, metrics = Group(kept=kept), Metrics()
    collect(TWO, group, group, SamplingConfig(), 0, metrics)
    assert metrics.compute()["engine/kept_bytes"] == 9 * 4 + 3 * 8 and not caplog.text
    group.actor.engine = Engine()
    for most, times in ((60, 0), (59, 1), (59, 1)):  # more than that
        monkeypatch.setattr(collect_module, "_MUCH", most)
        collect(TWO, group, group, SamplingConfig(), 0, Metrics())
        assert caplog.text.count("about 3 for each token") == times


def test_held_out_prompts_are_drawn_by_seeds_of_their_own_and_need_no_values():
    group, seeds = Group(), []
    generate = group.actor.generate

    def noted(prompts, sampling, seed, keeps):
        seeds.append((seed, keeps))
        return generate(prompts, sampling, seed, keeps)

    group.actor.generate = noted
    found = collect_held_out([TWO, Prompts([[7]], ["seven"])], group, group, PAIRS, 5, keep_candidates=True).compute()
    assert seeds == [(5, True), (6, True)] and "critic" not in group.told
    assert found["reward"] == pytest.approx((0 + 2 + 5 + 5 + 0 + 2) / 6)
    assert found["kl"] == pytest.approx(0.5 * (2 + 1) / 2) and "prompts/best_score" not in found
    skipping = SimpleNamespace(name="some", score=lambda rollout: [1.0, None])
    assert collect_held_out([Prompts([[7]], [""])], group, skipping, PAIRS, 0).compute()["reward"] == 1.0
    assert seeds[-1] == (0, False)


def test_the_figures_of_a_rollout_go_by_its_groups():
    made = Group().generate(TWO.repeat(2), PAIRS, 0, False)
    made.scores = T([0.0, 1.0, NAN, 1.0])
    found = signal_of(made, 2)
    assert (found.num_prompts, found.group_size, found.mean, found.best) == (2, 2, pytest.approx(2 / 3), 1.0)
    assert (found.ended, found.empty, found.length, found.with_spread) == (0.5, 0.5, 1.5, 0.5)


def sampled() -> Rollout:
    made = Group().generate(Prompts([[5], [5], [6], [7]], ["five", "five", "six", "seven"]), PAIRS, 0, False)
    made.scores, made.completions = T([1.0, 2.0, NAN, 0.5]), ["a", "b", "c", "d"]
    return made


def test_people_are_shown_the_first_response_to_each_of_the_first_prompts():
    made = sampled()
    shown = [{"prompt": "five", "completion": "a", "score": 1.0, "ended": True},
             {"prompt": "six", "completion": "c", "score": None, "ended": True},
             {"prompt": "seven", "completion": "d", "score": 0.5, "ended": False}]
    assert samples_of(made, 4) == shown and samples_of(made, 2) == shown[:2] and samples_of(None, 4) == []


def test_a_question_about_two_images_is_two_prompts_and_people_see_their_names():
    made = sampled()
    made.prompts.ids = [[5]] * 4
    made.prompts.texts = ["[image] and [image]?"] * 2 + ["[image]?"] * 2
    one, two = ImageRef("/x/one.png", 1, 1), ImageRef("/y/two.png", 1, 1)
    made.prompts.images = [(one, two), (one, two), (one,), (two,)]
    assert [row["prompt"] for row in samples_of(made, 4)] == ["[one.png] and [two.png]?", "[one.png]?", "[two.png]?"]
    assert [row["images"] for row in samples_of(made, 4)] == [["/x/one.png", "/y/two.png"], ["/x/one.png"],
                                                              ["/y/two.png"]]


def test_of_several_sources_and_a_judge_people_are_shown_what_each_said():
    made = sampled()
    made.source_scores = {"a": made.scores}
    made.remarks = ["good", "", "", "bad"]
    assert [sorted(each) for each in samples_of(made, 3)] == [
        ["completion", "ended", "judge", "prompt", "score"], ["completion", "ended", "prompt", "score"],
        ["completion", "ended", "judge", "prompt", "score"]]
    assert samples_of(made, 3)[2]["judge"] == "bad"
    made.source_scores["b"] = T([3.0, 3.0, 4.0, NAN])
    assert [each["scores"] for each in samples_of(made, 3)] == [{"a": 1.0, "b": 3.0}, {"b": 4.0}, {"a": 0.5}]


def test_of_an_episode_people_are_shown_why_it_ended_and_what_draws_it_again():
    made = sampled()
    made.episodes = [Episode(messages=[{"role": "assistant", "content": str(i)}], turn_starts=[0], turn_ends=[1],
                             limits=[9], seed=4, number=i, ended=f"end {i}") for i in range(4)]
    first, _, last = samples_of(made, 3)
    assert (first["ended_by"], last["ended_by"], last["completion"]) == ("end 0", "end 3", "[assistant] 3")
    assert last["replay"] == {"seed": 4, "number": 3, "prompt_ids": [7],
                              "turns": [{"added": [], "limit": 9, "said": [9]}]}
    assert first["replay"]["turns"] == [{"added": [], "limit": 9, "said": [8]}]


# --- Rounds of sampling for best-of-n methods: the seed of each, what they rank by, and what a checkpoint has of them

SAMPLING, PROMPTS = SamplingConfig(num_samples=2), Prompts([[5]], ["five"])


def scored() -> Rollout:
    made = Rollout.from_responses(Prompts([[5], [5], [6]], ["five", "five", "six"]), [[3], [9], [9]],
                                  [True, False, False], 0, ["a", "b", "c"])
    made.scores = torch.tensor([1.0, 2.0, float("nan")])
    return made


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """What `collect` and `collect_held_out` were given."""
    seen = []
    monkeypatch.setattr(best_of_n, "collect", lambda *given, **named: seen.append((given, named)) or scored())
    monkeypatch.setattr(best_of_n, "collect_held_out", lambda *given, **named: seen.append((given, named)) or "found")
    return seen


def test_each_round_has_a_seed_of_its_own_and_a_response_without_an_end_ranks_lower(asked):
    sampler, metrics = BestOfNSampler("roles", "source", SAMPLING, 7, 0.5, keep_candidates=True), Metrics()
    for number in range(2):
        rollout, ranks = sampler.sample(PROMPTS, metrics)
        assert ranks[:2].tolist() == [1.0, 1.5] and ranks[2].isnan() and rollout is sampler.last_rollout
        given, named = asked[number]
        assert given == (PROMPTS, "roles", "source", SAMPLING, 7 * 1_000_003 + number, metrics, sampler.old_logprobs)
        assert named == {"keep_candidates": True}
    assert sampler.num_steps == 2 and sampler.samples(1) == sampler.samples()[:1]
    assert [each["completion"] for each in sampler.samples()] == ["a", "c"]


def test_held_out_prompts_are_always_drawn_alike(asked):
    sampler = BestOfNSampler("roles", "source", SAMPLING, 7, keep_candidates=True)
    sampler.sample(PROMPTS, Metrics())
    assert sampler.evaluate([PROMPTS]) == "found"
    assert asked[1] == (([PROMPTS], "roles", "source", SAMPLING, 7), {"keep_candidates": True})


def test_a_run_goes_on_with_its_rounds_and_its_source():
    loaded = []
    roles = SimpleNamespace(state=lambda: {"actor": "shard"}, load_state=lambda state: loaded.append(state["actor"]))
    source = SimpleNamespace(state=lambda: "calls", load_state=loaded.append)
    first = BestOfNSampler(roles, source, SAMPLING, 0)
    first.num_steps = 3
    state = first.state()
    assert state == {"actor": "shard", "num_steps": 3, "source": "calls"}
    second = BestOfNSampler(roles, source, SAMPLING, 0)
    second.load_state(state)
    assert (second.num_steps, loaded) == (3, ["shard", "calls"])
    plain = BestOfNSampler(roles, SimpleNamespace(), SAMPLING, 0)
    assert "source" not in plain.state()
    plain.load_state(plain.state() | {"num_steps": 5.0})
    assert plain.num_steps == 5 and isinstance(plain.num_steps, int)
