"""Stages whose reward is a judge, through the launcher: behind an address and loaded here, its figures and its plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, save_adapter
from hybrid_rlhf.rewards.judge import JudgeConfig
from hybrid_rlhf.roles.sharing import RoleConfig, RolesConfig
from hybrid_rlhf.trainers.ppo_config import PPOConfig
from hybrid_rlhf.training import defaults, step3_ppo
from hybrid_rlhf.training.memory_options import Place, plans_of
from hybrid_rlhf.training.reward_sources import RewardConfig
from tests.factories.adapters import base_with
from tests.factories.judges import judge_server, said
from tests.factories.processes import ended, launch
from tests.factories.stage_options import COMMON, WORDS, used
from tests.factories.tiny import own_cache, save_tiny

FEW = ["--roles.actor.learning_rate", "1e-3", "--train.max_steps", "2", "--train.per_device_train_batch_size", "2",
       "--data.eval_fraction", "0"]
RUBRIC = "items:\n  - {name: ok, question: 'Is it fine?', kind: 0-10}\n"
KEY = "sk-secret-0123456789"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    (folder / "ppo.jsonl").write_text("".join(json.dumps({"prompt": f"say {w} {i}"}) + "\n"
                                              for i in range(2) for w in WORDS))
    (folder / "rubric.yaml").write_text(RUBRIC)
    save_tiny(folder / "base")
    save_tiny(folder / "judge", seed=3, initializer_range=0.3, max_position_embeddings=1024)
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def words(place: Path, stage: str, out: str, *more: str) -> list[str]:
    section = {"online_dpo": "online", "rejection": "rejection"}.get(stage, "ppo")
    groups = ["--ppo.sampling.num_samples", "3"] if stage == "grpo" else []
    return ["--stage", stage, "--output_dir", f"{place}/runs/{out}", *used(stage, COMMON), *FEW,
            f"--{section}.sampling.max_new_tokens", "6", *groups, "--model.model_name_or_path", f"{place}/base",
            f"--data.sources=[{{path: {place}/ppo.jsonl}}]", "--reward.judge.rubric", f"{place}/rubric.yaml", *more]


def figures(place: Path, out: str) -> list[dict]:
    lines = (place / "runs" / out / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward" in row]


def by_length(body: dict) -> dict:
    """A judge that likes long responses."""
    text = body["messages"][1]["content"]
    response = re.search(r"<(text-\w+) response>\n(.*?)\n</\1 response>", text, re.DOTALL)[2]
    return said(f'It has {len(response)} letters. {{"ok": {min(10, len(response))}}}')


@pytest.mark.slow
def test_a_judge_behind_an_address_is_the_reward_and_its_words_are_beside_the_samples(place, monkeypatch, capfd):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_server() as server:
        server.answers = [(200, by_length)]
        assert main(words(place, "grpo", "address", "--reward.judge.url", server.url, "--reward.judge.api_key_env",
                          "JUDGE_KEY", "--reward.judge.cost_per_1m_input", "1", "--reward.judge.cache",
                          f"{place}/judged", "--train.num_fixed_prompts", "0")) == 0
        rows = figures(place, "address")
        assert len(rows) == 2 and all(0 < row["reward"] <= 1 for row in rows)
        for row in rows:
            assert row["reward"] == pytest.approx(row["rewards/judge/mean"]) == row["rewards/judge/ok/mean"]
            assert row["judge/failed"] == 0
        assert rows[-1]["judge/calls"] == len(server.asked) and rows[-1]["judge/cost"] == pytest.approx(
            len(server.asked) * 1000 / 1e6)  # a thousand tokens each
        samples = [json.loads(line) for line in (place / "runs/address/samples.jsonl").read_text().splitlines()]
        assert any(re.match(r"It has \d+ letters", row.get("judge", "")) for row in samples)
        assert "letters" in (place / "runs/address/report.html").read_text()
        before = len(server.asked)
        assert main(words(place, "grpo", "again", "--reward.judge.url", server.url, "--reward.judge.api_key_env",
                          "JUDGE_KEY", "--reward.judge.cost_per_1m_input", "1", "--reward.judge.cache",
                          f"{place}/judged", "--train.num_fixed_prompts", "0")) == 0
        assert len(server.asked) == before and figures(place, "again")[-1]["judge/cached"] == 1
        assert [r["reward"] for r in figures(place, "again")] == [r["reward"] for r in rows]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    files = [p for folder in (place / "runs", place / "judged") for p in folder.rglob("*") if p.is_file()]
    out = capfd.readouterr()
    assert files and not any(KEY.encode() in p.read_bytes() for p in files) and KEY not in out.out + out.err


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "more"), [
    ("grpo", ["--reward.judge.score", "probability"]),
    ("online_dpo", ["--reward.judge.mode", "pairwise", "--reward.judge.score", "probability"]),
])
def test_a_judge_that_is_loaded_here_judges_any_stage_that_samples(place, stage, more):
    out = f"{stage}-local"
    assert main(words(place, stage, out, "--reward.judge.model", f"{place}/judge", "--reward.judge.dtype", "float32",
                      *more)) == 0
    row = figures(place, out)[-1]
    assert 0 < row["rewards/judge/mean"] < 1 and row["judge/word_mass"] > 0
    assert ("judge/order_changed" in row) == (stage == "online_dpo")


def on_base(place: Path, out: str, *more: str) -> list[dict]:
    """The figures of a run with adapters on the model of the folder judge."""
    assert main(words(place, "grpo", out, "--model.model_name_or_path", f"{place}/judge", "--model.lora.r", "4",
                      "--reward.judge.score", "probability", *more)) == 0
    return figures(place, out)


def test_a_judge_on_the_policy_s_base_gives_the_scores_of_one_that_is_loaded(place):
    """The actor's adapter changes at every step, and the judge beside it does not."""
    run = ["--roles.actor.learning_rate", "1e-1", "--train.max_steps", "3"]
    shared = on_base(place, "on-base", *run, "--reward.judge.model", "base")
    loaded = on_base(place, "loaded", *run, "--reward.judge.model", f"{place}/judge")
    for name in ("reward", "rewards/judge/ok/std", "judge/word_mass", "kl", "entropy"):
        assert [row[name] for row in shared] == pytest.approx([row[name] for row in loaded], rel=1e-5), name
    assert shared[-1]["kl"] > 1e-4  # the policy has left its base


def test_a_judge_that_is_an_adapter_on_the_policy_s_base_gives_its_merged_model_s_scores(place):
    """The adapter is one of a finished run, which has exported the merged model too."""
    on_base(place, "taught", "--roles.actor.learning_rate", "1e-1", "--reward.judge.model", "base")
    on_adapter = on_base(place, "on-adapter", "--reward.judge.model", f"{place}/runs/taught/adapter")
    merged = on_base(place, "merged", "--reward.judge.model", f"{place}/runs/taught")
    for name in ("reward", "judge/word_mass"):
        assert [row[name] for row in on_adapter] == pytest.approx([row[name] for row in merged], rel=1e-5), name
    of_base = on_base(place, "of-base", "--reward.judge.model", "base")
    assert of_base[0]["judge/word_mass"] != pytest.approx(merged[0]["judge/word_mass"], rel=1e-3)


@pytest.mark.parametrize(("more", "message"), [
    ([], "which must stay as they are; give model.lora.r"),
    (["--model.lora.r=4", "--roles.actor.zero_stage=3"], "ZeRO 3 cuts them into parts"),
    (["--model.lora.r=4", "--roles.actor.offload=true"], "roles.actor.offload moves away"),
    (["--model.lora.r=4", "--reward.judge.dtype=float32"], "whose dtype it has; leave it out"),
])
def test_a_judge_on_weights_that_change_or_move_is_refused(place, capfd, more, message):
    assert main(words(place, "grpo", "refused", "--reward.judge.model", "base", *more)) == 2
    assert message in capfd.readouterr().err.strip().splitlines()[-1]


def test_an_adapter_of_another_base_is_refused_as_a_judge(place, capfd):
    path, model = place / "runs" / "elsewhere", base_with("default")
    model.config.name_or_path = f"{place}/judge"
    save_adapter(model, path)
    argv = words(place, "grpo", "refused", "--model.lora.r=4", "--reward.judge.model", str(path))
    assert main(argv) == 2
    assert "was made for" in capfd.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("more", ["--reward.judge.dtype=bfloat16", "--reward.judge.load_in_4bit=true"])
def test_an_adapter_as_a_judge_has_no_dtype_of_its_own(place, capfd, more):
    path, model = place / "runs" / "with-dtype", base_with("default")
    model.config.name_or_path = f"{place}/base"
    save_adapter(model, path)
    assert main(words(place, "grpo", "refused", "--model.lora.r=4", "--reward.judge.model", str(path), more)) == 2
    assert "whose dtype and bits it has" in capfd.readouterr().err.strip().splitlines()[-1]


def test_a_judge_that_no_policy_is_under_is_refused(place, capfd):
    assert main(["--stage", "evaluate", "--output_dir", f"{place}/runs/e",
                 f"--evaluate.models=[{place}/base, {place}/judge]",
                 f"--data.sources=[{{path: {place}/ppo.jsonl}}]", "--reward.judge.model", "base"]) == 2
    assert "there is none here; give a folder (./base" in capfd.readouterr().err


def test_a_judge_that_answers_nonsense_ends_the_run_in_one_line_before_anything_is_learnt(place, capfd):
    """A tiny random model writes no verdict, whatever it is asked."""
    assert main(words(place, "grpo", "nonsense", "--reward.judge.model", f"{place}/judge",
                      "--reward.judge.max_new_tokens", "4")) == 2
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("error: "))
    assert "reward source judge at" in line and "6 of 6 responses have no verdict" in line
    assert "a judge or a rubric that it answers" in line
    assert not (place / "runs/nonsense/metrics.jsonl").exists() or not figures(place, "nonsense")


@pytest.mark.parametrize(("stage", "more", "message"), [
    ("ppo", ["--reward.judge.mode=pairwise"], r"mode is pairwise, .* ppo.sampling.num_samples is 1; give several"),
    ("grpo", ["--reward.judge.mode=ranking", "--ppo.sampling.num_samples=30"], "at most 26 responses together"),
    ("grpo", ["--reward.judge.batch_size=3"], "reward.judge.batch_size is set; it is for a model that is loaded here"),
    ("grpo", ["--reward.judge.score=probability", "--reward.judge.max_new_tokens=3"], "nothing is written"),
    ("grpo", ["--reward.judge.rubric={items: [{name: a, question: b, weight: 0}]}"], "sum to nothing"),
    ("grpo", ["--reward.judge.modle=x"], "did you mean reward.judge.mode"),
    ("grpo", ["--reward.judge.api_key_env=NOBODY_SET_THIS"], "is not set"),
    ("grpo", ["--reward.weights=[1, 2]"], r"2 numbers for 1 sources .judge."),
])
def test_what_does_not_go_together_is_refused_before_a_model_is_read(place, capfd, stage, more, message):
    argv = words(place, stage, "refused", "--reward.judge.url", "http://127.0.0.1:9/v1", *more)
    assert main(argv) == 2
    assert re.search(message, capfd.readouterr().err.strip().splitlines()[-1])


def test_options_of_a_judge_need_one(place, capfd):
    assert main(words(place, "grpo", "none")) == 2
    assert "reward.judge.rubric is set; there is no judge; give reward.judge.model" in capfd.readouterr().err


def test_a_judge_is_a_learned_source(place):
    def of(**judge: object) -> tuple[float, float]:
        config = defaults.resolve(step3_ppo.Config(
            output_dir=f"{place}/runs/x", model=ModelConfig(f"{place}/base"),
            roles=RolesConfig(critic=RoleConfig(model_name_or_path=f"{place}/base")),
            reward=RewardConfig(functions=["builtin:demo_correct"], judge=JudgeConfig(**judge))))
        return config.ppo.kl_coef, config.ppo.missing_eos_penalty

    assert of(url="http://localhost:1") == of(model=f"{place}/judge") == (0.1, 1.0)
    assert of() == (0.04, 0.0)


@pytest.mark.parametrize("mode", ["absolute", "pairwise", "ranking"])
def test_the_plan_counts_a_judge_that_is_loaded_here_in_the_phase_that_scores(place, capfd, mode):
    argv = words(place, "grpo", "planned", "--reward.judge.model", f"{place}/judge", "--reward.judge.dtype", "float32",
                 "--reward.judge.mode", mode, "--reward.judge.batch_size", "2", "--plan")
    assert main(argv) == 0
    table = capfd.readouterr().out
    rows = [line for line in table.splitlines() if "judge" in line]
    assert any("weights" in line for line in rows) and any("KV cache" in line for line in rows)


def test_the_plan_of_a_judge_on_the_policy_s_base_counts_its_weights_once(place, capfd):
    argv = words(place, "grpo", "planned", "--model.lora.r", "4", "--reward.judge.model", "base", "--plan")
    assert main(argv) == 0
    rows = [line for line in capfd.readouterr().out.splitlines() if "judge" in line]
    assert any("KV cache" in line for line in rows) and not any("weights" in line for line in rows)


def test_a_judge_on_the_policy_s_base_plans_within_a_seventh_of_a_run_without_one(tmp_path):
    """Of a model whose weights count; one that is loaded beside the policy takes its own weights on top."""
    save_tiny(tmp_path / "base", hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
              max_position_embeddings=2048)

    def peak(**judge: object) -> int:
        config = step3_ppo.Config(
            stage="grpo", output_dir=str(tmp_path / "x"),
            model=ModelConfig(str(tmp_path / "base"), dtype="float32", lora=LoraConfig(r=4)),
            reward=RewardConfig(functions=["builtin:demo_correct"], judge=JudgeConfig(**judge)),
            ppo=PPOConfig(estimator="grpo", sampling=SamplingConfig(max_new_tokens=64, num_samples=8)))
        return plans_of(config, Place(torch.device("cpu"), 1, None))[0].peak

    without, on_base = peak(), peak(model="base", score="probability")
    assert without <= on_base <= 1.15 * without
    loaded = peak(model=f"{tmp_path}/base", score="probability", dtype="float32")
    assert loaded - on_base == pytest.approx((tmp_path / "base/model.safetensors").stat().st_size, rel=0.02)


def test_a_server_s_key_given_in_place_of_its_name_is_not_shown(place, capfd):
    assert main(words(place, "grpo", "key", "--reward.judge.url", "http://127.0.0.1:9/v1",
                      f"--reward.judge.api_key_env={KEY}")) == 2
    assert KEY not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(500)
def test_two_processes_each_judge_their_own_responses_and_get_what_one_gets(place):
    """The same four prompts a step, two on each; both write to one cache."""
    more = ["--reward.judge.model", f"{place}/judge", "--reward.judge.dtype", "float32", "--reward.judge.score",
            "probability", "--train.optim", "sgd"]
    assert main([*words(place, "grpo", "one", *more), "--train.per_device_train_batch_size", "4"]) == 0
    cached = [*more, "--reward.judge.cache", f"{place}/of_two"]
    done = ended(launch("train.py", *words(place, "grpo", "two", *cached), "--data.cache_dir", f"{place}/cache"))
    assert done.returncode == 0, done.stderr
    for one, two in zip(figures(place, "one"), figures(place, "two"), strict=True):
        for name in ("reward", "rewards/judge/mean", "rewards/judge/ok/std", "judge/word_mass", "judge/failed"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
    lines = (place / "of_two" / "judge.jsonl").read_text().splitlines()
    assert len(lines) == len({json.loads(line)["key"] for line in lines}) > 6
