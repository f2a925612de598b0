"""One base, four roles, through the launcher: the layouts are told apart by memory alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.models.quantize import quantized_layers
from hybrid_rlhf.training import on_policy
from tests.factories.stage_options import used, write_rows
from tests.factories.tiny import save_tiny

COMMON = ["--model.dtype", "float32", "--data.split", "null", "--data.eval_fraction", "0.25", "--data.max_length", "48",
          "--data.max_prompt_length", "32", "--train.max_steps", "3", "--train.per_device_train_batch_size", "8",
          "--train.learning_rate", "1e-2", "--train.logging_steps", "1"]
PPO = ["--ppo.sampling.max_new_tokens", "6", "--ppo.num_ppo_epochs", "2", "--roles.actor.learning_rate", "1e-2",
       "--roles.critic.learning_rate", "1e-2"]
LORA = ["--model.lora.r", "4"]


class Place(SimpleNamespace):
    def launch(self, stage: str, out: str, *more: str, code: int = 0) -> Path:
        argv = ["--stage", stage, "--output_dir", f"{self.folder}/{out}", f"--data.cache_dir={self.folder}/cache"]
        argv += [*used(stage, COMMON), *(PPO if stage == "ppo" else []),
                f"--data.sources=[{{path: {self.folder}/{stage}.jsonl}}]"]
        argv += ["--model.model_name_or_path", self.base] if stage == "sft" else []
        assert main([*argv, *more]) == code
        return self.folder / out

    def ppo(self, out: str, *more: str, reward: str = "lora/reward", code: int = 0):
        """Metrics without the clock's, and the roles as they were built and trained; a run is made once."""
        if out in self.runs:
            return self.runs[out]
        folder = self.launch("ppo", out, *LORA, "--model.model_name_or_path", f"{self.folder}/lora/sft",
                             "--roles.reward.model_name_or_path", f"{self.folder}/{reward}", *more, code=code)
        if code:
            return [], SimpleNamespace()
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "engine/", "memory/"))}
                for line in lines]
        self.runs[out] = rows, self.built[-1]
        return self.runs[out]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roles")
    write_rows(folder)
    made = Place(folder=folder, base=save_tiny(folder / "base"), built=[], runs={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_policy, "build", _keeping(on_policy.build, made.built))
        made.launch("sft", "lora/sft", *LORA)
        made.launch("reward", "lora/reward", *LORA, "--model.model_name_or_path", f"{folder}/lora/sft")
        yield made


def _keeping(build, built: list):
    def wrapped(*given, **named):
        roles, reward = build(*given, **named)
        engines = {name: role.engine for name, role in {**vars(roles), "reward": reward}.items() if role}
        before = {role: {n: p.detach().clone() for n, p in e.module.named_parameters()} for role, e in engines.items()}
        built.append(SimpleNamespace(engines=engines, before=before, layout=given[2], roles=roles, reward=reward))
        return roles, reward

    return wrapped


def _backbones(built) -> dict[str, int]:
    return {role: id(engine.module.model.base_model) for role, engine in built.engines.items()}


def _moved(built) -> dict[str, set[str]]:
    return {role: {n for n, p in engine.module.named_parameters() if not torch.equal(p, built.before[role][n])}
            for role, engine in built.engines.items()}


def _close(one: list[dict], two: list[dict]) -> None:
    assert len(one) == len(two) == 4
    for left, right in zip(one, two, strict=True):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-5)


def test_one_shared_base_gives_the_run_that_four_separate_models_give(place) -> None:
    shared, one = place.ppo("shared")
    separate, four = place.ppo("separate", "--roles.share_base", "false")
    assert one.layout.bases == (("actor", "ref", "critic", "reward"),) and len(set(_backbones(one).values())) == 1
    assert len(four.layout.bases) == 4 and len(set(_backbones(four).values())) == 4
    _close(shared, separate)
    from safetensors.torch import load_file

    exported = [load_file(place.folder / out / "model" / "model.safetensors") for out in ("shared", "separate")]
    start = load_file(place.folder / "lora" / "sft" / "model" / "model.safetensors")
    for name, weight in exported[0].items():
        torch.testing.assert_close(weight, exported[1][name], rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(weight, start[name]) for name, weight in exported[0].items())


def test_a_run_moves_the_actor_s_and_the_critic_s_adapters_and_the_critic_s_head_and_no_other_byte(place) -> None:
    _, built = place.ppo("shared")
    moved = _moved(built)
    for names in moved.values():
        assert all(".actor." in n or ".critic." in n or n == "model.score.weight" for n in names)
    assert any(".actor." in n for n in moved["actor"]) and any(".critic." in n for n in moved["critic"])
    assert "model.score.weight" in moved["critic"] and "model.score.weight" not in moved["reward"]
    actor = built.engines["actor"].module.model
    assert {p.grad is None or p.requires_grad for p in actor.parameters()} == {True}


def test_the_critic_starts_as_a_copy_of_the_reward_s_adapter_and_head(place) -> None:
    _, built = place.ppo("shared")
    reward, critic = built.before["reward"], built.before["critic"]
    copied = [n for n in reward if ".reward." in n]
    assert copied and all(torch.equal(reward[n], critic[n.replace(".reward.", ".critic.")]) for n in copied)
    assert all(reward[n].abs().sum() > 0 for n in copied)  # a trained one: lora_B is not zero any more
    assert torch.equal(reward["model.score.weight"], critic["model.score.weight"])


@pytest.mark.slow
def test_pairs_share_where_that_is_asked_for_and_the_run_is_the_same(place) -> None:
    rows, built = place.ppo("pairs", "--roles.share_base", "pairs")
    assert len(set(_backbones(built).values())) == 2
    _close(rows, place.ppo("shared")[0])


@pytest.mark.slow
def test_a_critic_that_is_a_head_reads_the_reward_model_and_trains_nothing_else(place) -> None:
    _, built = place.ppo("head", "--roles.critic.kind", "head")
    assert len(set(_backbones(built).values())) == 1
    assert list(built.engines["critic"].training.parameters) == ["score.weight"]
    assert not any(".critic." in n for n in _moved(built)["critic"])
    _, full = place.ppo("head_full", "--model.lora.r", "0", "--roles.critic.kind", "head")
    assert full.layout.bases == (("actor",), ("ref",), ("critic", "reward"))
    assert _moved(full)["critic"] == {"model.score.weight"} and len(_moved(full)["actor"]) > 14


@pytest.mark.slow
def test_a_critic_that_is_a_model_has_a_base_of_its_own(place) -> None:
    rows, built = place.ppo("model", "--roles.critic.kind", "model")
    assert built.layout.bases == (("actor", "ref", "reward"), ("critic",))
    _close(rows, place.ppo("shared")[0])


@pytest.mark.slow
def test_where_the_reward_model_was_trained_in_full_auto_shares_pairs_and_says_so(place, capfd) -> None:
    place.launch("reward", "full/reward", "--model.model_name_or_path", f"{place.folder}/lora/sft")
    _, built = place.ppo("fallback", reward="full/reward")
    assert built.layout.bases == (("actor", "ref"), ("critic", "reward"))
    said = [line for line in capfd.readouterr().err.splitlines() if "share_base" in line]
    assert len(said) == 1 and "trained all weights" in said[0] and "critic with reward" in said[0]
    place.ppo("refused", "--roles.share_base", "true", reward="full/reward", code=2)
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "roles that cannot share a base" in said[0] and "full/reward" in said[0]


@pytest.mark.slow
def test_a_reward_adapter_of_another_base_is_not_put_on_this_one(place, capfd) -> None:
    place.launch("sft", "other/sft", *LORA, "--seed", "5")
    place.launch("reward", "other/reward", *LORA, "--model.model_name_or_path", f"{place.folder}/other/sft")
    place.ppo("elsewhere", "--roles.share_base", "true", reward="other/reward", code=2)
    assert "made on another base" in capfd.readouterr().err


@pytest.mark.slow
def test_four_roles_run_with_four_different_settings(place) -> None:
    rows, built = place.ppo(
        "four", "--roles.share_base", "false", "--roles.actor.zero_stage", "2", "--roles.critic.zero_stage", "1",
        "--roles.critic.quantize", "4bit", "--roles.critic.micro_batch_tokens", "50", "--roles.ref.dtype", "bfloat16",
        "--roles.reward.quantize", "8bit", "--roles.reward.offload", "true")
    engines = built.engines
    assert (engines["actor"].training.stage, engines["critic"].training.stage) == (2, 1)
    assert engines["ref"].module.model.dtype == torch.bfloat16 and engines["actor"].module.model.dtype == torch.float32
    held = {role: {type(m).__name__ for m in quantized_layers(e.module).values()} for role, e in engines.items()}
    assert held == {"actor": set(), "ref": set(), "critic": {"Linear4bit"}, "reward": {"Linear8bitLt"}}
    assert built.roles.critic.max_tokens == 50 and built.roles.actor.max_tokens == 8192
    assert all(v is not None for row in rows for v in row.values())


@pytest.mark.slow
def test_at_a_price_of_0_no_reference_is_loaded_unless_one_is_named(place, capsys) -> None:
    free = ["--ppo.kl_coef", "0", "--roles.share_base", "false"]
    rows, built = place.ppo("no_ref", *free)
    assert set(built.engines) == {"actor", "critic", "reward"} and built.roles.ref is None
    assert not any("kl" in name.split("/") for row in rows for name in row)
    named = ["--roles.ref.model_name_or_path", f"{place.folder}/lora/sft"]
    measured, built = place.ppo("named_ref", *free, *named)
    assert built.roles.ref and all(any("kl" in name.split("/") for name in row) for row in measured)
    for row, other in zip(rows, measured, strict=True):  # the reference says what it sees and moves nothing
        assert row == pytest.approx({k: v for k, v in other.items() if "kl" not in k.split("/")}, rel=1e-6)
    capsys.readouterr()
    for more in ([], named):
        place.launch("ppo", "planned", *free, *more, "--plan", "--model.model_name_or_path", f"{place.folder}/lora/sft",
                     "--roles.reward.model_name_or_path", f"{place.folder}/lora/reward")
        assert ("ref" in capsys.readouterr().out.split()) == bool(more)


@pytest.mark.slow
def test_lora_on_a_16_bit_base_trains_fp32_masters_of_16_bit_adapters_and_fp32_heads(place) -> None:
    rows, built = place.ppo("bf16", "--model.dtype", "bfloat16")
    for role in ("actor", "critic"):
        training = built.engines[role].training
        assert {p.dtype for n, p in training.parameters.items() if ".lora_" in n} == {torch.bfloat16}
        assert {p.dtype for n, p in training.parameters.items() if ".lora_" not in n} <= {torch.float32}
        assert {v.dtype for v in training.state()["weights"].values()} == {torch.float32}
        for name, value in training.state()["weights"].items():
            assert torch.equal(value.to(training.parameters[name].dtype), training.parameters[name])
    assert all(v is not None for row in rows for v in row.values())


@pytest.mark.slow
def test_three_stages_over_a_quantised_base_follow_each_other(place, capfd) -> None:
    quantised = [*LORA, "--model.load_in_4bit", "true", "--model.model_name_or_path"]
    sft = place.launch("sft", "4bit/sft", *quantised, place.base)
    reward = place.launch("reward", "4bit/reward", *quantised, str(sft))
    for run in (sft, reward):
        assert json.loads((run / "adapter" / "merge.json").read_text())["into"] == "original"
    named = ["--roles.reward.model_name_or_path", f"{place.folder}/4bit/reward", "--roles.share_base", "true"]
    out = place.launch("ppo", "4bit/ppo", *quantised, str(sft), *named)
    built = place.built[-1]
    assert len(set(_backbones(built).values())) == 1 and len(quantized_layers(built.engines["actor"].module)) == 14
    assert all(".actor." in n or ".critic." in n for n in _moved(built)["actor"])
    merge = json.loads((out / "adapter" / "merge.json").read_text())
    assert merge["into"] == "original" and merge["difference"] < 0.5
    # merged into what the quantisation had left, it would be rounded away by the next one
    (sft / "adapter" / "merge.json").write_text('{"into": "dequantised"}')
    place.launch("reward", "twice/reward", *quantised, str(sft), code=2)
    assert "4bit/sft was trained over a quantised base whose original weights were gone" in capfd.readouterr().err


# --- the stages over a 4-bit base learn the embedded demo task

TASK = ["--model.dtype", "float32", "--data.split=[4, 3, 3]", "--data.eval_fraction", "0.08", "--train.warmup_ratio",
          "0.1", "--train.logging_steps", "50",
          "--train.per_device_eval_batch_size", "256", "--train.max_eval_batches", "1"]
TEXTS = ["--data.max_length", "64"]
TASK_PPO = ["--data.max_prompt_length", "40",
       "--train.max_steps", "20", "--train.per_device_train_batch_size", "128", "--roles.actor.learning_rate", "4e-3",
       "--roles.critic.learning_rate", "4e-3", "--ppo.num_ppo_epochs", "2", "--ppo.num_minibatches", "2",
       "--ppo.kl_coef", "0.2", "--ppo.missing_eos_penalty", "1.0", "--ppo.sampling.max_new_tokens", "16"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sft_reward_and_ppo_over_a_4_bit_base_follow_each_other_and_each_of_them_learns(tmp_path):
    common = [*TASK, f"--data.cache_dir={tmp_path}/cache"]
    four_bits = [*common, "--model.load_in_4bit", "true", "--model.lora.r", "16", "--model.model_name_or_path"]
    demos = [*TEXTS, "--data.sources=[{path: demo/demonstrations}]", "--train.per_device_train_batch_size", "64"]
    assert main(["--stage", "sft", "--output_dir", f"{tmp_path}/base", *common, *demos, "--model.preset", "demo",
                 "--train.learning_rate", "4e-3", "--train.max_steps", "250"]) == 0
    assert main(["--stage", "sft", "--output_dir", f"{tmp_path}/sft", *four_bits, f"{tmp_path}/base/model", *demos,
                 "--train.learning_rate", "5e-3", "--train.max_steps", "300"]) == 0
    assert main(["--stage", "reward", "--output_dir", f"{tmp_path}/reward", *four_bits, f"{tmp_path}/sft", *TEXTS,
                 "--data.sources=[{path: demo/preferences}]", "--train.learning_rate", "5e-3", "--train.max_steps",
                 "300", "--train.per_device_train_batch_size", "48"]) == 0
    assert main(["--stage", "ppo", "--output_dir", f"{tmp_path}/ppo", *four_bits, f"{tmp_path}/sft", *TASK_PPO,
                 "--data.sources=[{path: demo/prompts}]", "--roles.share_base", "true"]) == 0
    last = {name: json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
            for name in ("base", "sft", "reward", "ppo")}
    print({name: {k: v for k, v in rows.items() if k.startswith("eval/")} for name, rows in last.items()})
    assert last["sft"]["eval/loss"] < 0.9 * last["base"]["eval/loss"]
    assert last["reward"]["eval/accuracy"] > 0.65
    rewards = [row["reward"] for row in map(json.loads, (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines())
               if "reward" in row]
    print(rewards, (tmp_path / "sft" / "adapter" / "merge.json").read_text())
    assert sum(rewards[-3:]) / 3 > rewards[0] + 1  # the first is that of the start
