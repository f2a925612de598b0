"""Stages from a base that has no chat template, whose tokenizer is given ChatML's two tokens."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hybrid_rlhf.cli import main
from tests.factories.tiny import TEXTS, tiny_causal_lm


def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with pad, EOS and no token of a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|pad|>", "<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|endoftext|>")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two bases (of one the new ids fall into the padding of its vocabulary), conversations, pairs and prompts."""
    folder, tokenizer = tmp_path_factory.mktemp("place"), plain_tokenizer()
    for name, size, tied in (("base", len(tokenizer), True), ("padded", 320, False)):
        # rows wide enough for a frozen head to say something
        tiny_causal_lm(vocab_size=size, eos_token_id=1, tie_word_embeddings=tied,
                       initializer_range=0.3).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    said = [[{"role": "user", "content": f"Where is the {w}?"}, {"role": "assistant", "content": "the"}]
            for w in ("fox", "sun", "cat", "wood", "word", "red") for _ in range(8)]
    rows = {"sft": [{"messages": m} for m in said], "ppo": [{"prompt": m[:1]} for m in said],
            "reward": [{"prompt": m[:1], "chosen": m[1:], "rejected": [m[1] | {"content": "no"}]} for m in said]}
    rows["dpo"] = rows["reward"]
    for name, table in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in table))
    return folder


def run(place, stage: str, *more: str, base: str = "base", rate: str = "2e-2", steps: str = "40") -> int:
    own = ["--roles.actor.learning_rate"] if stage == "ppo" else ["--data.max_length", "64", "--train.learning_rate"]
    return main(["--stage", stage, "--output_dir", str(place / stage), "--data.sources",
                 f"[{{path: {place}/{stage}.jsonl}}]", "--data.cache_dir", str(place / "cache"),
                 "--model.lora.r", "16", *own, rate, "--train.max_steps", steps,
                 "--train.per_device_train_batch_size", "8",
                 "--model.model_name_or_path", str(place / base), *more])


def answers(folder) -> tuple[list[dict], list[dict]]:
    """Before the first step, after the last."""
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    steps = sorted({r["step"] for r in rows})
    return [r for r in rows if r["step"] == steps[0]], [r for r in rows if r["step"] == steps[-1]]


@pytest.mark.parametrize("base", ["base", "padded"])
def test_sft_with_adapters_teaches_a_base_without_a_template_to_end_its_answers(base, place, capsys):
    folder = place / f"sft-{base}"
    assert run(place, "sft", "--output_dir", str(folder), base=base) == 0
    assert "the embedding rows of 2 new token(s) (<|im_start|>, <|im_end|>) are trained too" in capsys.readouterr().err
    before, after = answers(folder)
    assert not any(r["ended"] for r in before) and all(r["ended"] for r in after)
    assert {r["completion"] for r in after} == {"the"}
    assert "endless answers" not in (folder / "report.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder / "model")  # by transformers alone
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Where is the sun?"},
                                         {"role": "assistant", "content": "the"}], return_tensors="pt",
                                        return_dict=True)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    where = (ids[0] == end).nonzero()[-1, 0]
    assert model(ids).logits[0, where - 1].softmax(-1)[end] > 0.9
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    indices = config["trainable_token_indices"]
    assert (indices if isinstance(indices, list) else indices["lm_head"]) == sorted(
        tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))


@pytest.mark.slow
def test_four_roles_on_a_base_that_no_sft_has_trained_have_rows_of_their_own(place):
    """The reward run's rows come with its adapter, the critic's begin as those, and the reference has the base's."""
    assert run(place, "reward", steps="8") == 0
    trained = json.loads((place / "reward" / "adapter" / "adapter_config.json").read_text())
    assert len(trained["trainable_token_indices"]) == 2
    assert run(place, "ppo", "--roles.reward.model_name_or_path", str(place / "reward"), "--roles.share_base", "all",
               "--ppo.sampling.max_new_tokens", "6", "--data.max_prompt_length", "48", steps="2") == 0
    rows = [json.loads(line) for line in (place / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert abs(rows[0]["objective/kl"]) < 1e-4  # actor and reference begin alike
    assert (place / "ppo" / "adapter" / "adapter_model.safetensors").exists()


def test_preferences_over_adapters_train_rows_and_the_reference_keeps_those_of_the_base(place):
    assert run(place, "dpo", steps="3", rate="1e-3") == 0
    rows = [json.loads(line) for line in (place / "dpo" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(float(torch.log(torch.tensor(2.0))), abs=1e-4)  # no margin yet
    assert rows[2]["loss"] < rows[0]["loss"]
