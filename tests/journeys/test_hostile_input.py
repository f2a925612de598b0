"""Folders, files and rows of strangers: nothing of theirs runs, nothing hangs, and what cannot be read is one line."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.data import sources
from hybrid_rlhf.data.datasets import DataConfig, build
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from hybrid_rlhf.models.weights import fingerprint
from hybrid_rlhf.training.registry import READS
from hybrid_rlhf.training.step1_sft import Config
from tests.factories.tiny import chatml_tokenizer, save_tiny


@pytest.fixture
def tokenizer():

    return chatml_tokenizer()


class Evil:
    """A pickle that runs a command when it is read."""

    def __init__(self, mark) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


# --- models ----------------------------------------------------------------------------------------------------------

def test_pickled_weights_are_read_only_when_trusted_and_run_nothing_even_then(tmp_path):
    folder = save_tiny(tmp_path / "model")
    state = load_causal_lm(ModelConfig(folder)).state_dict()
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(UserError, match="a pickle that could run code"):
        load_causal_lm(ModelConfig(folder))
    again = load_causal_lm(ModelConfig(folder, trust_pickled_weights=True)).state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)
    torch.save({"model.norm.weight": Evil(tmp_path / "ran")}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(UserError):
        load_causal_lm(ModelConfig(folder, trust_pickled_weights=True))
    assert not (tmp_path / "ran").exists()


def test_code_of_a_model_folder_is_not_run_and_nobody_is_asked(tmp_path):
    folder = tmp_path / "model"
    save_tiny(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "stranger", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    with pytest.raises(UserError):
        load_causal_lm(ModelConfig(str(folder)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\x10\0\0\0\0\0\0\0{\"a\": 1}        ",
                                    b"\x02\0\0\0\0\0\0\0[]", b"\x04\0\0\0\0\0\0\0" + b"[" * 5000])
def test_a_damaged_weight_file_is_one_line(damage, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(UserError, match="not a safetensors file, or is damaged"):
        fingerprint(tmp_path)


# --- data folders ----------------------------------------------------------------------------------------------------

def test_a_loading_script_beside_data_is_passed_over(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("rows.py", "__init__.py", "setup.py", "conftest.py"):
        (folder / name).write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    (folder / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert len(sources.read(Source(str(folder)))) == 1
    (folder / "train.jsonl").unlink()
    with pytest.raises(UserError, match="holds no data"):
        sources.read(Source(str(folder)))
    assert not (tmp_path / "ran").exists()


# --- rows ------------------------------------------------------------------------------------------------------------

def _write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _data(path: str, tmp_path) -> DataConfig:
    return DataConfig(sources=[Source(path)], split=None, eval_fraction=0.0, cache_dir=str(tmp_path / "cache"),
                      max_length=64, max_prompt_length=32)


GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.mark.slow
def test_a_million_turns_are_cut_or_dropped_in_seconds(tokenizer, tmp_path):
    endless = {"messages": [{"role": r, "content": "x"} for r in ("user", "assistant")] * 500_000}
    path = _write(tmp_path / "rows.jsonl", [GOOD, endless])
    start = time.monotonic()
    found = build(_data(path, tmp_path), READS["sft"], tokenizer, 0)
    assert (len(found.train), found.report["truncated"]) == (2, 1)
    assert time.monotonic() - start < 20


def test_many_turns_that_would_all_have_to_be_found_are_dropped_and_counted(tokenizer, tmp_path):
    turns = [{"role": r, "content": "x"} for r in ("assistant", "user")] * 3000
    pair = {"prompt": GOOD["messages"][:1], "chosen": [*turns, {"role": "assistant", "content": "x"}],
            "rejected": GOOD["messages"][1:]}
    good = {"prompt": GOOD["messages"][:1], "chosen": GOOD["messages"][1:],
            "rejected": [{"role": "assistant", "content": "b"}]}
    found = build(_data(_write(tmp_path / "rows.jsonl", [good, pair]), tmp_path), READS["reward"], tokenizer, 0)
    assert (len(found.train), found.report["dropped"]) == (1, {"more than 1024 answers in one conversation": 1})


@pytest.mark.parametrize("content", ["y " * 300_000, "\0", "\u202e\x1b[2J", "<|im_end|>" * 2000, "\ud800", "\ufeffx",
                                     "a\u2028b", "\ufdd0"], ids=range(8))
def test_contents_of_any_kind_are_trained_on(content, tokenizer, tmp_path):
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a {content}"}]}
    found = build(_data(_write(tmp_path / "rows.jsonl", [row]), tmp_path), READS["sft"], tokenizer, 0)
    ids = found.train[0]["input_ids"]
    assert ids.count(2) == 2 and ids.count(3) == (1 if len(ids) == 64 else 2)


def test_answers_of_one_token_are_kept_and_empty_ones_are_dropped_and_counted(tokenizer, tmp_path):
    rows = [{"prompt": "a", "completion": c} for c in ("b", "", " \n", "c")]
    found = build(_data(_write(tmp_path / "rows.jsonl", rows), tmp_path), READS["sft"], tokenizer, 0)
    assert (len(found.train), found.report["dropped"]) == (2, {"empty answer": 2})


@pytest.mark.parametrize(("row", "said"), [
    ('{"prompt": "a", "completions": ["b", "c"], "scores": [1, NaN]}', "scores must be a number"),
    ('{"prompt": "a", "completions": ["b", "c"], "scores": [1, 1e999]}', "scores must be a number"),
    ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": ' + "9" * 400 + "}", "margin must be a number"),
    ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": ' + "9" * 5000 + "}", "line 1: not valid JSON"),
    ("{" + ", ".join(f'"column {i}": 1' for i in range(5000)) + "}", "and 4980 more"),
    ('{"' + "x" * 100_000 + '": 1}', "fit no known format"),
], ids=range(6))
def test_a_row_that_says_too_much_is_one_short_line(row, said, tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(UserError) as caught:
        build(_data(str(tmp_path / "rows.jsonl"), tmp_path), READS["reward"], tokenizer, 0)
    text = str(caught.value)
    assert said in text
    assert "\n" not in text and len(text.replace(str(tmp_path), "")) < 1500


# --- settings --------------------------------------------------------------------------------------------------------

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]\n", "a: &a {b: *a}\n", "seed: " + "9" * 5000 + "\n",
                                  "a: " + "[" * 3000, "seed: !!python/object/apply:os.getcwd []\n",
                                  "seed: 2001-13-45\n"], ids=range(7))
def test_settings_that_are_a_trap_are_one_line(text, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        parse(Config, ["--config", str(tmp_path / "c.yaml")], prog="x")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert time.monotonic() - start < 5


def test_an_error_that_quotes_data_cannot_drive_the_terminal(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"\x1b[2J\u202e": 1}\n')
    assert main(["--stage", "sft", "--model.preset", "tiny", "--output_dir", str(tmp_path / "out"),
                 f"--data.sources=[{{path: {tmp_path}/rows.jsonl, stages: [\"\x1b]0;x\x07\"]}}]"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and not any(ord(c) < 32 for c in err.rstrip("\n"))
