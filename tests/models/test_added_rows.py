"""The rows of tokens that a base did not know: trained beside adapters, and part of every way in which these travel."""


import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.models import load
from hybrid_rlhf.models.added_rows import holders
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import (
    Adapters,
    LoraConfig,
    add_lora,
    copy_adapter,
    load_adapter,
    lora_layers,
    save_adapter,
)
from hybrid_rlhf.models.tokenizer import added_ids, load_tokenizer
from hybrid_rlhf.roles import PolicyModule
from tests.factories.merged import merged_state_dict
from tests.factories.tiny import optimizer_step, save_tiny, tiny_causal_lm

NEW = [301, 300]  # of 302: in no order, as a tokenizer may have them
IDS = torch.tensor([[5, 300, 7, 8, 301, 9]])
KINDS = {"untied": {}, "tied": {"tie_word_embeddings": True},
         "a head with a bias": {"kind": "phi"}, "scaled embeddings": {"kind": "gemma", "head_dim": 8},
         "scaled logits": {"kind": "cohere", "logit_scale": 0.3}}


def base(**changes) -> torch.nn.Module:
    return tiny_causal_lm(vocab_size=302, **changes)


def taught(model: torch.nn.Module, name: str = "default", seed: int = 1, ids=NEW) -> torch.nn.Module:
    """With an adapter and rows that have learned something."""
    torch.manual_seed(seed)
    add_lora(model, LoraConfig(r=4), name, ids)
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B[name].weight, std=0.2)
    for rows in holders(model).values():
        torch.nn.init.normal_(rows.adapters[name].weight, std=0.5)
    return model


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


def merged(model: torch.nn.Module, **changes) -> torch.nn.Module:
    """A plain transformers model with the merged weights."""
    plain = base(seed=9, **changes)
    plain.load_state_dict(merged_state_dict(model))
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_is_the_live_one_and_rows_that_learned_nothing_change_nothing(kind):
    model = base(**KINDS[kind])
    before = logits(model)
    add_lora(model, LoraConfig(r=4), new_ids=NEW)
    torch.testing.assert_close(logits(model), before)
    model = taught(base(**KINDS[kind]))
    assert (logits(model) - before)[..., NEW].abs().max() > 0.01
    torch.testing.assert_close(logits(merged(model, **KINDS[kind])), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["tied", "a head with a bias", "scaled embeddings"])
def test_the_engine_draws_the_tokens_that_generate_draws_of_the_merged_model(kind):
    model = taught(base(**KINDS[kind]))
    plain = merged(model, **KINDS[kind])
    prompts = [[5, 300, 7], [301, 9, 11, 12, 300]]
    engine = HybridEngine(PolicyModule(model), model)
    with engine.inference():
        ours = engine.generate(prompts, SamplingConfig(max_new_tokens=8, temperature=0.0)).tokens
    for prompt, mine in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8,
                                eos_token_id=None, pad_token_id=0)[0, len(prompt):]
        assert mine == theirs.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_get_the_gradient_that_the_whole_tables_would_get_there(kind, checkpointing):
    """Of a plain model whose every weight is trained, by torch alone."""
    model = taught(base(**KINDS[kind]))
    plain = merged(model, **KINDS[kind])
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    ones = torch.ones_like(IDS, dtype=torch.bool)
    ones[:, 0] = False
    (-PolicyModule(model)(SequenceBatch(IDS, torch.ones_like(ones), ones)).logprobs.sum()).backward()
    chosen = torch.log_softmax(plain(input_ids=IDS).logits[:, :-1], -1).gather(-1, IDS[:, 1:, None])
    (-chosen.sum()).backward()
    for name, rows in holders(model).items():
        expected = plain.get_submodule(name).weight.grad[sorted(NEW)]
        torch.testing.assert_close(rows.adapters["default"].weight.grad, expected, rtol=1e-3, atol=1e-5)
    assert sum("added_rows" in n for n, _ in model.named_parameters()) == (1 if kind in (
        "tied", "scaled embeddings", "scaled logits") else 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_move_as_under_plain_torch_at_every_zero_stage(stage):
    def loss(of):
        return (of(input_ids=IDS, use_cache=False).logits ** 2).mean()

    model, twin = taught(base(tie_word_embeddings=True)), taught(base(tie_word_embeddings=True))
    own = [p for p in twin.parameters() if p.requires_grad]
    oracle = torch.optim.AdamW(own, lr=1e-2, weight_decay=0.0)
    engine = HybridEngine(model).prepare_training(OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9),
                                                  lambda step: 1.0, ZeroConfig(stage))
    for _ in range(3):
        optimizer_step(engine, [None], lambda _: (engine(input_ids=IDS, use_cache=False).logits ** 2).mean())
        oracle.zero_grad()
        loss(twin).backward()
        oracle.step()
    with gathered(model):
        ours, theirs = (next(iter(holders(m).values())).adapters["default"].weight for m in (model, twin))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits(merged(model, tie_word_embeddings=True)), logits(twin), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_plain_peft_loads_the_adapter_and_we_load_what_peft_saved(tied, tmp_path):
    model = taught(base(tie_word_embeddings=tied))
    save_adapter(model, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(base(tie_word_embeddings=tied), tmp_path / "ours").eval()
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "peft's")
    again = base(tie_word_embeddings=tied)
    load_adapter(again, tmp_path / "peft's", "default")
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)


def test_each_adapter_of_a_shared_base_has_its_own_rows_and_the_base_its_own():
    shared = base()
    for i, name in enumerate(("actor", "critic")):
        taught(shared, name, seed=10 + i, ids=NEW if name == "actor" else [300])
    copy_adapter(shared, "critic", "reward")
    expected = {None: logits(base())}
    for i, name in enumerate(("actor", "critic")):
        expected[name] = logits(taught(base(), seed=10 + i, ids=NEW if name == "actor" else [300]))
    expected["reward"] = expected["critic"]
    adapters = Adapters(shared)
    adapters.train_only(["actor"])
    for name, want in expected.items():
        with adapters.use(name):
            torch.testing.assert_close(logits(shared), want, rtol=0, atol=0)
    trained = {n for n, p in shared.named_parameters() if p.requires_grad}
    assert {n for n in trained if "added_rows" in n} == {"model.embed_tokens.added_rows.adapters.actor.weight",
                                                        "lm_head.added_rows.adapters.actor.weight"}
    own = {id(p) for p in adapters.parameters("actor").values()}
    assert own == {id(p) for p in shared.parameters() if p.requires_grad}


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_rows_over_a_quantised_base_are_trained_and_merged(bits, tmp_path):
    folder = save_tiny(tmp_path, vocab_size=302, hidden_size=64, intermediate_size=128)
    model = taught(load.load_causal_lm(ModelConfig(folder, dtype="float32", **{f"load_in_{bits}": True})))
    state = merged_state_dict(model)
    for name, rows in holders(model).items():
        assert torch.equal(state[f"{name}.weight"][sorted(NEW)], rows.adapters["default"].weight)
    logits_of = model(input_ids=IDS, use_cache=False).logits
    logits_of.sum().backward()
    assert all(rows.adapters["default"].weight.grad.abs().sum() > 0 for rows in holders(model).values())


def test_tokens_that_a_template_adds_are_known_by_their_ids(tmp_path):
    from hybrid_rlhf.data.chat import ensure_template

    loaded = load_tokenizer(save_tiny(tmp_path, template=False))
    assert added_ids(loaded) == []
    loaded.add_tokens(["<|one|>", "<|two|>"], special_tokens=True)
    assert added_ids(loaded) == [300, 301]
    ensure_template(loaded)  # its markers are in this vocabulary, and a model without a template never saw them
    assert loaded.convert_ids_to_tokens(added_ids(loaded)) == ["<|im_start|>", "<|im_end|>", "<|one|>", "<|two|>"]
    assert added_ids(load_tokenizer(save_tiny(tmp_path / "chat"))) == []  # its template came with it


def test_peft_s_auto_model_makes_room_for_added_tokens_by_the_tokenizer_beside_the_adapter(tmp_path):
    from hybrid_rlhf.export.folder import export

    folder = save_tiny(tmp_path / "base")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<|one|>", "<|two|>"], special_tokens=True)
    model = load.load_causal_lm(ModelConfig(folder))
    load.prepare(model, ModelConfig(folder), len(tokenizer))
    taught(model)
    export(model, tokenizer, tmp_path / "run" / "model", [3])
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "adapter").eval()
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)
    assert theirs.generate(input_ids=IDS, max_new_tokens=2).shape[1] <= IDS.shape[1] + 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_reward_model_s_adapter_has_its_head_and_plain_peft_gives_its_scores(tmp_path):
    from hybrid_rlhf import cli
    from hybrid_rlhf.export.folder import export

    folder = save_tiny(tmp_path / "base")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<|one|>", "<|two|>"], special_tokens=True)
    model = load.load_scalar_model(ModelConfig(folder), pad_id=0)
    load.prepare(model, ModelConfig(folder), len(tokenizer))
    torch.nn.init.normal_(taught(model).score.weight)
    export(model, tokenizer, tmp_path / "run" / "model", [3])
    theirs = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "run" / "adapter", num_labels=1)
    torch.testing.assert_close(logits(theirs.eval()), logits(model), rtol=1e-4, atol=1e-5)
    out = tmp_path / "out"
    assert cli.main(["export", "--model", str(tmp_path / "run" / "adapter"), "--output_dir", str(out)]) == 0
    again = AutoModelForSequenceClassification.from_pretrained(out).eval()
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-5)
