"""A model that learns from marks in a chat: what a mark changes, what undo restores, and what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.inference.named_models import model_folder
from hybrid_rlhf.inference.teaching import Mark
from hybrid_rlhf.run import runfile
from hybrid_rlhf.training import live
from hybrid_rlhf.training.live import LiveLearner
from tests.factories.tiny import own_cache, save_tiny

ROOT = Path(__file__).resolve().parents[2]


def asked(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


TEXT = Mark("text", asked("Which animal?"), "a little red fox", "the sun")
PAIR = Mark("pair", asked("What is it?"), "cat", "wood sun sun")
GOOD = Mark("thumb", asked("one 1"), "answer 1")
BAD = Mark("thumb", asked("Who lived there?"), "system 0 0 0", is_good=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    save_tiny(folder / "base")
    save_tiny(folder / "other", seed=1)
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def bits(learner: LiveLearner) -> dict[str, bytes]:
    """Every tensor that the next step depends on."""
    from hybrid_rlhf.run.checkpoint import split

    tensors: dict[str, torch.Tensor] = {}
    rest = split(learner.engine.training.shard(), "", tensors)
    names = {name: tensor.clone().contiguous().view(torch.uint8).numpy().tobytes()
             for name, tensor in tensors.items() if tensor.dim()}
    return names | {"rest": json.dumps(rest).encode()} | {n: t.numpy().tobytes() for n, t in tensors.items()
                                                         if not t.dim()}


def chosen_logprob(folder: Path, prompt: str, answer: str) -> float:
    """By plain transformers: the log-probability of an answer and its end."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    start = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(f"{start}{answer}<|im_end|>", return_tensors="pt", add_special_tokens=False)["input_ids"]
    first = len(tokenizer(start, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logprobs = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    return float(logprobs[first - 1:].sum())


def test_each_kind_of_mark_moves_the_model_as_it_asks_and_earlier_marks_hold(place):
    learner = LiveLearner(f"{place}/base", f"{place}/kinds")
    folders, changes = [place / "base"], []
    for number, (mark, sign) in enumerate(((TEXT, 1), (PAIR, 1), (GOOD, 1), (BAD, -1))):
        changes.append(learner.learn(mark))
        folders.append(place / f"after{number}")
        learner.save().rename(folders[-1])
        was, now = (chosen_logprob(folder, mark.prompt[0]["content"], mark.answer) for folder in folders[-2:])
        assert sign * (now - was) > 0 and sign * (changes[-1].after - changes[-1].before) > 0
    assert [(c.num_others, c.num_looked, c.num_held) for c in changes] == [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 2, 2)]
    learner.close()


def test_undo_restores_weights_and_optimizer_to_the_bit_and_the_next_mark_repeats(place):
    learner = LiveLearner(f"{place}/base", f"{place}/undone")
    states = [bits(learner)]
    for mark in (TEXT, PAIR, GOOD):
        change = learner.learn(mark)
        states.append(bits(learner))
    assert len({state["rest"] for state in states}) == 4 and states[1] != states[2]
    assert learner.undo() == GOOD
    assert bits(learner) == states[2]
    assert learner.learn(GOOD)[:8] == change[:8]  # all but the seconds
    assert bits(learner) == states[3]
    for left in (2, 1, 0):
        learner.undo()
        assert bits(learner) == states[left]
    with pytest.raises(UserError, match="no mark to take back"):
        learner.undo()
    learner.close()


def test_a_chat_goes_on_with_the_same_bits_and_undoes_marks_of_the_last_one(place):
    learner = LiveLearner(f"{place}/base", f"{place}/again")
    learner.learn(TEXT)
    first = bits(learner)
    learner.learn(PAIR)
    second = bits(learner)
    learner.close()
    learner = LiveLearner(f"{place}/base", f"{place}/again")
    assert learner.marks == [TEXT, PAIR] and bits(learner) == second
    learner.undo()
    assert bits(learner) == first
    learner.close()


def test_a_chat_that_goes_on_reads_its_marks_under_the_variables_of_the_template(place):
    """As the chat sets them: when the learner is there. The marks are then encoded as in one session."""
    from hybrid_rlhf.models.template_kwargs import set_defaults

    folder = place / "variable"
    shutil.copytree(place / "base", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{%- if quiet -%}{{- 'sun ' -}}{%- endif -%}" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)

    def opened(name: str) -> LiveLearner:
        learner = LiveLearner(str(folder), f"{place}/{name}")
        set_defaults(learner.tokenizer, {"quiet": True}, "--chat_template_kwargs")
        return learner

    one, two = opened("one-session"), opened("two-sessions")
    for learner in (one, two):
        learner.learn(TEXT)
    two.close()
    two = opened("two-sessions")
    assert [learner.learn(PAIR).num_held for learner in (one, two)] == [1, 1]
    assert bits(one) == bits(two)
    one.close()
    two.close()


def test_undo_over_a_damaged_checkpoint_changes_nothing_here_or_on_the_disk(place):
    learner = LiveLearner(f"{place}/base", f"{place}/damaged")
    learner.learn(TEXT)
    learner.learn(PAIR)
    before, folder = bits(learner), place / "damaged/checkpoints"
    (folder / "step-00000001/state.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot be taken back: .*step-00000001 is damaged"):
        learner.undo()
    learner.close()
    learner = LiveLearner(f"{place}/base", f"{place}/damaged")
    assert learner.marks == [TEXT, PAIR] and bits(learner) == before
    learner.close()


def test_the_rows_are_those_of_the_stages_and_undo_takes_them_back(place):
    learner = LiveLearner(f"{place}/base", f"{place}/rows")
    for mark in (TEXT, PAIR, GOOD):
        learner.learn(mark)

    def rows(kind: str) -> list[dict]:
        return [json.loads(line) for line in (place / f"rows/marks/{kind}.jsonl").read_text().splitlines()]

    fox, sun = ([{"role": "assistant", "content": text}] for text in ("a little red fox", "the sun"))
    assert rows("texts") == [{"prompt": TEXT.prompt, "completion": fox}]
    assert rows("pairs")[0] == {"prompt": TEXT.prompt, "chosen": fox, "rejected": sun, "how": "edited"}
    assert [row["how"] for row in rows("pairs")] == ["edited", "compared"]
    assert rows("thumbs") == [{"prompt": GOOD.prompt, "label": True,
                               "completion": [{"role": "assistant", "content": "answer 1"}]}]
    learner.undo()
    assert rows("thumbs") == [] and len(rows("pairs")) == 2
    learner.close()


def test_save_leaves_a_finished_run_that_a_stage_starts_from(place):
    from hybrid_rlhf.cli import main

    learner = LiveLearner(f"{place}/base", f"{place}/saved")
    learner.learn(TEXT)
    learner.save()
    run = runfile.read_run(place / "saved")
    assert (run.status, run.stage, run.facts["base_model"]) == ("finished", "chat", f"{place}/base")
    for name in ("model/README.md", "adapter/adapter_model.safetensors", "report.html", "report.md", "metrics.jsonl"):
        assert (place / "saved" / name).exists()
    assert "Which animal?" in (place / "saved/report.md").read_text()
    learner.learn(PAIR)
    learner.close()
    assert runfile.read_run(place / "saved").left_early
    assert main(["--stage", "sft", "--model.model_name_or_path", f"{place}/saved", "--output_dir", f"{place}/onward",
                 f"--data.sources=[{{path: {place}/saved/marks/texts.jsonl}}]", "--data.eval_fraction", "0",
                 "--train.max_steps", "1", "--model.dtype", "float32", "--data.max_length", "96"]) == 0
    assert main(["export", "--model", f"{place}/saved/checkpoints/step-00000001", "--output_dir",
                 f"{place}/exported"]) == 0
    for name in ("saved/model", "exported"):
        assert chosen_logprob(place / name, "Which animal?", TEXT.answer) > chosen_logprob(
            place / "base", "Which animal?", TEXT.answer)


def test_a_run_that_was_not_saved_says_how_it_leaves_a_model_wherever_it_is_used(place, capsys):
    from hybrid_rlhf.cli import main

    taught = f"{place}/unsaved"
    learner = LiveLearner(f"{place}/base", taught)
    learner.learn(GOOD)
    learner.close()
    cure = f"hybrid-rlhf chat --model {place}/base --learn {taught}, then /save"
    assert f"marks kept in {taught}: 1; there is no model yet: {cure}\n" in capsys.readouterr().err
    for words in (["chat", "--model", taught], ["export", "--model", taught, "--output_dir", f"{place}/none"],
                  ["--stage", "dpo", "--model.model_name_or_path", taught, "--output_dir", f"{place}/none",
                   "--data.sources", f"{taught}/marks/thumbs.jsonl"]):
        assert main(words) == 2
        assert f"not finished (stopped); {cure}\n" in capsys.readouterr().err
    assert main(["export", "--model", f"{taught}/checkpoints/step-00000001", "--output_dir", f"{place}/thumbs"]) == 0
    learner = LiveLearner(f"{place}/base", taught)
    learner.save().rename(place / "saved-thumb")
    learner.close()
    weights = [load_file(f"{place}/{name}/model.safetensors") for name in ("thumbs", "saved-thumb")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_marks_learnt_or_taken_back_since_the_last_save_are_told(place, capsys):
    taught = f"{place}/renewed"
    for begin, change in (("", "learnt"), ("again", "taken back")):
        learner = LiveLearner(f"{place}/base", taught + begin)
        learner.learn(TEXT)
        learner.learn(GOOD) if begin else None
        learner.save()
        capsys.readouterr()
        learner.undo() if begin else learner.learn(GOOD)
        learner.close()
        of = (f"mark {1 + bool(begin)}, and marks were {change} since: hybrid-rlhf chat --model {place}/base --learn "
              f"{taught}{begin}, then /save, renews it\n")
        assert f"not finished (stopped): its model is that of {of}" in capsys.readouterr().err
        assert model_folder(taught + begin).name == "model"
        assert f"not finished (stopped); the model there is of {of}" in capsys.readouterr().err
    learner = LiveLearner(f"{place}/base", f"{taught}again")
    learner.undo()
    learner.close()
    assert "then a mark and /save, renews it" in capsys.readouterr().err


def test_a_session_without_a_mark_leaves_no_run_and_what_else_is_there_stays(place, capsys):
    for name in ("idle", "undone"):
        learner = LiveLearner(f"{place}/base", f"{place}/{name}")
        if name == "undone":
            learner.learn(GOOD)
            learner.undo()
            (place / "undone/talk.jsonl").write_text("mine")
        learner.close()
    assert not (place / "idle").exists() and "kept in" not in capsys.readouterr().err
    assert [path.name for path in (place / "undone").iterdir()] == ["talk.jsonl"]


def test_an_answer_that_was_cut_is_learnt_without_an_end(place):
    learner = LiveLearner(f"{place}/base", f"{place}/cut")
    learner.learn(Mark("pair", asked("What is it?"), "cat", "wood sun sun", is_other_cut=True))
    learner.learn(Mark("thumb", asked("What is it?"), "wood sun", is_cut=True))
    start = "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    (pair, thumb), encode = learner._encoded, partial(learner.tokenizer, add_special_tokens=False)
    for row, text, is_ended in zip(pair.rows + thumb.rows, ("cat", "wood sun sun", "wood sun"), (True, False, False),
                                   strict=True):
        ids, first = encode(f"{start}{text}" + "<|im_end|>" * is_ended)["input_ids"], len(encode(start)["input_ids"])
        assert row["input_ids"][: len(ids)] == ids
        assert [i for i, is_marked in enumerate(row["loss_mask"]) if is_marked] == list(range(first, len(ids)))
        assert is_ended or len(row["input_ids"]) == len(ids)
    learner.close()


def test_bad_input_is_one_line_and_changes_nothing(place, monkeypatch):
    learner = LiveLearner(f"{place}/base", f"{place}/faults")
    learner.learn(PAIR)
    before = bits(learner)
    for mark, words in ((Mark("text", asked("a"), " ", "b"), "empty answer"),
                        (Mark("pair", asked("a"), "b", "b"), "the two answers are the same"),
                        (Mark("thumb", asked("a"), "red fox " * 2000), "tokens long")):
        with pytest.raises(UserError, match=words):
            learner.learn(mark)
    ragged = learner.learn(Mark("text", asked("smile \ud83d"), "half \ud83d e\u0301 \u202e", "no"))
    assert ragged.after > ragged.before and "\ufffd" in learner.marks[-1].answer
    learner.undo()

    def full(*_given, **_named):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(live.checkpoint, "_write_files", full)
        with pytest.raises(UserError, match="No space left"):
            learner.learn(TEXT)
    with monkeypatch.context() as patch:  # the checkpoint is there, and the files that follow from it are not
        patch.setattr(live, "write_file", full)
        with pytest.raises(UserError, match="No space left on device; make room; the mark was not learnt"):
            learner.learn(TEXT)
        with pytest.raises(UserError, match="No space left"):
            learner.save()

    def full_for_figures(path, text):
        return full() if path.name == "metrics.jsonl" else path.write_text(text)

    with monkeypatch.context() as patch:
        patch.setattr(live, "write_file", full_for_figures)
        with pytest.raises(UserError, match="the mark was not learnt"):
            learner.learn(GOOD)
    assert (place / "faults/marks/thumbs.jsonl").read_text() == ""
    assert sorted(path.name for path in (place / "faults/checkpoints").iterdir()) == ["step-00000000", "step-00000001"]
    assert learner.marks == [PAIR] and bits(learner) == before
    with pytest.raises(UserError, match="another process is at this run"):
        other_process(place, "base", "faults")
    learner.close()
    with pytest.raises(UserError, match=r"other weights; give --model .*base"):
        LiveLearner(f"{place}/other", f"{place}/faults")
    config = json.loads((place / "base/config.json").read_text())
    (place / "packed").mkdir()
    for path in (place / "base").iterdir():
        (place / "packed" / path.name).write_bytes(path.read_bytes())
    packed = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (place / "packed/config.json").write_text(json.dumps(packed))
    with pytest.raises(UserError, match=r"gptq.*give the model that they were made from"):
        LiveLearner(f"{place}/packed", f"{place}/new")
    assert not (place / "new").exists()
    (place / "strange").mkdir()
    (place / "strange/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds something else"):
        LiveLearner(f"{place}/base", f"{place}/strange")


def other_process(place: Path, model: str, output: str) -> None:
    done = subprocess.run([sys.executable, "-m", "hybrid_rlhf", "chat", "--model", f"{place}/{model}", "--learn",
                           f"{place}/{output}"], input="", capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 2:
        raise UserError(done.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_kill_between_marks_loses_nothing(place, is_saved):
    output = place / f"killed{is_saved:d}"
    process = subprocess.Popen([sys.executable, "-m", "hybrid_rlhf", "chat", "--model", f"{place}/base", "--learn",
                                str(output), "--max_new_tokens", "4", "--temperature", "0"], stdin=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    process.stdin.write("Which animal?\n= a little red fox\n" + "/save\n" * is_saved + "What is it?\n= cat\n")
    process.stdin.flush()
    end = time.monotonic() + 120
    while not (output / "checkpoints/step-00000002/manifest.json").exists():
        assert process.poll() is None and time.monotonic() < end, process.stderr.read()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    learner = LiveLearner(f"{place}/base", str(output))
    assert [mark.answer for mark in learner.marks] == ["a little red fox", "cat"]
    assert len((output / "marks/texts.jsonl").read_text().splitlines()) == 2
    assert learner.learn(PAIR).num_held == 2
    learner.close()
