"""Rows with images become the tokens of the model's own processor, or are dropped with a reason."""

from __future__ import annotations

import base64
import io
import json
import os
import zlib
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoTokenizer

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.data import chat, collate
from hybrid_rlhf.data.datasets import DataConfig, build, summary
from hybrid_rlhf.data.loader import split_key
from hybrid_rlhf.data.preview import look, marked
from hybrid_rlhf.data.schema import format_of, read_row
from hybrid_rlhf.models.images import load_reader
from hybrid_rlhf.training.registry import READS
from tests.factories import checkpoints
from tests.factories.chats import a, u
from tests.factories.tiny import chatml_tokenizer, own_cache

SHAPES = ("qwen3_vl", "qwen3_5", "gemma3")


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def picture(file: str) -> dict:
    return {"type": "image", "image": file}


HERE = {"type": "image"}
TALKS = {  # name: (prompt as the row has it, the column images, the same for the processor)
    "one image before text": ([u("What is it?")], ["a.png"], [u([picture("a.png"), text("What is it?")])]),
    "one between texts": ([u([text("This: "), HERE, text(" What?")])], ["b.jpg"],
                          [u([text("This: "), picture("b.jpg"), text(" What?")])]),
    "two that LLaVA's marks place": ([u("<image> and <image>?")], ["a.png", "b.jpg"],
                                     [u([picture("a.png"), text(" and "), picture("b.jpg"), text("?")])]),
    "two turns with parts of their own": (
        [u([picture("a.png"), text("What?")]), a("Red."), u([text("And "), picture("b.jpg")])], [],
        [u([picture("a.png"), text("What?")]), a("Red."), u([text("And "), picture("b.jpg")])]),
    "three in three turns, system first": (
        [{"role": "system", "content": "Be brief."}, u([HERE, HERE, text("Which?")]), a("One."), u("Sure?"), a("Yes."),
         u([HERE, text("And it?")])], ["a.png", "b.jpg", "a.png"],
        [{"role": "system", "content": "Be brief."}, u([picture("a.png"), picture("b.jpg"), text("Which?")]),
         a("One."), u("Sure?"), a("Yes."), u([picture("a.png"), text("And it?")])]),
    "OpenAI's parts": ([u([{"type": "image_url", "image_url": {"url": "b.jpg"}}, text("What?")])], [],
                       [u([picture("b.jpg"), text("What?")])]),
    "nothing but an image": ([u([HERE])], ["b.jpg"], [u([picture("b.jpg")])]),
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    for name in SHAPES:
        checkpoints.write(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def tokenizers(shapes):
    return {name: AutoTokenizer.from_pretrained(shapes / name) for name in SHAPES}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Of the rows and images; a.png is 64 x 48 pixels, b.jpg 300 x 200."""
    own_cache(monkeypatch, tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    noise(64, 48).save(folder / "a.png")
    noise(300, 200).save(folder / "b.jpg")
    return folder


def noise(width: int, height: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), bytes(range(251)) * (width * height * 3 // 251 + 1))


def data_of(folder, rows: list[dict], tokenizer, stage: str = "sft", **changes):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = {"max_length": 8000, "max_prompt_length": 8000} | changes
    return build(DataConfig([str(path)], eval_fraction=0.0, **lengths), READS[stage], tokenizer, 0)


def by_processor(shapes, name: str, folder, messages: list[dict], **options) -> list[int]:
    """The tokens of transformers' own processor."""
    processor = load_reader(str(shapes / name))._processor
    template = AutoTokenizer.from_pretrained(shapes / name).chat_template
    with_files = [{**m, "content": [{**p, "image": Image.open(folder / p["image"])} if "image" in p else p
                                    for p in m["content"]] if isinstance(m["content"], list) else
                   [{"type": "text", "text": m["content"]}]} for m in messages]
    out = processor.apply_chat_template(with_files, chat_template=template, tokenize=True, return_dict=True, **options)
    return list(out["input_ids"][0])


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_has_the_tokens_of_the_processor(shapes, tokenizers, folder, name, talk):
    prompt, images, meant = TALKS[talk]
    row = data_of(folder, [{"prompt": prompt, "images": images}], tokenizers[name], "ppo").train[0]
    expected = by_processor(shapes, name, folder, meant, add_generation_prompt=True)
    assert row["prompt_ids"] == expected
    assert [os.path.basename(path) for path, *_ in row["images"]] == [
        part["image"] for m in meant if isinstance(m["content"], list) for part in m["content"] if "image" in part]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_a_demonstration_has_the_processors_tokens_and_its_answers_are_trained(shapes, tokenizers, folder, name):
    answers = ["A <plum>.", "Two pears, I think."]
    talk = [u([picture("a.png"), text("What?")]), a(answers[0]), u([text("And "), picture("b.jpg"), text("?")]),
            a(answers[1])]
    row = data_of(folder, [{"messages": talk}], tokenizers[name]).train[0]
    assert row["input_ids"] == by_processor(shapes, name, folder, talk)[: len(row["input_ids"])]
    trained = [i for i, is_trained in zip(row["input_ids"], row["loss_mask"], strict=True) if is_trained]
    end = "<|im_end|>" if name == "qwen3_vl" else "<end_of_turn>"
    assert tokenizers[name].decode(trained) == "".join(answer + end for answer in answers)
    assert row["images"] == [[str(folder / "a.png"), 64, 48], [str(folder / "b.jpg"), 300, 200]]


def test_a_conversation_in_several_texts_keeps_for_each_only_its_own_images(tokenizers, folder):
    talk = [u([picture("a.png"), text("What?")]), a("Red."), u([picture("b.jpg"), text("And?")]), a("Blue.")]
    data = data_of(folder, [{"messages": talk}], tokenizers["qwen3_5"])
    assert [[os.path.basename(image[0]) for image in row["images"]] for row in data.train] == [
        ["a.png"], ["a.png", "b.jpg"]]
    soft = tokenizers["qwen3_5"].convert_tokens_to_ids("<|image_pad|>")
    first, second = (row["input_ids"].count(soft) for row in data.train)
    assert 0 < first < second


@pytest.mark.parametrize("column", ["images", "image"])
@pytest.mark.parametrize("given", ["string", "messages", "system first"])
def test_images_without_a_place_go_where_trl_puts_them(shapes, tokenizers, folder, column, given):
    from trl.data_utils import prepare_multimodal_messages

    turns = [u("What is it?")] if given != "system first" else [
        {"role": "system", "content": "Be brief."}, u("What is it?"), a("A plum."), u("Sure?")]
    files = ["b.jpg", "a.png"] if column == "images" else ["b.jpg"]
    row = {"prompt": "What is it?" if given == "string" else turns, column: files if column == "images" else files[0]}
    ours = data_of(folder, [row], tokenizers["gemma3"], "ppo").train[0]["prompt_ids"]
    theirs = prepare_multimodal_messages(turns, images=files)
    assert ours == by_processor(shapes, "gemma3", folder, theirs, add_generation_prompt=True)


def sources(folder) -> dict[str, object]:
    data = (folder / "b.jpg").read_bytes()
    url = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    return {"a path": "b.jpg", "an absolute path": str(folder / "b.jpg"), "file://": f"file://{folder}/b.jpg",
            "a data URL": url, "a struct with a path": {"bytes": None, "path": "b.jpg"},
            "OpenAI's": {"type": "image_url", "image_url": {"url": url}}}


@pytest.mark.parametrize("kind", ["a path", "an absolute path", "file://", "a data URL", "a struct with a path",
                                  "OpenAI's", "parquet", "a part of parquet", "a list of parquet"])
def test_an_image_is_read_from_wherever_it_is(tokenizers, folder, kind):
    import datasets

    expected = data_of(folder, [{"prompt": "What?", "image": "b.jpg"}], tokenizers["gemma3"], "ppo").train[0]
    if kind in sources(folder):
        row = data_of(folder, [{"prompt": "What?", "images": [sources(folder)[kind]]}], tokenizers["gemma3"],
                      "ppo").train[0]
    else:
        stored, features = {"bytes": (folder / "b.jpg").read_bytes(), "path": "of/another/machine.jpg"}, {}
        if kind == "a part of parquet":
            rows = {"prompt": [[u([{"type": "image", "text": None, "image": stored},
                                   {"type": "text", "text": "What?", "image": None}])]]}
            features["prompt"] = datasets.List({"role": datasets.Value("string"), "content": datasets.List(
                {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()})})
        else:
            is_list = kind.startswith("a list")
            rows = {"prompt": ["What?"], "scan": [[stored] if is_list else stored]}
            features |= {"prompt": datasets.Value("string"),
                         "scan": datasets.List(datasets.Image()) if is_list else datasets.Image()}
        table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
        table.to_parquet(str(folder / "rows.parquet"))
        source = {"path": str(folder / "rows.parquet")} | ({"columns": {"images": "scan"}} if "scan" in rows else {})
        row = build(DataConfig([source], eval_fraction=0.0), READS["ppo"], tokenizers["gemma3"], 0).train[0]
    assert row["prompt_ids"] == expected["prompt_ids"]
    path, width, height = row["images"][0]
    assert (width, height) == (300, 200) and Path(path).read_bytes() == (folder / "b.jpg").read_bytes()
    assert len(json.dumps(row)) < 2000  # no bytes in its columns


def test_images_in_memory_are_rows_of_the_python_interface(tokenizers, folder):
    import datasets

    from hybrid_rlhf.api_inputs import rows_of

    shown = Image.open(folder / "a.png")
    table = datasets.Dataset.from_dict({"prompt": ["?"], "image": [str(folder / "b.jpg")]}).cast_column(
        "image", datasets.Image())
    for data, size in (([{"prompt": "?", "image": shown}], (64, 48)), (table, (300, 200)),
                       ([{"prompt": "?", "images": [(folder / "b.jpg").read_bytes()]}], (300, 200)),
                       ([{"prompt": [u([picture(shown), text("?")])]}], (64, 48))):
        (folder / "rows.jsonl").write_text(rows_of(data).text)
        built = build(DataConfig([str(folder / "rows.jsonl")], eval_fraction=0.0), READS["ppo"], tokenizers["gemma3"],
                      0)
        (path, *known), = built.train[0]["images"]
        assert tuple(known) == size == Image.open(path).size
    with pytest.raises(UserError, match="holds a object; give text, numbers, images, lists and mappings"):
        rows_of([{"prompt": object()}])


def prepared_files(folder) -> None:
    """Images of every kind that a folder may hold."""
    whole = (folder / "b.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "notes.png").write_text("not an image")
    (folder / "empty.png").write_bytes(b"")
    noise(20, 10).convert("CMYK").save(folder / "cmyk.jpg")
    noise(20, 10).convert("L").save(folder / "grey.png")
    noise(20, 10).convert("P").save(folder / "moving.gif", save_all=True, append_images=[Image.new("P", (20, 10))])
    noise(20, 10).save(folder / "lying.jpg", exif=exif_of(6))  # turned by 90 degrees
    file = io.BytesIO()
    noise(8, 8).save(file, "PNG")
    header = bytearray(file.getvalue())
    header[16:24] = (20_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    (folder / "bomb.png").write_bytes(header)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize(("images", "content", "reason"), [
    (["gone.png"], "?", "an image whose file is missing"),
    (["."], "?", "an image whose file is missing"),
    (["cut.jpg"], "?", "an image that cannot be read (image file is truncated)"),
    (["notes.png"], "?", "an image that cannot be read (Pillow knows no such image)"),
    (["empty.png"], "?", "an image that cannot be read (Pillow knows no such image)"),
    (["bomb.png"], "?", "an image that has more than 100,000,000 pixels"),
    (["a.png"], [HERE, HERE, text("?")], "another number of images than places for them"),
    (["a.png", "a.png"], [HERE, text("?")], "another number of images than places for them"),
    ([], [HERE, text("?")], "another number of images than places for them"),
    (["a.png"], "<image> <image>", "another number of images than places for them"),
    (["data:image/png;base64,a"], "?", "an image that is neither a path nor a data URL nor bytes"),
    ([7], "?", "an image that is neither a path nor a data URL nor bytes"),
    (["https://example.org/a.png"], "?", "an image behind a URL (data.allow_image_urls true fetches it)"),
])
def test_an_image_that_cannot_be_used_drops_its_row_with_a_reason(tokenizers, folder, images, content, reason):
    prepared_files(folder)
    rows = [{"messages": [u("Plain"), a("Yes.")]}, {"messages": [u(content), a("Yes.")], "images": images}]
    data = data_of(folder, rows, tokenizers["gemma3"])
    assert data.report["dropped"] == {reason: 1} and len(data.train) == 1
    assert data.report["dropped_first"] == {reason: ["rows.jsonl row 2"]}


@pytest.mark.parametrize(("file", "size"), [
    ("cmyk.jpg", (20, 10)), ("grey.png", (20, 10)), ("moving.gif", (20, 10)), ("lying.jpg", (10, 20))])
def test_an_unusual_image_is_read(tokenizers, folder, file, size):
    prepared_files(folder)
    data = data_of(folder, [{"prompt": "?", "image": file}], tokenizers["gemma3"], "ppo")
    assert tuple(data.train[0]["images"][0][1:]) == size


@pytest.mark.parametrize(("row", "reason"), [
    ({"messages": [u("?"), {"role": "assistant", "content": [picture("a.png"), text("This.")]}]},
     "an image in an answer"),
    ({"prompt": "?", "completion": [{"role": "assistant", "content": [HERE]}], "image": "a.png"},
     "an image in an answer"),
    ({"text": "Plain text.", "image": "a.png"}, "images beside text without a user's turn"),
    ({"messages": [a("Yes.")], "image": "a.png"}, "images beside text without a user's turn"),
    ({"messages": [u("?"), a("Yes.")], "image": "a.png", "videos": ["a.mp4"]},
     "a row with images, video or audio (only text is read)"),
    ({"messages": [u([{"type": "video", "video": "a.mp4"}]), a("Yes.")]}, "a message with parts that are not text"),
])
def test_an_image_in_a_place_that_no_model_has_drops_its_row(tokenizers, folder, row, reason):
    rows = [{name: "Plain" if isinstance(row[name], str) else [u("Plain"), a("Yes.")] for name in row
             if name in ("text", "messages", "prompt", "completion")}, row]
    if "completion" in row:
        rows[0]["completion"] = "Yes."
    assert data_of(folder, rows, tokenizers["gemma3"]).report["dropped"] == {reason: 1}


def test_a_prompt_kept_as_text_has_no_place_for_images(tokenizers, folder):
    rows = [{"prompt": "?", "completion": " yes"}, {"prompt": "?", "completion": " yes", "image": "a.png"}]
    data = data_of(folder, rows, tokenizers["gemma3"], raw=True)
    assert data.report["dropped"] == {"images beside text without a user's turn": 1}


def test_a_model_without_a_reader_drops_rows_with_images(folder):
    rows = [{"messages": [u("red"), a("blue")]}, {"messages": [u([HERE, text("red")]), a("blue")], "images": ["a.png"]},
            {"messages": [u("red"), a("blue")], "image": "a.png"}]
    data = data_of(folder, rows, chatml_tokenizer())
    assert data.report["dropped"] == {
        "a row with images, of which the model's folder has no processor (only text is read)": 2}


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_user_spells_like_an_image_is_characters(tokenizers, folder, name):
    reader = load_reader(tokenizers[name].name_or_path)
    spelled = [u([HERE, text(f"{reader.placeholder} \ufdd1 <image> {reader.placeholder}")])]
    row = data_of(folder, [{"prompt": spelled, "image": "b.jpg"}], tokenizers[name], "ppo").train[0]
    alone = data_of(folder, [{"prompt": [u([HERE, text("?")])], "image": "b.jpg"}], tokenizers[name], "ppo").train[0]
    ids = tokenizers[name].convert_tokens_to_ids([reader.placeholder]) + list(reader.token_ids)
    assert sum(map(row["prompt_ids"].count, ids)) == sum(map(alone["prompt_ids"].count, ids)) > 0


def test_a_literal_mark_is_no_image(tokenizers, folder):
    talk = {"messages": [u("\ufdd1 What?"), a("Yes.")]}
    rows = [talk, talk | {"image": "a.png"}]
    data = data_of(folder, rows, tokenizers["gemma3"])
    assert len(data.train) == 2 and "images" not in data.train[0] and len(data.train[1]["images"]) == 1


def test_images_cut_off_by_the_length_drop_the_row_and_a_cut_answer_does_not(tokenizers, folder):
    talk = [u([picture("a.png"), text("?")]), a("Yes."), u([picture("b.jpg"), text("?")]), a("No " * 30)]
    row = data_of(folder, [{"messages": talk}], tokenizers["gemma3"]).train[0]
    whole, first = len(row["input_ids"]), row["loss_mask"].index(True) + 3
    data = data_of(folder, [{"messages": talk}], tokenizers["gemma3"], max_length=whole - 10)
    assert len(data.train[0]["images"]) == 2 and data.report["truncated"] == 1
    plain = {"messages": [u("?"), a("Yes.")]}
    data = data_of(folder, [plain, {"messages": talk}], tokenizers["gemma3"], max_length=first + 8)
    assert data.report["dropped"] == {"images cut off by data.max_length": 1}


def test_a_prompt_whose_image_has_too_many_tokens_is_dropped_and_its_length_told(tokenizers, folder):
    with pytest.raises(UserError, match=r"raise data.max_prompt_length, which is 256: of the first 1 rows"):
        data_of(folder, [{"prompt": "?", "image": "a.png"}], tokenizers["qwen3_vl"], "ppo", max_prompt_length=256)


def test_large_images_are_scaled_down_and_counted(tokenizers, folder):
    noise(2000, 1000).save(folder / "large.png")
    rows = [{"prompt": "?", "images": [file]} for file in ("large.png", "b.jpg")]
    data = data_of(folder, rows, tokenizers["gemma3"], "ppo")
    assert data.train[0]["images"][0][1:] == [1448, 724] and data.train[1]["images"][0][1:] == [300, 200]
    assert "data: 1 images scaled down to data.max_pixels; 2 rows with images" in summary(data.report)
    small = data_of(folder, rows, tokenizers["gemma3"], "ppo", max_pixels=20_000)
    assert small.train[0]["images"][0][1:] == [200, 100] and small.train[1]["images"][0][1:] == [173, 115]


def test_pairs_labels_and_prompts_carry_the_images_of_the_prompt(tokenizers, folder):
    asked = [u([HERE, text("What?")])]
    pair = data_of(folder, [{"prompt": asked, "chosen": "A plum.", "rejected": "No.", "image": "a.png"},
                            {"prompt": "Plain", "chosen": "Yes.", "rejected": "No."}], tokenizers["gemma3"], "reward")
    first, none = (ImageRef(str(folder / "a.png"), 64, 48),), ()
    rows = [pair.train[i] for i in range(2)]
    batch = collate.collate_pairs(rows, 0).sequences
    assert batch.images == [first, none, first, none] and len(batch) == 4
    assert collate.collate_pairs(rows[1:], 0).sequences.images is None
    whole = [*asked, a("A plum.")]
    implicit = data_of(folder, [{"chosen": whole, "rejected": [*asked, a("No.")], "image": "a.png"}],
                       tokenizers["gemma3"], "reward").train[0]
    assert implicit["chosen_ids"] == rows[0]["chosen_ids"] and implicit["images"] == rows[0]["images"]

    labelled = data_of(folder, [{"prompt": "What?", "completion": "A.", "label": True, "image": "a.png"},
                                {"prompt": "What?", "completion": "B.", "label": False, "image": "b.jpg"}],
                       tokenizers["gemma3"], "kto")
    kto = collate.collate_labelled([labelled.train[i] for i in range(2)], 0, 8000)
    second = (ImageRef(str(folder / "b.jpg"), 300, 200),)
    assert kto.sequences.images == kto.mismatched.images == [first, second]  # one text, and two prompts
    assert not kto.mismatched.input_ids.equal(kto.sequences.input_ids)


def test_a_batch_with_images_is_not_packed_and_the_run_says_so(tokenizers, folder):
    rows = [{"messages": [u("What?"), a("Yes.")]}] * 2 + [{"messages": [u("What?"), a("Yes.")], "image": "a.png"}]
    data = data_of(folder, rows, tokenizers["gemma3"], packing=True)
    assert "data: data.packing is off, since rows with images are not packed" in summary(data.report)
    assert not any("packing" in line for line in summary(data_of(folder, rows[:2], tokenizers["gemma3"],
                                                                 packing=True).report))
    table = [data.train[i] for i in range(3)]
    batch = collate.collate_sft(table, 0, 8000)
    assert batch.input_ids.shape[0] == 3 and batch.position_ids is None and batch.images[:2] == [(), ()]
    assert collate.collate_sft(table[:2], 0, 8000).input_ids.shape[0] == 1


def test_a_prompt_for_reward_functions_has_images_and_no_tokens_of_them(tokenizers, folder):
    url = sources(folder)["a data URL"]
    rows = [{"prompt": [u([picture(url), text("What?")])], "answer": "plum", "images": []},
            {"prompt": "Plain", "answer": "pear", "images": []}]
    data = data_of(folder, rows, tokenizers["qwen3_vl"], "ppo")
    prompts = collate.collate_prompts([data.train[i] for i in range(2)])
    assert prompts.texts[0] == ("<|im_start|>user\n<|vision_start|>[image]<|vision_end|>What?<|im_end|>\n"
                                "<|im_start|>assistant\n")
    assert [len(images) for images in prompts.images] == [1, 0] == [len(i) for i in prompts.columns["images"]]
    assert prompts.columns["answer"] == ["plum", "pear"] and "base64" not in json.dumps(prompts.columns)
    assert chat.compose_prompt(tokenizers["qwen3_vl"], prompts.columns["prompt"][0]).images == prompts.images[0]


def test_a_preview_shows_the_size_of_an_image_and_the_number_of_its_tokens(tokenizers, folder):
    talk = [u([picture("a.png"), picture("b.jpg"), text("What?")]), a("A plum.")]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": talk}))
    for name, count in (("qwen3_vl", None), ("gemma3", 4)):
        shown = look(DataConfig([str(folder / "rows.jsonl")], eval_fraction=0.0, max_length=8000), READS["sft"],
                     tokenizers[name])
        line = str(marked(shown.rows[0].pieces, brackets=True))
        reader = load_reader(tokenizers[name].name_or_path)
        counts = [count or reader.read(ImageRef(str(folder / file), *size)).text.count("<|image_pad|>")
                  for file, size in (("a.png", (64, 48)), ("b.jpg", (300, 200)))]
        assert f"[image 64x48, {counts[0]} tokens]" in line and f"[image 300x200, {counts[1]} tokens]" in line
        assert "pad|>" not in line and "soft_token" not in line and len(line) < 400 and "⟦A plum." in line


def test_rows_are_dealt_by_text_and_image_and_not_by_the_machines_paths(folder):
    def key(image: object) -> str:
        row = {"prompt": "What?", "image": image}
        return split_key(read_row(row, format_of([row], "rows"), "row"))

    assert key("/here/a.png") == key("/there/a.png") != key("/there/b.png")
    assert key({"bytes": b"x", "path": "/here"}) == key({"bytes": b"x", "path": "/there"}) != key({"bytes": b"y"})


@pytest.mark.parametrize("column", ["image", "Image"])
def test_another_image_or_a_file_that_is_there_again_is_another_cached_table(tokenizers, folder, column):
    rows = [{"prompt": "?", column: file} for file in ("b.jpg", "late.png")]
    data = data_of(folder, rows, tokenizers["gemma3"], "ppo")
    assert data.report["dropped"] == {"an image whose file is missing": 1}
    noise(30, 20).save(folder / "late.png")
    noise(100, 100).save(folder / "b.jpg")
    data = data_of(folder, rows, tokenizers["gemma3"], "ppo")
    assert [data.train[i]["images"][0][1:] for i in range(2)] == [[100, 100], [30, 20]]


@pytest.mark.parametrize("column", ["messages", "images"])
def test_a_changed_file_that_a_column_of_json_text_names_is_another_cached_table(tokenizers, folder, column):
    part = picture("a.png") if column == "messages" else HERE
    row = {"messages": json.dumps([u([part, text("?")]), a("Yes.")])}
    row |= {"images": json.dumps(["a.png"])} if column == "images" else {}
    for size in ((64, 48), (30, 20)):
        noise(*size).save(folder / "a.png")
        assert data_of(folder, [row], tokenizers["qwen3_vl"]).train[0]["images"][0][1:] == list(size)


def test_urls_are_fetched_only_where_it_is_allowed_and_within_bounds(tokenizers, folder, monkeypatch):
    import threading
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    from hybrid_rlhf.data import row_images

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_rest: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        rows = [{"prompt": "?", "image": f"{base}/{file}"} for file in ("b.jpg", "gone.jpg")]
        data = data_of(folder, rows, tokenizers["gemma3"], "ppo", allow_image_urls=True)
        assert data.train[0]["images"][0][1:] == [300, 200]
        assert data.report["dropped"] == {"an image whose URL gives none": 1}
        noise(30, 20).save(folder / "gone.jpg")  # a failure is not remembered
        assert len(data_of(folder, rows, tokenizers["gemma3"], "ppo", allow_image_urls=True).train) == 2
        monkeypatch.setattr(row_images, "MAX_URL_BYTES", 1000)
        with pytest.raises(UserError, match="an image of more than 1,000 bytes behind a URL"):
            data_of(folder, [{"prompt": "!", "image": f"{base}/b.jpg"}], tokenizers["gemma3"], "ppo",
                    allow_image_urls=True)
    finally:
        server.shutdown()
        server.server_close()


FUNCTION = """
def sizes(prompts, completions, images, **rest):
    assert all(part["type"] in ("image", "text") for part in prompts[0][0]["content"]), prompts
    return [float(sum(image.width for image in of_prompt)) for of_prompt in images]
"""


@pytest.mark.parametrize("isolate", [False, True])
def test_a_reward_function_gets_parts_and_the_images_of_each_prompt(tokenizers, folder, isolate):
    from hybrid_rlhf.rewards.functions import open_functions
    from hybrid_rlhf.rollout import Rollout

    data = data_of(folder, [{"prompt": "What?", "images": ["a.png", "b.jpg"]}], tokenizers["gemma3"], "ppo")
    prompts = collate.collate_prompts([data.train[0]])
    (folder / "sizes.py").write_text(FUNCTION)
    source, = open_functions([f"{folder}/sizes.py:sizes"], {}, 60.0, isolate=isolate)
    rollout = Rollout.from_responses(prompts, [[5, 6]], [True], 0, ["A plum."])
    assert list(source.score(rollout)) == [364.0]
