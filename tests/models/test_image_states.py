"""Rows with images: the states that transformers' own model computes from its own processor's inputs, row by row."""

import os

import pytest
import torch
from torch.testing import assert_close

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.image_files import ImageRef, look_at, open_image, scaled
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.models import images as images_module
from hybrid_rlhf.models.backbone import hidden_states, joining
from hybrid_rlhf.models.images import ImageReader, inputs_of, load_reader, reader_of
from tests.factories import tiny
from tests.factories.vision import (
    KINDS,
    ROWS,
    by_transformers,
    folder,
    image_files,
    image_text_model,
    plain_picture,
    rows_of,
)


def fresh_reader() -> ImageReader:
    """One that remembers no image."""
    known = load_reader(folder("qwen3_vl"))
    return ImageReader(known._processor, known.token_ids)


def batch_of(kind: str) -> SequenceBatch:
    ids, images = rows_of(kind)
    mask = length_mask([len(row) for row in ids])
    return SequenceBatch(pad_right(ids, 0), mask, mask, images=images)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_has_the_states_of_transformers_on_each_row(kind):
    model, reader, batch = image_text_model(kind), load_reader(folder(kind)), batch_of(kind)
    ours = hidden_states(model, batch)
    for i, ((text, _), images) in enumerate(zip(ROWS, batch.images, strict=True)):
        inputs = by_transformers(reader, text, images)
        assert inputs["input_ids"][0].tolist() == batch.input_ids[i][batch.attention_mask[i]].tolist()
        theirs = joining(model)(**inputs, use_cache=False).last_hidden_state[0]
        assert_close(ours[i, : len(theirs)], theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_rows_keep_their_images_and_rows_without_any_are_plain_text(kind):
    model, batch = image_text_model(kind), batch_of(kind)
    whole = hidden_states(model, batch)
    part = batch.rows(torch.tensor([3, 1]))
    for ours, row in zip(hidden_states(model, part), (3, 1), strict=True):
        length = int(batch.attention_mask[row].sum())
        assert_close(ours[:length], whole[row, :length], atol=2e-5, rtol=1e-4)
    assert batch.rows(torch.tensor([2])).images is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_row_with_an_images_token_beside_image_rows_is_text(kind):
    model, batch, reader = image_text_model(kind), batch_of(kind), load_reader(folder(kind))
    batch.input_ids[2, 5] = min(reader.token_ids)  # row 2 has no image
    alone = batch.rows(torch.tensor([2]))
    assert alone.images is None
    together, length = hidden_states(model, batch), alone.input_ids.shape[1]
    assert_close(together[2, :length], hidden_states(model, alone)[0], atol=2e-5, rtol=1e-4)
    other = batch_of(kind)
    assert_close(together[:2], hidden_states(model, other)[:2], atol=2e-5, rtol=1e-4)


def test_each_image_is_read_by_the_tower_once_however_many_rows_have_it():
    model, batch = image_text_model("qwen3_vl"), batch_of("qwen3_vl")
    seen = []
    joining(model).visual.register_forward_hook(lambda _module, _inputs, out: seen.append(len(out.pooler_output)))
    hidden_states(model, batch.rows(torch.tensor([0, 0, 0, 1])))
    assert sorted(seen) == [15, 16]  # tokens of files 0 and 1, which have six places


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_one_size_are_computed_together_with_the_same_states(kind):
    reader, first = load_reader(folder(kind)), image_files()[0]
    others = [first, plain_picture(first, "red"), plain_picture(first, "blue")]
    model, row = image_text_model(kind), batch_of(kind).rows(torch.tensor([0] * 3))
    row.images = [(image,) for image in others]
    together = hidden_states(model, row)
    for i, image in enumerate(others):
        alone = by_transformers(reader, ROWS[0][0], (image,))
        assert_close(together[i], joining(model)(**alone, use_cache=False).last_hidden_state[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tower_has_gradients_only_where_it_is_trained(kind):
    model, batch = image_text_model(kind), batch_of(kind)
    towers = [p for n, p in joining(model).named_parameters() if not n.startswith("language_model")]
    hidden_states(model, batch).square().sum().backward()
    assert all(p.grad is not None for p in model.get_input_embeddings().parameters())
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in towers)
    for parameter in towers:
        parameter.grad, parameter.requires_grad = None, False
    hidden_states(model, batch).square().sum().backward()
    assert all(p.grad is None for p in towers)


def test_a_frozen_tower_runs_in_evaluation_and_its_parts_keep_their_modes():
    model, seen = image_text_model("gemma3").train(), []
    first, *_, last = [m for m in joining(model).vision_tower.requires_grad_(False).modules() if not [*m.children()]]
    joining(model).multi_modal_projector.requires_grad_(False)
    last.register_forward_hook(lambda module, _inputs, _out: seen.append(module.training))
    first.eval()
    hidden_states(model, batch_of("gemma3"))
    assert seen and not any(seen) and last.training and not first.training


def test_processed_images_are_remembered_up_to_a_number_of_bytes(monkeypatch):
    first, second, third = image_files()
    reader = fresh_reader()
    sizes = [sum(value.nbytes for value in reader.read(image).inputs.values()) for image in (first, second, third)]
    kept = {image: reader.read(image) for image in (first, second, third)}
    assert all(reader.read(image) is read for image, read in kept.items())
    monkeypatch.setattr(images_module, "_KEPT_BYTES", sizes[0] + sizes[2])
    reader = fresh_reader()
    kept = {image: reader.read(image) for image in (first, second)}
    assert reader.read(second) is kept[second] and reader.read(first) is not kept[first]  # both were too much
    kept = {image: reader.read(image) for image in (first, third)}
    assert all(reader.read(image) is read for image, read in kept.items())


def test_a_file_that_is_written_anew_in_the_same_size_is_read_anew(tmp_path):
    from PIL import Image

    path, reader = str(tmp_path / "a.png"), fresh_reader()
    read = []
    for number, colour in enumerate(("red", "blue")):
        Image.new("RGB", (32, 32), colour).save(path)
        os.utime(path, ns=(number, number))
        read.append(reader.read(look_at(path)))
        assert reader.read(look_at(path)) is read[-1]
    assert not read[0].inputs["pixel_values"].equal(read[1].inputs["pixel_values"])
    os.unlink(path)
    assert reader.read(ImageRef(path, 32, 32)) is read[1]


def test_a_model_of_text_has_no_reader_and_refuses_images():
    model = tiny.tiny_causal_lm()
    assert reader_of(model) is None
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(UserError, match="reads no images"):
        hidden_states(model, SequenceBatch(ids, ids.bool(), ids.bool(), images=[(image_files()[0],)]))


class ReadsAsWords(torch.nn.Module):
    """As Chameleon, whose features of an image are rows of the word embedding."""

    def __init__(self):
        super().__init__()
        self.vqmodel = torch.nn.Identity()

    def forward(self, input_ids, mm_encoder_outputs=None): ...


def test_a_model_that_reads_images_as_words_is_refused():
    ids, image = torch.ones(1, 4, dtype=torch.long), image_files()[0]
    with pytest.raises(UserError, match="as words of its vocabulary"):
        inputs_of(None, ReadsAsWords(), ids, [(image,)], {image: {}})


def test_an_image_is_read_upright_in_rgb_and_scaled_to_the_bound(tmp_path):
    from PIL import Image

    path = str(tmp_path / "a.jpg")
    image, exif = Image.new("CMYK", (80, 40)), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(path, exif=exif)
    assert look_at(path) == ImageRef(path, 40, 80)
    small = scaled(look_at(path), 800)
    assert small == ImageRef(path, 20, 40) and open_image(small).size == (20, 40)
    assert open_image(small).mode == "RGB"
