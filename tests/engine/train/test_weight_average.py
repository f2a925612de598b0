"""The moving average of the actor's weights: by hand, at every ZeRO stage, in the model and back, and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train.ema import WeightAverage
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.trainers.ppo import PPOConfig
from tests.factories.stage_options import COMMON, PPO, WORDS, used
from tests.factories.tiny import optimizer_step, save_tiny, tiny_causal_lm
from tests.factories.trainers import PROMPTS, ppo, settings

DECAY = 0.9


def engine_of(stage: int | None, dtype: torch.dtype) -> HybridEngine:
    model = tiny_causal_lm(0).to(dtype)
    return HybridEngine(model, model).prepare_training(OptimizerConfig(learning_rate=1e-2), lambda step: 1.0,
                                                       ZeroConfig(zero_stage=stage))


def step(engine: HybridEngine, seed: int) -> None:
    ids = torch.randint(4, 300, (2, 8), generator=torch.Generator().manual_seed(seed))
    optimizer_step(engine, [ids], lambda piece: engine(piece).logits.float().logsumexp(-1).mean())


@pytest.mark.parametrize(("stage", "dtype"), [(0, torch.float32), (None, torch.bfloat16), (1, torch.float32),
                                              (2, torch.bfloat16), (3, torch.float32), (3, torch.bfloat16)])
def test_the_average_is_that_of_the_fp32_weights_by_hand_and_the_model_gets_its_own_back(stage, dtype) -> None:
    engine = engine_of(stage, dtype)
    average = WeightAverage(engine, DECAY)
    expected = {name: w.double() for name, w in engine.training.state()["weights"].items()}
    for seed in range(3):
        step(engine, seed)
        average.update()
        for name, weight in engine.training.state()["weights"].items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * weight.double()
    before, found = engine.training.state(), average.weights()
    assert found.keys() == expected.keys() and all(w.dtype == torch.float32 for w in found.values())
    for name, weight in found.items():
        torch.testing.assert_close(weight.double(), expected[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(weight, before["weights"][name])
    with gathered(engine.module):
        own = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    with average.in_model(), gathered(engine.module):
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter, found[name].to(dtype)), name
    after = engine.training.state()
    with gathered(engine.module):
        assert all(torch.equal(p, own[n]) for n, p in engine.module.named_parameters())
    assert all(torch.equal(after[kind][n], w) for kind in ("weights", "exp_avg") for n, w in before[kind].items())
    step(engine, 9)  # and it trains on


def test_an_average_goes_on_from_its_state() -> None:
    engine = engine_of(None, torch.bfloat16)
    average = WeightAverage(engine, DECAY)
    step(engine, 0)
    average.update()
    saved = {k: v.clone() for k, v in average.state()["averages"].items()}
    again = WeightAverage(engine, DECAY)  # begins at the newest weights
    again.load_state({"averages": saved})
    assert all(torch.equal(a, b) for a, b in zip(again.weights().values(), average.weights().values(), strict=True))


def test_ppo_averages_after_every_optimizer_step_of_the_actor() -> None:
    trainer = ppo(settings(ema=True, ema_decay=0.5, num_minibatches=2, num_ppo_epochs=2, critic_warmup_steps=1))
    seen, update = [], trainer.average.update
    trainer.average.update = lambda: seen.append(1) or update()
    trainer.step(PROMPTS)
    assert not seen  # the critic warms up
    trainer.step(PROMPTS)
    assert len(seen) == 4
    assert trainer.state()["average"]["averages"].keys() == trainer.average.weights().keys()


def test_settings_of_an_average_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"no average is kept; give ppo.ema true"):
        PPOConfig(ema_decay=0.99)
    with pytest.raises(UserError, match=r"ema_decay is 1.0; it must lie in"):
        PPOConfig(ema=True, ema_decay=1.0)


def launch(folder: Path, out: str, *more: str) -> Path:
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {w}"}) + "\n" for w in WORDS))
    (folder / "pay.py").write_text("def short(completions, **_):\n    return [-len(c) / 100 for c in completions]\n")
    if not (folder / "base").exists():
        save_tiny(folder / "base")
    assert main(["--stage", "reinforce_pp", "--output_dir", f"{folder}/{out}", *used("reinforce_pp", COMMON), *PPO[:2],
                 f"--data.cache_dir={folder}/cache", f"--data.sources=[{{path: {folder}/prompts.jsonl}}]",
                 "--model.model_name_or_path", f"{folder}/base", f"--reward.functions=['{folder}/pay.py:short']",
                 "--roles.actor.learning_rate", "1e-2", "--train.max_steps", "1", "--ppo.num_ppo_epochs", "1",
                 "--ppo.ema", "true", *more]) == 0
    return folder / out


def test_the_average_is_exported_beside_the_model_and_is_half_way_after_one_step(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    out = launch(tmp_path, "full", "--ppo.ema_decay", "0.5")
    start, end, between = (dict(AutoModelForCausalLM.from_pretrained(f).named_parameters())
                           for f in (tmp_path / "base", out / "model", out / "model_ema"))
    assert any(not torch.equal(start[n], w) for n, w in end.items())
    for name, weight in between.items():
        torch.testing.assert_close(weight, (start[name] + end[name]) / 2, rtol=1e-5, atol=1e-7)
    assert (out / "model_ema" / "tokenizer.json").exists()


def test_of_adapters_the_adapter_alone_is_averaged_and_left_beside_its_own(tmp_path) -> None:
    out = launch(tmp_path, "lora", "--ppo.ema_decay", "0.5", "--model.lora.r", "4")
    end, between = (load_file(out / f / "adapter_model.safetensors") for f in ("adapter", "adapter_ema"))
    assert end.keys() == between.keys()
    for name, weight in between.items():
        if "lora_B" in name:  # an adapter starts with B = 0
            assert weight.any()
            torch.testing.assert_close(weight, end[name] / 2, rtol=1e-5, atol=1e-8)


def test_the_plan_counts_the_average(tmp_path, capsys) -> None:
    words = ["--stage", "reinforce_pp", "--plan", "--model.model_name_or_path", save_tiny(tmp_path / "base"),
             *used("reinforce_pp", COMMON), *PPO[:2], "--reward.functions=['builtin:length_penalty']"]
    rows = []
    for ema in ("false", "true"):
        assert main([*words, "--ppo.ema", ema]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        rows.append(next(found for found in lines if found[:2] == ["actor", "optimizer"]))
    assert float(rows[1][2]) == pytest.approx(1.5 * float(rows[0][2]), rel=0.25)  # 12 bytes and not 8, as printed
