"""GRPO steps on prompts with images: how often the towers run, and TRL's own loss and gradients on the same batch."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from hybrid_rlhf.data import collate
from hybrid_rlhf.data.datasets import DataConfig, build
from hybrid_rlhf.data.sources import Reads
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.models import images as images_module
from hybrid_rlhf.models.backbone import joining
from hybrid_rlhf.models.images import features_kept, load_reader
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.roles import Actor, PolicyModule, Reference, Roles
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from tests.factories.trainers import CLOCKED, Source, noted_losses
from tests.factories.vision import folder, image_files, image_text_model, rows_of

RATE = 0.005


def towers_of(model: nn.Module) -> list[nn.Module]:
    return [child for name, child in joining(model).named_children() if name != "language_model"]


def frozen(model: nn.Module, is_frozen: bool = True) -> nn.Module:
    for tower in towers_of(model):
        tower.requires_grad_(not is_frozen)
    return model


def seen_by(model: nn.Module, monkeypatch) -> list[int]:
    """Filled with the number of images of each pass over the towers."""
    seen, joint = [], joining(model)
    compute = joint.get_image_features

    def noted(**named):
        seen.append(len(named.get("image_grid_thw", named["pixel_values"])))
        return compute(**named)

    monkeypatch.setattr(joint, "get_image_features", noted)
    return seen


def prompts_of(kind: str, repeats: int = 1) -> Prompts:
    """Rows with one, two, no and one image: three distinct ones, in five places."""
    ids, images = (part[:4] for part in rows_of(kind))
    return Prompts(ids * repeats, ["p"] * 4 * repeats, images=images * repeats)


def trainer_of(policy: nn.Module, reference: nn.Module | None, max_tokens: int = 8192, **settings) -> PPOTrainer:
    engine = HybridEngine(PolicyModule(policy), policy, pad_id=0).prepare_training(
        OptimizerConfig(learning_rate=RATE, optim="sgd", max_grad_norm=1e9), lambda step: 1.0, ZeroConfig())
    config = PPOConfig(**dict(
        sampling=SamplingConfig(max_new_tokens=6, num_samples=2, temperature=1.0), normalise_scores=False,
        num_minibatches=1, num_ppo_epochs=1, missing_eos_penalty=0.0, old_logprobs="recompute", estimator="grpo",
        kl_coef=0.05) | settings)
    ref = None if reference is None else Reference(HybridEngine(PolicyModule(reference), reference, pad_id=0),
                                                   max_tokens)
    source = Source(lambda rollout: rollout.response_ids.float().mul(rollout.action_mask).sum(1) % 7)
    return PPOTrainer(Roles(Actor(engine, load_tokenizer(folder("qwen3_vl")), max_tokens), ref), source, config, seed=0)


def steps(kind: str, is_kept: bool, monkeypatch) -> tuple[list[dict], list[torch.Tensor], list[int], list[int]]:
    """Two steps of two updates each, over several micro-batches: metrics, weights, images that the policy's and the
    reference's towers saw."""
    policy, reference = frozen(image_text_model(kind)), frozen(image_text_model(kind))
    seen, seen_ref = seen_by(policy, monkeypatch), seen_by(reference, monkeypatch)
    trainer, metrics = trainer_of(policy, reference, max_tokens=64, num_ppo_epochs=2), []
    for _ in range(2):
        with features_kept() if is_kept else nullcontext():
            told = trainer.step(prompts_of(kind)).compute()
        metrics.append({name: value for name, value in told.items() if not name.startswith(CLOCKED)})
    return metrics, [p.detach() for p in policy.parameters()], seen, seen_ref


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_frozen_towers_see_each_image_once_a_step_with_the_same_bits(kind, monkeypatch):
    """Of three sizes, so that no two are computed in one pass, which may round otherwise."""
    metrics, weights, seen, seen_ref = steps(kind, True, monkeypatch)
    others, other_weights, often, often_ref = steps(kind, False, monkeypatch)
    assert seen == seen_ref == [1] * 6  # three images, two steps
    assert len(often) > 30 and len(often_ref) > 6
    assert metrics == others
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
    assert images_module._of_step is None


def test_images_of_one_size_are_computed_together_and_kept_each(monkeypatch):
    policy = frozen(image_text_model("gemma3"))
    seen, trainer = seen_by(policy, monkeypatch), trainer_of(policy, None, kl_coef=0.0)
    with features_kept():
        trainer.step(prompts_of("gemma3"))
    assert sum(seen) == 3 and max(seen) > 1


def test_features_beyond_the_bound_are_computed_again(monkeypatch):
    policy = frozen(image_text_model("qwen3_vl"))
    seen, trainer = seen_by(policy, monkeypatch), trainer_of(policy, None, kl_coef=0.0)
    config, ids = joining(policy).config, joining(policy).config.image_token_id
    num_layers = 1 + len(config.vision_config.deepstack_visual_indexes)
    size = num_layers * 4 * config.text_config.hidden_size
    first = rows_of("qwen3_vl")[0][0].count(ids)  # tokens of the first image
    monkeypatch.setattr(images_module, "KEPT_FEATURES", size * first)
    with features_kept():
        trainer.step(prompts_of("qwen3_vl"))
    assert len(seen) > 3
    seen.clear()
    monkeypatch.setattr(images_module, "KEPT_FEATURES", size * 100)
    with features_kept():
        trainer.step(prompts_of("qwen3_vl"))
    assert len(seen) == 3


def test_a_pass_over_the_towers_is_bounded_and_its_size_changes_nothing(monkeypatch):
    """Three images of one size: one pass, or one for each where two would be too many values."""
    losses, passes = [], []
    for bound in (images_module.VALUES_AT_ONCE, 3 * 16 * 16 * 2 - 1):
        monkeypatch.setattr(images_module, "VALUES_AT_ONCE", bound)
        policy = frozen(image_text_model("gemma3"))
        seen, trainer = seen_by(policy, monkeypatch), trainer_of(policy, None, kl_coef=0.0)
        with features_kept():
            told = trainer.step(prompts_of("gemma3")).compute()
        losses.append({name: value for name, value in told.items() if not name.startswith(CLOCKED)})
        passes.append(seen)
    assert max(passes[0]) > 1 and passes[1] == [1, 1, 1]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("case", ["trained", "adapted"])
def test_towers_that_change_or_have_an_adapter_compute_images_in_each_forward(case, monkeypatch):
    policy = image_text_model("qwen3_vl")
    if case == "adapted":
        add_lora(policy, LoraConfig(r=2))
        frozen(policy)
        linear = next(m for tower in towers_of(policy) for m in tower.modules() if isinstance(m, nn.Linear))
        linear.lora_A = nn.ModuleDict()  # as peft's, of a published adapter
    seen, trainer = seen_by(policy, monkeypatch), trainer_of(policy, None, kl_coef=0.0)
    with features_kept():
        trainer.step(prompts_of("qwen3_vl"))
    assert len(seen) > 6


def test_frozen_towers_draw_no_dropout_in_training():
    policy = frozen(image_text_model("gemma3")).train()
    modules = [m for tower in towers_of(policy) for m in tower.modules()]
    modes = []
    modules[-1].register_forward_hook(lambda module, _inputs, _out: modes.append(module.training))
    trainer = trainer_of(policy, None, kl_coef=0.0)
    trainer.step(prompts_of("gemma3"))
    assert modes and not any(modes) and all(m.training for m in modules)


# -- TRL's GRPOTrainer on the same prompts, images and answers ---------------------------------------------------------

ASKED = (("What is this?", (0,)), ("And what of these two?", (1, 2)))
SAID = ("a fox", "the sea of grass", "two", "one and one")
SCORES, HAS_EOS = [1.0, -0.5, 2.0, 0.25], [True, False, True, True]


def our_prompts(kind: str, path) -> Prompts:
    rows = [{"prompt": [{"role": "user", "content": text}], "images": [image_files()[i].path for i in which]}
            for text, which in ASKED]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(sources=[str(path)], eval_fraction=0.0, cache_dir=str(path.parent))
    data = build(config, Reads("ppo", "prompt", 2), load_tokenizer(folder(kind)), 0)
    rows = sorted(data.train, key=lambda row: len(row["images"]))
    return collate.collate_prompts(rows)


def moved_to(kind: str) -> nn.Module:
    """Another policy than the start, from which the reference differs."""
    model = image_text_model(kind)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02 * parameter.std().nan_to_num())
    return model


# Gemma 4: TRL loads no reference of it.
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "gemma3"])
@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "trained"])
def test_grpo_s_losses_and_weights_are_trl_s(kind, is_frozen, tmp_path, monkeypatch):
    """Two optimizer steps on one rollout with a KL penalty to another model; the second one is off policy."""
    from PIL import Image

    pytest.importorskip("trl")
    from tests.factories.trl_episodes import trl_grpo_steps

    tokenizer, ends = load_tokenizer(folder(kind)), {}
    answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in SAID]
    answers = [[*ids, tokenizer.eos_token_id] if ended else ids for ids, ended in zip(answers, HAS_EOS, strict=True)]
    images = [[Image.open(image_files()[i].path).convert("RGB") for i in which] for _, which in ASKED]
    processor = copy.deepcopy(load_reader(folder(kind))._processor)
    processor.tokenizer.padding_side = "left"  # TRL's kinds of tokens are padded by it
    # TRL reads them off a rendered prompt. A tokenizer that begins it once more (Gemma 3) moves them by a place, and
    # in TRL an image's first token then counts as text, and the first token of text behind it as the image's.
    processor.tokenizer.add_bos_token = False
    told = trl_grpo_steps(
        frozen(moved_to(kind), is_frozen), image_text_model(kind), processor,
        [[{"role": "user", "content": text}] for text, _ in ASKED], [[ids] for ids in answers], SCORES, [], RATE,
        images, beta=0.04, num_iterations=2, loss_type="grpo", temperature=0.8, max_completion_length=32,
        use_bias_correction_kl=False)
    prompts = our_prompts(kind, tmp_path / "rows.jsonl")
    assert [ids for ids in prompts.ids for _ in range(2)] == told.prompt_ids
    policy = frozen(moved_to(kind), is_frozen)
    trainer = trainer_of(policy, image_text_model(kind), kl_coef=0.04, num_ppo_epochs=2, kl_in="loss",
                         sampling=SamplingConfig(max_new_tokens=32, num_samples=2, temperature=0.8))
    trainer.source = Source(lambda rollout: torch.tensor(SCORES))
    losses = noted_losses(trainer)
    monkeypatch.setattr(Actor, "generate", lambda _actor, asked, *_: sampled(asked, answers))
    with features_kept():
        trainer.step(prompts)
    assert_close(losses, [entry["loss"] for entry in told.logs], rtol=1e-4, atol=2e-5)
    for (name, start), mine, theirs in zip(moved_to(kind).named_parameters(), policy.parameters(),
                                           told.model.parameters(), strict=True):
        ends[name] = (theirs - start).abs().max()
        assert (mine - theirs).abs().max() <= 2e-3 * ends[name] + 1e-7, name
    assert sum(bool(moved > 1e-6) for moved in ends.values()) > len(ends) / 3


def sampled(prompts: Prompts, answers: list[list[int]]) -> Rollout:
    made = Rollout.from_responses(prompts, answers, HAS_EOS, 0, list(SAID), temperature=0.8)
    made.sampled_logprobs = made.action_mask * -1.0
    return made
