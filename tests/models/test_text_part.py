"""Checkpoints as published: an image-text one's text part trains, its towers stay, what no class reads is listed."""

import pytest
import torch
from safetensors import safe_open

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.models import images, load, shapes
from hybrid_rlhf.models.backbone import check_head, hidden_states, joining, own_head, towers
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm, load_scalar_model
from hybrid_rlhf.models.lora import LoraConfig, add_lora, lora_layers
from hybrid_rlhf.models.quantize import quantized_layers
from tests.factories import checkpoints
from tests.factories.releases import transformers_before

TOWERS = {"qwen3_5": ["model.visual"], "qwen3_vl": ["model.visual"],
          "gemma3": ["model.multi_modal_projector", "model.vision_tower"],
          "gemma4": ["model.audio_tower", "model.embed_audio", "model.embed_vision", "model.vision_tower"],
          "mistral_small_3_1": ["model.multi_modal_projector", "model.vision_tower"],
          "llama4": ["multi_modal_projector", "vision_model"]}
IDS = torch.arange(5, 17)[None]
MASK = torch.ones_like(IDS, dtype=torch.bool)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Name -> the folder of a published checkpoint, made once."""
    made = {}

    def of(name: str) -> str:
        if name not in made:
            made[name] = checkpoints.write(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


def named_in(path) -> dict:
    """Every tensor of a folder by its name in the files."""
    found = {}
    for file in path:
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("name", TOWERS)
def test_a_checkpoint_is_of_its_own_class_and_its_towers_are_frozen(name, folder):
    model = load_causal_lm(ModelConfig(folder(name)))
    assert type(model).__name__ == checkpoints.CHECKPOINTS[name].architecture
    assert sorted(towers(model)) == TOWERS[name]
    assert images.towers(joining(model)) == [model.get_submodule(n) for n in towers(model)]
    load.prepare(model, ModelConfig(folder(name)), 0)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen and frozen == {n for n, _ in model.named_parameters() if n.startswith(tuple(TOWERS[name]))}


@pytest.mark.parametrize("name", TOWERS)
def test_decoding_is_native_and_gives_the_plain_logits(name, folder):
    model = load_causal_lm(ModelConfig(folder(name)))
    check_head(model)
    runner = Runner(model)
    with torch.no_grad():
        runner.probe()
    assert runner.path == "native" and not runner.reasons


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "mistral_small_3_1"])
def test_gradients_are_those_of_transformers_own_loss_and_none_is_of_a_tower(name, folder):
    ours, theirs = (load_causal_lm(ModelConfig(folder(name))) for _ in range(2))
    load.prepare(ours, ModelConfig(folder(name)), 0)
    hidden = hidden_states(ours.train(), SequenceBatch(IDS, MASK, MASK))[0, :-1]
    torch.nn.functional.cross_entropy(own_head(ours)(hidden), IDS[0, 1:]).backward()
    theirs.eval()(input_ids=IDS, labels=IDS).loss.backward()
    for (place, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if place.startswith(tuple(TOWERS[name])):
            assert mine.grad is None and other.grad is None
        else:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wanted", ["all-linear", ["q_proj", "v_proj"], r".*\.q_proj"])
@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_adapters_are_on_the_text_part_alone(name, wanted, folder):
    config = ModelConfig(folder(name), lora=LoraConfig(r=2, target_modules=wanted))
    load.check_lora(config)
    model = load_causal_lm(config)
    assert any("q_proj" in n for part in towers(model) for n, _ in model.get_submodule(part).named_modules())
    add_lora(model, config.lora)
    assert lora_layers(model) and not [n for n in lora_layers(model) if n.startswith(tuple(TOWERS[name]))]


def test_target_modules_that_only_a_tower_has_are_refused(folder):
    model = load_causal_lm(ModelConfig(folder("gemma3")))
    for targets in (["fc1"], ["q_proj", "fc1"]):  # beside one that the text part has, too
        with pytest.raises(UserError, match=r"'fc1' is a layer of Gemma3ForConditionalGeneration's towers alone \("):
            add_lora(model, LoraConfig(r=2, target_modules=targets))


def test_in_4_bits_the_towers_stay_as_they_are(folder):
    pytest.importorskip("bitsandbytes")
    model = load_causal_lm(ModelConfig(folder("gemma3"), load_in_4bit=True, lora=LoraConfig(r=2)))
    layers = quantized_layers(model)
    assert layers and all(n.startswith("model.language_model.layers") for n in layers)


@pytest.mark.parametrize("name, kept", [("qwen3_5", "mtp."), ("glm4_6", "model.layers.92."), ("gemma3", None)])
def test_tensors_that_a_class_does_not_read_are_listed_for_the_export(name, kept, folder):
    unread = load_causal_lm(ModelConfig(folder(name))).unread_tensors
    there = {n for file in set(unread.values()) for n in named_in([file])}
    assert set(unread) <= there
    assert bool(unread) == bool(kept) and all(n.startswith(kept) for n in unread)


def test_the_head_s_multiplier_is_in_the_logits_of_falcon_h1(folder):
    model = load_causal_lm(ModelConfig(folder("falcon_h1")))
    model.model.lm_head_multiplier = 3.0
    check_head(model)
    hidden = torch.randn(5, model.config.hidden_size)
    torch.testing.assert_close(own_head(model)(hidden), 3.0 * model.lm_head(hidden))


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "mistral_small_3_1", "falcon_h1"])
def test_a_reward_model_is_made_of_any_type_that_has_a_backbone_and_read_again(name, folder, tmp_path):
    if name != "gemma3" and transformers_before("5.23"):
        pytest.skip("no class for sequence classification, which is said")
    model = load_scalar_model(ModelConfig(folder(name)), pad_id=0)
    batch = SequenceBatch(IDS, MASK, MASK)
    scores = ScalarModel(model.eval())(batch)
    torch.testing.assert_close(model(input_ids=IDS).logits[0, 0], scores[0, -1])
    model.save_pretrained(tmp_path)
    again = load_scalar_model(ModelConfig(str(tmp_path)))
    assert type(again) is type(model) and torch.equal(ScalarModel(again.eval())(batch), scores)


def test_a_reward_model_of_llama_4_is_refused_in_one_line(folder):
    with pytest.raises(UserError, match="of type llama4: transformers has no class for it; take another model"):
        load_scalar_model(ModelConfig(folder("llama4")))


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "llama4"])
def test_a_plan_counts_the_checkpoint_s_own_class(name, folder):
    config = ModelConfig(folder(name))
    settings = shapes.read_config(config)
    empty = shapes.empty_model(settings, config, torch.device("cpu"), is_scalar=False)
    assert type(empty).__name__ == checkpoints.CHECKPOINTS[name].architecture
    assert sum(p.numel() for p in empty.parameters()) == sum(p.numel() for p in load_causal_lm(config).parameters())
    with shapes.without_memory(torch.device("cpu")):
        assert shapes.cache_bytes(shapes.on_device(empty))[0] > 0


def test_fp8_weights_are_their_numbers_times_their_block_s_scale(folder, caplog):
    model = load_causal_lm(ModelConfig(folder("ministral3_fp8")))
    assert "quantised by fp8: they are dequantised" in caplog.text
    held = named_in([f"{folder('ministral3_fp8')}/model.safetensors"])
    name = next(n for n in held if n.endswith("layers.0.mlp.up_proj.weight"))
    scale = held[f"{name}_scale_inv"].float()
    if scale.ndim == 2:
        rows, columns = held[name].shape
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    weight = model.model.language_model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(weight.float(), held[name].float() * scale, rtol=1e-2, atol=1e-4)
    with pytest.raises(UserError, match=r"cannot be held in 4bit; leave out model.load_in_4bit"):
        load_causal_lm(ModelConfig(folder("ministral3_fp8"), load_in_4bit=True, lora=LoraConfig(r=2)))


def test_mxfp4_weights_are_dequantised(folder):
    model = load_causal_lm(ModelConfig(folder("gpt_oss_mxfp4")))
    assert not hasattr(model.config, "quantization_config")
    assert all(p.is_floating_point() for p in model.parameters())


def test_a_tekken_tokenizer_alone_is_refused_with_the_cure(folder):
    from hybrid_rlhf.models.tokenizer import load_tokenizer

    with pytest.raises(UserError, match=r"tokenizer as tekken.json, .* by model.tokenizer_name_or_path"):
        load_tokenizer(folder("mistral_small_3_2"))
