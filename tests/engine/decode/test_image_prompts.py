"""Prompts with images on the decode engine: token for token what transformers' generate says, and log-probabilities of
the training forward, whatever slots, pages and neighbours there are."""

import pytest
import torch
from torch.testing import assert_close

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.models.images import load_reader
from hybrid_rlhf.roles.policy_module import PolicyModule
from tests.factories.vision import KINDS, ROWS, by_transformers, folder, image_files, image_text_model, rows_of

GREEDY, SAMPLED = SamplingConfig(max_new_tokens=10, temperature=0), SamplingConfig(max_new_tokens=10, temperature=1.0)


def engine_of(model, **settings) -> HybridEngine:
    return HybridEngine(PolicyModule(model), model, pad_id=0, **settings)


def drawn(engine, prompts, images, sampling=SAMPLED, **named):
    with engine.inference():
        return engine.generate(prompts, sampling, seed=3, images=images, **named)


def scored(engine, prompts, images, answers):
    """The training forward's log-probabilities of the answers, row by row."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    mask = length_mask([len(row) for row in rows])
    is_answer = mask & ~length_mask([len(prompt) for prompt in prompts], mask.shape[1])
    with torch.no_grad():
        scores = engine(SequenceBatch(pad_right(rows, 0), mask, is_answer, images=list(images)))
    return scores.logprobs.split([len(answer) for answer in answers])


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers_generate(kind):
    model, reader = image_text_model(kind), load_reader(folder(kind))
    prompts, images = rows_of(kind)
    engine = engine_of(model)
    ours = drawn(engine, prompts, images, GREEDY)
    assert engine.describe()["path"] == "native"
    for (text, _), row, mine in zip(ROWS, images, ours.tokens, strict=True):
        inputs = by_transformers(reader, text, row)
        out = model.generate(**inputs, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0,
                             suppress_tokens=sorted(reader.never))
        assert mine == out[0, inputs["input_ids"].shape[1]:].tolist()


@pytest.mark.parametrize("max_batch", [64, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_logprobs_are_those_of_the_training_forward(kind, max_batch):
    """Groups of three, so that prompts are stored once and copied, and others enter as slots are free."""
    prompts, images = ([x for x in part for _ in range(3)] for part in rows_of(kind))
    engine = engine_of(image_text_model(kind), max_batch=max_batch)
    out = drawn(engine, prompts, images)
    for mine, truth in zip(out.logprobs, scored(engine, prompts, images, out.tokens), strict=True):
        assert_close(torch.tensor(mine), truth, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_does_not_depend_on_slots_or_neighbours(kind):
    prompts, images = ([x for x in part for _ in range(3)] for part in rows_of(kind))
    model = image_text_model(kind)
    whole = drawn(engine_of(model), prompts, images)
    assert drawn(engine_of(model, max_batch=2), prompts, images).tokens == whole.tokens
    for i in (0, 4, 10, 13):
        alone = drawn(engine_of(model), prompts[i:i + 1], images[i:i + 1], numbers=[i])
        assert alone.tokens == [whole.tokens[i]]
        assert_close(torch.tensor(alone.logprobs[0]), torch.tensor(whole.logprobs[i]), atol=2e-5, rtol=1e-4)


def test_equal_tokens_with_other_images_are_other_prompts():
    """Both images have the same size, so that the ids agree: a prompt is not stored for the other's sake."""
    from PIL import Image

    from hybrid_rlhf.core.image_files import ImageRef

    first = image_files()[0]
    other = first.path.replace("0.png", "other.png")
    Image.new("RGB", (first.width, first.height), "red").save(other)
    model, (prompts, _) = image_text_model("qwen3_vl"), rows_of("qwen3_vl")
    images = [(first,), (ImageRef(other, first.width, first.height),)] * 2
    engine = engine_of(model, max_batch=2)
    out = drawn(engine, [prompts[0]] * 4, images)
    for mine, truth in zip(out.logprobs, scored(engine, [prompts[0]] * 4, images, out.tokens), strict=True):
        assert_close(torch.tensor(mine), truth, atol=2e-4, rtol=1e-4)
    sums = [float(x.sum()) for x in scored(engine, [prompts[0]] * 2, images[:2], out.tokens[:1] * 2)]
    assert abs(sums[0] - sums[1]) > 0.1


def test_no_answer_has_a_token_of_an_image():
    model, reader = image_text_model("gemma3"), load_reader(folder("gemma3"))
    prompts, images = rows_of("gemma3")
    head = model.get_output_embeddings()
    with torch.no_grad():  # the image's token is the likeliest of all
        head.weight.copy_(head.weight * 0.01)
        head.weight[sorted(reader.never)] *= -1000
    many = drawn(engine_of(model), prompts * 8, images * 8)
    assert not {i for row in many.tokens for i in row} & reader.never


def test_a_number_of_tokens_that_does_not_fit_the_images_is_refused():
    prompts, images = rows_of("gemma3")
    with pytest.raises(UserError, match="8 tokens of images, and its 1 images have 4"):
        drawn(engine_of(image_text_model("gemma3")), prompts[1:2], [images[1][:1]])
