"""Prompts with images on the decode engine: token for token what transformers' generate says, and log-probabilities of
the training forward, whatever slots, pages and neighbours there are."""

import pytest
import torch
from torch.testing import assert_close

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode import pages
from hybrid_rlhf.engine.decode.cuda_graphs import called
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.inference.sequence_scores import SequenceScorer
from hybrid_rlhf.models.images import load_reader
from hybrid_rlhf.roles.policy_module import PolicyModule
from tests.factories.vision import (
    KINDS,
    ROWS,
    by_generate,
    by_transformers,
    folder,
    image_files,
    image_text_model,
    plain_picture,
    rows_of,
)

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
        assert mine == by_generate(model, reader, by_transformers(reader, text, row), 10)


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


@pytest.mark.parametrize("capture", [None, called], ids=["plain", "captured"])
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_a_preempted_request_goes_on_as_it_would_have(kind, capture, monkeypatch):
    """Over few pages of 4 columns: its images are read again, with the tokens that it has drawn."""
    monkeypatch.setattr(pages, "_SIZE", 4)
    monkeypatch.setattr(pages, "SIZES", {})
    prompts, images = ([x for x in part for _ in range(3)] for part in rows_of(kind))
    model, sampling = image_text_model(kind), SamplingConfig(max_new_tokens=24, repetition_penalty=1.3)
    roomy = drawn(engine_of(model, max_batch=8), prompts, images, sampling)
    few = engine_of(model, max_batch=8, capture=capture)
    drawn(few, prompts[:1], images[:1])  # measures a column
    few.max_kv_bytes = int(few._runner.bytes_per_column * 2.2 * (max(map(len, prompts)) + 24))
    tight = drawn(few, prompts, images, sampling)
    assert few.num_preempted > 2 and tight.tokens == roomy.tokens
    for ours, theirs in zip(tight.logprobs, roomy.logprobs, strict=True):
        assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=1e-4)


def test_equal_tokens_with_other_images_are_other_prompts():
    """Both images have the same size, so that the ids agree: a prompt is not stored for the other's sake."""
    first = image_files()[0]
    model, (prompts, _) = image_text_model("qwen3_vl"), rows_of("qwen3_vl")
    images = [(first,), (plain_picture(first, "red"),)] * 2
    engine = engine_of(model, max_batch=2)
    out = drawn(engine, [prompts[0]] * 4, images)
    for mine, truth in zip(out.logprobs, scored(engine, [prompts[0]] * 4, images, out.tokens), strict=True):
        assert_close(torch.tensor(mine), truth, atol=2e-4, rtol=1e-4)
    sums = [float(x.sum()) for x in scored(engine, [prompts[0]] * 2, images[:2], out.tokens[:1] * 2)]
    assert abs(sums[0] - sums[1]) > 0.1


def model_that_draws_images(kind: str) -> tuple[torch.nn.Module, set[int]]:
    """A model whose likeliest tokens are transformers' ids of images, video and sound, and these."""
    model, processor = image_text_model(kind), load_reader(folder(kind))._processor
    ids = {*processor.image_token_ids, *processor.video_token_ids, *processor.audio_token_ids} - {None}
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.copy_(head.weight * 0.01)
        head.weight[sorted(ids)] *= -1000
    return model, ids


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_no_answer_has_a_token_of_an_image_or_of_video_or_sound(kind):
    (model, ids), (prompts, images) = model_that_draws_images(kind), rows_of(kind)
    many = drawn(engine_of(model), prompts * 8, images * 8)
    assert not {i for row in many.tokens for i in row} & ids


def test_a_number_of_tokens_that_does_not_fit_the_images_is_refused():
    prompts, images = rows_of("gemma3")
    with pytest.raises(UserError, match="8 tokens of images, and its 1 images have 4"):
        drawn(engine_of(image_text_model("gemma3")), prompts[1:2], [images[1][:1]])


# --- conversations ---------------------------------------------------------------------------------------------------


def greedy(kind, model, text, images, count=8):
    """What transformers' generate says to a text with images, read anew."""
    reader = load_reader(folder(kind))
    return by_generate(model, reader, by_transformers(reader, text, images), count)


def ids_of(kind, text, images):
    reader = load_reader(folder(kind))
    shown = text.format(*(reader.read(image).text for image in images))
    return reader._processor.tokenizer(shown)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_with_images_in_several_turns_is_that_of_generate(kind, monkeypatch):
    """An image in the first turn, text in the second, another image in the third, text behind both in the fourth."""
    model, files, prefills = image_text_model(kind), image_files(), []
    engine = engine_of(model)
    texts = ["hello {0} what", "hello {0} what then and there", "hello {0} what then and there {1} x",
             "hello {0} what then and there {1} x and more text here"]
    read = Runner.prefill
    monkeypatch.setattr(Runner, "prefill", lambda self, cache, prompts, *rest, offset=0, **named: (
        prefills.append((offset, len(prompts[0]))), read(self, cache, prompts, *rest, offset=offset, **named))[1])
    sampling = SamplingConfig(max_new_tokens=8, temperature=0)
    rows = [(text, files[:count]) for text, count in zip(texts, (1, 1, 2, 2), strict=True)]
    truth = [greedy(kind, model, *row) for row in rows]
    with engine.inference():
        prefills.clear()
        said = [list(engine.stream(ids_of(kind, *row), sampling, images=row[1])) for row in rows]
    assert said == truth
    if not engine._runner.is_stateful:  # those read each turn anew
        assert [offset > 0 for offset, _ in prefills] == [False, True, False, True]


def test_an_answer_that_is_gone_on_from_is_not_read_again():
    """The second turn holds the tokens of the first answer, whose positions follow the image's."""
    model, (image, *_), sampling = image_text_model("qwen3_vl"), image_files(), SamplingConfig(8, temperature=0)
    engine, reader = engine_of(model), load_reader(folder("qwen3_vl"))
    prompt = ids_of("qwen3_vl", "hello {0} what", [image])
    more = reader._processor.tokenizer(" and then")["input_ids"]
    with engine.inference():
        first = list(engine.stream(prompt, sampling, images=[image]))
        longer = [*prompt, *first, *more]
        second = list(engine.stream(longer, sampling, images=[image]))
    assert second == drawn(engine_of(model), [longer], [(image,)], sampling).tokens[0]
    inputs = by_transformers(reader, "hello {0} what", (image,))
    ids = torch.tensor([longer])
    inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": reader.types(ids)}
    assert second == by_generate(model, reader, inputs, 8)


def test_another_image_of_the_same_size_is_another_conversation():
    first = image_files()[0]
    other = plain_picture(first, "blue")
    model, sampling = image_text_model("qwen3_vl"), SamplingConfig(max_new_tokens=8, temperature=0)
    engine, ids = engine_of(model), ids_of("qwen3_vl", "hello {0} what", [first])
    with engine.inference():
        said = [list(engine.stream(ids, sampling, images=[image])) for image in (first, other)]
    assert said == [greedy("qwen3_vl", model, "hello {0} what", [image]) for image in (first, other)]
    assert said[0] != said[1]


# --- a server's requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_a_server_with_and_without_images_draw_as_alone(kind):
    model, (prompts, images), settings = image_text_model(kind), rows_of(kind), SamplingConfig(6, temperature=1.0)
    engine = engine_of(model)
    with engine.inference():
        serving = engine.serve(3, 256)
        requests = [Request(i, serving.prompt(*row), 6, 3, sampling=settings)
                    for i, row in enumerate(zip(prompts, images, strict=True))]
        for request in requests[:2]:
            serving.submit(request)
        serving.step()
        for request in requests[2:]:
            serving.submit(request)
        while serving.step():
            pass
    for i, request in enumerate(requests):
        alone = drawn(engine_of(model), prompts[i:i + 1], images[i:i + 1], settings, numbers=[i])
        assert request.tokens == alone.tokens[0]


def test_a_server_never_draws_an_images_token_after_one_and_leaves_other_requests_as_they_are():
    (model, ids), (prompts, images) = model_that_draws_images("gemma3"), rows_of("gemma3")
    engine, settings = engine_of(model), SamplingConfig(12, temperature=1.0)
    with engine.inference():
        serving = engine.serve(16, 64)
        requests = [Request(i, serving.prompt(prompts[i % 5], images[i % 5]), 12, 3, sampling=settings)
                    for i in range(40)]
        for request in requests:
            serving.submit(request)
        while serving.step():
            pass
    has_one = [bool(set(request.tokens) & ids) for request in requests]
    assert not any(has_one[i] for i in range(40) if images[i % 5])
    plain = drawn(engine_of(model), [prompts[2]] * 8, None, settings, numbers=range(2, 40, 5))
    assert [requests[i].tokens for i in range(2, 40, 5)] == plain.tokens
    assert any(has_one)


def test_states_of_a_prompt_with_images_are_read_from_its_start_or_behind_them():
    """What a server computes log-probabilities from, beside the training forward."""
    model, (prompts, images) = image_text_model("qwen3_vl"), rows_of("qwen3_vl")
    engine, answers = engine_of(model), [[5, 9, 11], [7, 3]]
    truth = scored(engine, [prompts[1]] * 2, [images[1]] * 2, answers)
    with engine.inference():
        scorer = SequenceScorer(engine, 64)
        ids = engine.serve(1, 64).prompt(prompts[1], images[1])
        for answer, expected in zip(answers, truth, strict=True):  # the second one goes on behind the images
            found = scorer.score([*ids, *answer], len(ids))
            assert_close(torch.tensor([score.logprob for score in found]), expected, atol=2e-4, rtol=1e-4)


def test_states_behind_text_that_was_read_without_the_image_are_read_anew():
    model, (prompts, images) = image_text_model("qwen3_vl"), rows_of("qwen3_vl")
    engine, answer = engine_of(model), [5, 9, 11]
    expected = scored(engine, prompts[:1], images[:1], [answer])[0]
    with engine.inference():
        scorer, prompt = SequenceScorer(engine, 64), engine.serve(1, 64).prompt(prompts[0], images[0])
        num_before = next(i for i, token in enumerate(prompt) if token < 0)
        scorer.score([*prompt[:num_before], 3, 4], 1)
        assert num_before > 0 and scorer._reader.num_held(prompt) == num_before
        found = scorer.score([*prompt, *answer], len(prompt))
    assert_close(torch.tensor([score.logprob for score in found]), expected, atol=2e-4, rtol=1e-4)


def test_a_model_that_does_not_run_on_the_decode_engine_refuses_images_in_one_line(monkeypatch):
    prompts, images = rows_of("qwen3_vl")
    monkeypatch.setattr(Runner, "_try", lambda self, path: "no")
    engine = engine_of(image_text_model("qwen3_vl"))
    with engine.inference():
        for refused in (lambda: engine.stream(prompts[0], GREEDY, images=images[0]),
                        lambda: engine.serve(1, 64).prompt(prompts[0], images[0])):
            with pytest.raises(UserError, match="does not run on the decode engine") as error:
                refused()
            assert "\n" not in str(error.value)
        assert engine.serve(1, 64).prompt(prompts[2], ()) == prompts[2]
