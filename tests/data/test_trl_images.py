"""Rows with images beside TRL: the tokens of its collators; transformers' loss and gradients on its batches."""

import json

import pytest
import torch
from torch.testing import assert_close

from hybrid_rlhf.data import collate
from hybrid_rlhf.data.datasets import DataConfig, build
from hybrid_rlhf.data.sources import Reads
from hybrid_rlhf.models.images import load_reader
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.roles.policy_module import PolicyModule
from tests.factories.vision import KINDS, folder, image_files, image_text_model

trl_sft = pytest.importorskip("trl.trainer.sft_trainer")
trl_dpo = pytest.importorskip("trl.trainer.dpo_trainer")

ASKED = ("What is this?", "And what of these two?", "Which one is red?")
ANSWERS = (("the sky", "a sea of grass and more"), ("two foxes", "one"), ("none of them", "the last"))
IMAGES = ((0,), (1, 0), (2,))  # of each row, in image_files


def rows_of(kind: str, is_pair: bool) -> tuple[list[dict], list[dict]]:
    """The same rows for us, with paths in a column, and for TRL, with Pillow's images."""
    from PIL import Image

    ours, theirs = [], []
    for asked, (better, worse), which in zip(ASKED, ANSWERS, IMAGES, strict=True):
        user, said, other = ({"role": role, "content": text} for role, text in (
            ("user", asked), ("assistant", better), ("assistant", worse)))
        row = dict(prompt=[user], chosen=[said], rejected=[other]) if is_pair else dict(messages=[user, said])
        files = [image_files()[i].path for i in which]
        ours.append({**row, "images": files})
        theirs.append({**json.loads(json.dumps(row)), "images": [Image.open(f).convert("RGB") for f in files]})
    return ours, theirs


def built(kind: str, rows: list[dict], reads: Reads, path, **settings):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(sources=[str(path)], eval_fraction=0.0, cache_dir=str(path.parent), **settings)
    return build(config, reads, load_tokenizer(folder(kind)), 0)


def losses(scores: torch.Tensor, batch) -> torch.Tensor:
    return torch.stack([part.sum() for part in scores.split(batch.loss_mask[:, 1:].sum(1).tolist())])


@pytest.mark.parametrize("kind", KINDS)
def test_sft_has_trl_s_tokens_and_transformers_loss_and_gradients(kind, tmp_path):
    ours, theirs = rows_of(kind, is_pair=False)
    data = built(kind, ours, Reads("sft", "demonstration", 0), tmp_path / "rows.jsonl", train_on="all")
    batch = collate.collate_sft(list(data.train), 0)
    reader, model, other = load_reader(folder(kind)), image_text_model(kind), image_text_model(kind)
    inputs = trl_sft.DataCollatorForVisionLanguageModeling(reader._processor)(theirs)
    length = batch.input_ids.shape[1]  # ours ends with the turn's end, TRL's with the template's line break
    for i in range(len(ours)):
        size = int(batch.attention_mask[i].sum())
        assert inputs["input_ids"][i, :size].tolist() == batch.input_ids[i, :size].tolist()
        inputs["labels"][i, size:] = -100
    assert inputs["input_ids"].shape[1] - length <= 2
    loss = other(**inputs).loss
    loss.backward()
    logprobs = PolicyModule(model)(batch).logprobs
    assert_close(-logprobs.mean(), loss, atol=1e-5, rtol=1e-5)
    (-logprobs.mean()).backward()
    for (name, mine), their in zip(model.named_parameters(), other.parameters(), strict=True):
        if their.grad is None:
            assert mine.grad is None, name
        else:
            assert_close(mine.grad, their.grad, atol=2e-5, rtol=2e-4, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_have_trl_s_tokens_and_dpo_s_loss_and_gradients(kind, tmp_path):
    """DPO (2305.18290, equation 7) from transformers' logits on TRL's batch, beta .1, the reference the start."""
    ours, theirs = rows_of(kind, is_pair=True)
    data = built(kind, ours, Reads("reward", "pair", 1), tmp_path / "rows.jsonl")
    batch = collate.collate_pairs(list(data.train), 0).sequences
    reader, model, other = load_reader(folder(kind)), image_text_model(kind), image_text_model(kind)
    inputs = trl_dpo.DataCollatorForVisionPreference(reader._processor, pad_to_multiple_of=None)(theirs)
    marks = inputs.pop("completion_mask").bool() & inputs["attention_mask"].bool()
    logits = other(**inputs).logits[:, :-1]
    tokens = torch.gather(logits.log_softmax(-1), 2, inputs["input_ids"][:, 1:, None])[..., 0]
    sums = []
    for i in range(len(batch)):
        kept = inputs["input_ids"][i][inputs["attention_mask"][i].bool()].tolist()
        size = int(batch.attention_mask[i].sum())
        assert kept[:size] == batch.input_ids[i, :size].tolist()
        places = marks[i, 1:].nonzero()[:, 0]  # TRL's answers end with the template's line break
        sums.append(tokens[i, places[: int(batch.loss_mask[i].sum())]].sum())
    mine = losses(PolicyModule(model)(batch).logprobs, batch)
    assert_close(mine, torch.stack(sums), atol=1e-4, rtol=1e-5)
    for total in (mine, torch.stack(sums)):
        start = total.detach() * 0.9  # as if the reference were elsewhere, so that the loss is not at its middle
        chosen, rejected = (total - start).chunk(2)
        (-torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))).mean().backward()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert_close(a.grad, b.grad, atol=2e-5, rtol=1e-3, msg=name)
