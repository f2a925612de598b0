"""Every bad input: exit code 2, one line that says what is wrong, where, and what would fit; nothing written."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.run.runfile import RunRecord
from tests.tiny import save_tiny, tiny_tokenizer

ROOT = Path(__file__).parent.parent
WORDS = ["red", "blue", "green", "cat", "dog", "fox", "sun", "moon", "tree", "book"]


def sources(*names: str) -> str:
    return "--data.sources=[" + ", ".join(f"{{path: '{n}'}}" for n in names) + "]"


# PLACE stands for the folder that `place` fills
MODEL = ["--model.model_name_or_path", "PLACE/good"]
SMALL = ["--data.split", "null", "--data.max_length", "64", "--data.max_prompt_length", "32", "--train.max_steps", "1"]
OUT = ["--output_dir", "PLACE/runs/out"]
DEMOS, PAIRS, PROMPTS = (sources(f"PLACE/{n}.jsonl") for n in ("demos", "pairs", "prompts"))
SFT = ["--stage", "sft", *OUT, *MODEL, DEMOS, *SMALL]
REWARD = ["--stage", "reward", *OUT, *MODEL, PAIRS, *SMALL]
PPO = ["--stage", "ppo", *OUT, *MODEL, PROMPTS, *SMALL, "--roles.reward.model_name_or_path", "PLACE/good",
       "--ppo.sampling.max_new_tokens", "8"]
ALL = ["--stage", "all", *OUT, "--model.preset", "tiny", DEMOS, *SMALL[:6]]


def data(stage: list[str], name: str) -> list[str]:
    """`stage` on PLACE/name instead of its data."""
    return [sources(f"PLACE/{name}") if w.startswith("--data.sources") else w for w in stage]


def model(name: str, stage: list[str] = SFT) -> list[str]:
    return [*stage, "--model.model_name_or_path", f"PLACE/{name}"]


def put(stage: list[str], name: str) -> list[str]:
    """`stage` with its output in PLACE/name."""
    return [*stage, "--output_dir", f"PLACE/{name}"]


# what is wrong, the command line, what the message must hold
BAD = [
    ("unknown flag", [*SFT, "--train.learning_rat", "1"], ["train.learning_rat", "did you mean train.learning_rate?"]),
    ("unknown flag with =", [*SFT, "--data.pakcing=true"], ["data.pakcing", "did you mean data.packing?"]),
    ("unknown flag of no section", [*SFT, "--learning_rate", "1"], ["did you mean train.learning_rate?"]),
    ("flag of another stage", [*SFT, "--ppo.kl_coef", "1"], ["ppo.kl_coef"]),
    ("stray word", [*SFT, "whatever"], ["whatever"]),
    ("unknown stage", ["--stage", "pop"], ["--stage pop", "did you mean ppo?", "sft, reward, ppo, all"]),
    ("no stage", DEMOS.split(), ["--stage is missing", "sft, reward, ppo, all"]),
    ("stage without a value", ["--stage"], ["--stage needs a value", "sft"]),
    ("flag without a value", [*SFT, "--seed"], ["seed"]),
    ("text for an integer", [*SFT, "--train.max_steps", "many"], ["train.max_steps", "int", "many"]),
    ("text for a boolean", [*SFT, "--data.packing", "perhaps"], ["data.packing", "perhaps"]),
    ("text for a float", [*SFT, "--train.learning_rate", "fast"], ["train.learning_rate", "float", "fast"]),
    ("fraction for an integer", [*SFT, "--train.max_steps", "1.5"], ["train.max_steps", "1.5"]),
    ("sources that are no list", [*SFT, "--data.sources", "3"], ["data.sources"]),
    ("source with an unknown key", [*SFT, "--data.sources=[{path: a.jsonl, wieght: 1}]"], ["wieght"]),
    ("source without a path", ["--stage", "sft", *OUT, *MODEL, "--data.sources=[{weight: 1}]"],
     ["data.sources", "path"]),
    ("missing config file", [*SFT, "--config", "PLACE/none.yaml"], ["none.yaml"]),
    ("config file that is a folder", [*SFT, "--config", "PLACE/good"], ["PLACE/good", "Is a directory"]),
    ("malformed YAML", [*SFT, "--config", "PLACE/torn.yaml"], ["PLACE/torn.yaml line 2"]),
    ("YAML that is a list", [*SFT, "--config", "PLACE/list.yaml"], ["PLACE/list.yaml", "list"]),
    ("YAML that is binary", [*SFT, "--config", "PLACE/binary.yaml"], ["PLACE/binary.yaml", "YAML"]),
    ("unknown key in YAML", [*SFT, "--config", "PLACE/unknown.yaml"], ["did you mean train.learning_rate?"]),
    ("unknown section in YAML", [*SFT, "--config", "PLACE/section.yaml"], ["trian", "did you mean train"]),
    ("wrong type in YAML", [*SFT, "--config", "PLACE/type.yaml"], ["train.max_steps", "many"]),

    ("no data", [w for w in SFT if w != DEMOS], ["no data for stage sft", "data.sources"]),
    ("missing data file", data(SFT, "none.jsonl"), ["PLACE/none.jsonl", "does not exist"]),
    ("empty jsonl", data(SFT, "empty.jsonl"), ["PLACE/empty.jsonl", "empty"]),
    ("malformed jsonl", data(SFT, "torn.jsonl"), ["PLACE/torn.jsonl line 3", "not valid JSON"]),
    ("jsonl of numbers", data(SFT, "numbers.jsonl"), ["PLACE/numbers.jsonl line 1", "object"]),
    ("unknown columns", data(SFT, "columns.jsonl"), ["PLACE/columns.jsonl", "alpha, beta", "prompt"]),
    ("prompts where demonstrations are needed", data(SFT, "prompts.jsonl"), ["PLACE/prompts.jsonl", "stage sft"]),
    ("demonstrations where pairs are needed", data(REWARD, "demos.jsonl"), ["PLACE/demos.jsonl", "stage reward"]),
    ("unknown kind of file", data(SFT, "good/config.xyz"), ["config.xyz", ".jsonl"]),
    ("unknown embedded data", [*SFT, sources("demo/demonstration")], ["did you mean demo/demonstrations?"]),
    ("no row usable after truncation, sft", [*data(SFT, "long.jsonl"), "--data.max_length", "16"],
     ["no usable row", "dropped"]),
    ("no row usable after truncation, reward", [*data(REWARD, "long_pairs.jsonl"), "--data.max_length", "16"],
     ["no usable row", "dropped"]),
    ("no row usable after truncation, ppo", [*data(PPO, "long.jsonl"), "--data.max_prompt_length", "8"],
     ["no usable row", "dropped"]),
    ("column mapping to nothing", [*SFT, "--data.sources=[{path: PLACE/demos.jsonl, columns: {prompt: promt}}]"],
     ["promt", "did you mean prompt?"]),

    ("no model", [*SFT, "--model.model_name_or_path", "null"], ["model.model_name_or_path", "model.preset"]),
    ("missing model folder", model("none"), ["PLACE/none", "does not exist"]),
    ("model that is a file", model("demos.jsonl"), ["PLACE/demos.jsonl", "is a file"]),
    ("folder that is no model", model("no_model"), ["PLACE/no_model", "config.json"]),
    ("model without weights", model("no_weights"), ["PLACE/no_weights", "no weights"]),
    ("model without tokenizer", model("no_tokenizer"), ["PLACE/no_tokenizer", "no tokenizer"]),
    ("pickled weights only", model("pickled"), ["PLACE/pickled", "pytorch_model.bin", "safetensors"]),
    ("damaged weights", model("damaged"), ["PLACE/damaged"]),
    ("damaged configuration", model("bad_config"), ["PLACE/bad_config"]),
    ("damaged tokenizer", model("bad_tokenizer"), ["PLACE/bad_tokenizer"]),
    ("configuration of no known model", model("unknown_type"), ["PLACE/unknown_type"]),
    ("reward from a model without weights", model("no_weights", REWARD), ["PLACE/no_weights", "no weights"]),
    ("ppo from a model without weights", model("no_weights", PPO), ["PLACE/no_weights", "no weights"]),
    ("reward model without weights", [*PPO, "--roles.reward.model_name_or_path", "PLACE/no_weights"],
     ["PLACE/no_weights", "no weights"]),
    ("encoder-decoder", model("t5"), ["PLACE/t5", "encoder-decoder"]),
    ("unknown preset", ["--stage", "sft", *OUT, DEMOS, "--model.preset", "tini"], ["did you mean tiny?"]),
    ("preset and model", [*SFT, "--model.preset", "tiny"], ["model.preset", "model.model_name_or_path"]),
    ("freeze that matches nothing", [*SFT, "--model.freeze=[nowhere]"], ["model.freeze", "nowhere"]),
    ("freeze of everything", [*SFT, "--model.freeze=['.']"], ["model.freeze", "every parameter"]),
    ("LoRA target that matches nothing", [*SFT, "--model.lora.r", "4", "--model.lora.target_modules=[c_attn]"],
     ["lora.target_modules", "c_attn", "q_proj"]),
    ("packing on Mamba", [*model("mamba"), "--data.packing", "true"], ["data.packing", "MambaForCausalLM"]),

    ("reward without sft", [*REWARD, "--model.model_name_or_path", "null"],
     ["PLACE/runs/sft", "--stage sft", "model.model_name_or_path"]),
    ("ppo without sft", [*PPO, "--model.model_name_or_path", "null"], ["PLACE/runs/sft", "--stage sft"]),
    ("ppo without reward", [*PPO, "--roles.reward.model_name_or_path", "null"],
     ["PLACE/runs/reward", "--stage reward", "roles.reward.model_name_or_path"]),
    ("unfinished predecessor", put([*REWARD, "--model.model_name_or_path", "null"], "half/reward"),
     ["PLACE/half/sft", "not finished", "--stage sft"]),
    ("predecessor of another stage", model("other_stage", REWARD), ["PLACE/other_stage", "reward run", "sft"]),
    ("predecessors with different tokenizers", [*PPO, "--roles.reward.model_name_or_path", "PLACE/other_tokens"],
     ["PLACE/good", "PLACE/other_tokens", "tokenizers differ"]),
    ("critic with another tokenizer", [*PPO, "--roles.critic.model_name_or_path", "PLACE/other_tokens"],
     ["PLACE/other_tokens", "tokenizers differ"]),
    ("reference with another tokenizer", [*PPO, "--roles.ref.model_name_or_path", "PLACE/other_tokens"],
     ["PLACE/other_tokens", "tokenizers differ"]),

    ("output_dir with something else", put(SFT, "thesis"), ["PLACE/thesis", "chapter.txt"]),
    ("output_dir that is a file", put(SFT, "demos.jsonl"), ["PLACE/demos.jsonl", "is a file"]),
    ("output_dir below a file", put(SFT, "demos.jsonl/run"), ["PLACE/demos.jsonl", "is a file"]),
    ("output_dir of another stage", put(SFT, "other_stage"), ["PLACE/other_stage", "reward run"]),
    ("output_dir with other settings", put(SFT, "other_settings"), ["other settings", "seed", "--resume never"]),
    ("output_dir with a damaged record", put(SFT, "damaged_record"), ["PLACE/damaged_record/run.json"]),
    ("unknown resume", [*SFT, "--resume", "maybe"], ["resume", "maybe", "auto", "never"]),
    ("unknown tracker", [*SFT, "--report_to=[tensorbord]"], ["tensorbord", "did you mean tensorboard?"]),

    ("max_length above the model's positions", [*SFT, "--data.max_length", "257"], ["data.max_length", "257", "256"]),
    ("max_length above the reward model's positions", [*REWARD, "--data.max_length", "257"],
     ["data.max_length", "257", "256"]),
    ("prompt and response above the model's positions", [*PPO, "--ppo.sampling.max_new_tokens", "225"],
     ["data.max_prompt_length", "ppo.sampling.max_new_tokens", "257", "256"]),
    ("prompt and response above the reward model's positions",
     [*PPO, "--roles.reward.model_name_or_path", "PLACE/short"], ["data.max_prompt_length", "40", "PLACE/short", "32"]),
    ("negative learning rate", [*SFT, "--train.learning_rate", "-1"], ["train.learning_rate", "-1"]),
    ("learning rate that is no number", [*SFT, "--train.learning_rate", "nan"], ["train.learning_rate", "nan"]),
    ("infinite learning rate", [*SFT, "--train.learning_rate", "inf"], ["train.learning_rate", "inf"]),
    ("no steps", [*SFT, "--train.max_steps", "0"], ["train.max_steps"]),
    ("unknown schedule", [*SFT, "--train.lr_scheduler_type", "cosin"], ["did you mean cosine?"]),
    ("split of two shares", [*SFT, "--data.split=[1, 2]"], ["data.split", "three"]),
    ("unknown dtype", [*SFT, "--model.dtype", "bf16"], ["model.dtype", "bf16", "bfloat16"]),
    ("ZeRO 7", [*SFT, "--engine.zero_stage", "7"], ["engine.zero_stage", "7", "0, 1 or 2"]),
    ("ZeRO 0 with bfloat16", [*SFT, "--engine.zero_stage", "0", "--model.dtype", "bfloat16"], ["engine.zero_stage"]),
    *([] if torch.cuda.is_available() else [("float16 on a CPU", [*SFT, "--model.dtype", "float16"],
                                             ["model.dtype", "float16", "bfloat16"])]),
    ("negative LoRA rank", [*SFT, "--model.lora.r", "-1"], ["lora.r", "-1"]),
    ("negative centering", [*REWARD, "--reward.center_coef", "-1"], ["reward.center_coef"]),
    ("top_p 2", [*PPO, "--ppo.sampling.top_p", "2"], ["top_p", "2", "(0, 1]"]),
    ("negative kl_coef", [*PPO, "--ppo.kl_coef", "-1"], ["ppo.kl_coef"]),
    ("negative role learning rate", [*PPO, "--roles.actor.learning_rate", "-1"], ["learning_rate", "-1"]),
    ("minibatch larger than the rollout", [*PPO, "--ppo.minibatch_size", "9"], ["ppo.minibatch_size", "9", "8"]),
    ("the same in all stages", [*ALL, "--ppo.minibatch_size", "9"], ["ppo.minibatch_size", "9", "8"]),
    ("ppo alone in all stages", [*ALL, "--run_stages=[pppo]"], ["run_stages", "pppo", "sft, reward, ppo"]),
    ("preset as the reward model's start", ["--stage", "reward", *OUT, PAIRS, *SMALL, "--model.preset", "tiny"],
     ["model.preset", "--stage sft"]),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    _write_data(folder)
    _write_models(folder)
    _write_runs(folder)
    return folder


def _write_data(folder: Path) -> None:
    def table(name: str, rows: list[dict]) -> None:
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))

    table("demos.jsonl", [{"prompt": f"say {w}", "completion": w} for w in WORDS])
    table("pairs.jsonl", [{"prompt": f"say {w}", "chosen": w, "rejected": "no"} for w in WORDS])
    table("prompts.jsonl", [{"prompt": f"say {w}"} for w in WORDS])
    table("columns.jsonl", [{"alpha": 1, "beta": 2}])
    long = " ".join(WORDS * 5)
    table("long.jsonl", [{"prompt": f"{long} {w}", "completion": w} for w in WORDS])
    table("long_pairs.jsonl", [{"prompt": f"{long} {w}", "chosen": w, "rejected": "no"} for w in WORDS])
    (folder / "empty.jsonl").write_text("\n\n")
    (folder / "torn.jsonl").write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": "a", "comp\n')
    (folder / "numbers.jsonl").write_text("1\n2\n")
    (folder / "torn.yaml").write_text("train: {learning_rate: 1.0\nmodel: [\n")
    (folder / "list.yaml").write_text("- 1\n- 2\n")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01" * 9)
    (folder / "unknown.yaml").write_text("train:\n  learning_rat: 1.0\n")
    (folder / "section.yaml").write_text("trian:\n  learning_rate: 1.0\n")
    (folder / "type.yaml").write_text("train:\n  max_steps: many\n")


def _write_models(folder: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    good = Path(save_tiny(folder / "good"))
    (good / "config.xyz").write_text("{}")
    for name in ("no_weights", "no_tokenizer", "pickled", "damaged", "bad_config", "bad_tokenizer", "unknown_type",
                 "other_tokens"):
        shutil.copytree(good, folder / name)
    for name in ("no_weights", "pickled"):
        (folder / name / "model.safetensors").unlink()
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    (folder / "no_tokenizer" / "tokenizer.json").unlink()
    weights = (good / "model.safetensors").read_bytes()
    (folder / "damaged" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (folder / "bad_config" / "config.json").write_text("{")
    (folder / "bad_tokenizer" / "tokenizer.json").write_text("{}")
    (folder / "unknown_type" / "config.json").write_text('{"model_type": "no_such_model"}')
    (folder / "no_model").mkdir()
    (folder / "no_model" / "notes.txt").write_text("hello")
    tiny_tokenizer(290).save_pretrained(folder / "other_tokens")
    save_tiny(folder / "short", max_position_embeddings=32)
    save_tiny(folder / "mamba", kind="mamba", state_size=4, num_hidden_layers=1)
    T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
                               ).save_pretrained(folder / "t5")
    tiny_tokenizer().save_pretrained(folder / "t5")


def _write_runs(folder: Path) -> None:
    def run(name: str, stage: str, status: str, **more: object) -> None:
        (folder / name).mkdir(parents=True)
        RunRecord(str(folder / name), stage, status=status, **more).write()

    run("half/sft", "sft", "stopped")
    run("other_stage", "reward", "finished")
    run("other_settings", "sft", "finished", config={"seed": 7})
    (folder / "damaged_record").mkdir()
    (folder / "damaged_record" / "run.json").write_text('{"format": 1')
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter.txt").write_text("years of work")


@pytest.fixture(autouse=True)
def _own_cache(place, tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # what transformers says of missing kernels (Mamba's) goes to a stream that an earlier test has closed
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
    shutil.rmtree(place / "runs", ignore_errors=True)  # only a failed test leaves it; the next ones shall not see it


def _tree(folder: Path) -> dict[str, tuple]:
    """Every path below `folder` with its size and time of change."""
    found = {p: p.lstat() for p in sorted(folder.rglob("*"))}
    return {str(p): (s.st_mtime_ns, s.st_size if p.is_file() else None) for p, s in found.items()}


def _at(place: Path, words: list[str]) -> list[str]:
    return [w.replace("PLACE", str(place)) for w in words]


@pytest.mark.parametrize(("argv", "wanted"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_one_line_and_exit_code_2_and_nothing_written(place, capfd, argv, wanted) -> None:
    before = _tree(place)
    assert main(_at(place, argv)) == 2
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    for part in _at(place, wanted):
        assert part in lines[0]
    assert len(lines[0].replace(str(place), "")) < 500, "one line, but not one that nobody can read"
    assert out == ""
    assert _tree(place) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_dir_that_cannot_be_written_is_refused(place, tmp_path, capfd) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert main(_at(place, [*SFT, "--output_dir", f"{tmp_path}/locked/run"])) == 2
    assert "cannot write to output_dir" in capfd.readouterr().err
    assert not list((tmp_path / "locked").iterdir())


def test_an_output_dir_without_the_right_to_write_is_refused_before_anything_is_loaded(place, capfd, monkeypatch
                                                                                       ) -> None:
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **kw: str(path) != str(place) and may(path, mode, **kw))
    assert main(_at(place, model("none"))) == 2  # the model is missing too: the folder is looked at first
    assert "cannot write to output_dir" in capfd.readouterr().err


def test_a_good_command_line_is_not_refused(place, tmp_path, capfd) -> None:
    """The table above means something only if its common part is right."""
    assert main([*_at(place, SFT), "--output_dir", str(tmp_path / "sft")]) == 0
    assert main([*_at(place, REWARD), "--output_dir", str(tmp_path / "reward")]) == 0
    assert main([*_at(place, PPO), "--output_dir", str(tmp_path / "ppo")]) == 0
    capfd.readouterr()


@pytest.mark.parametrize("argv", [[*SFT, "--train.learning_rat", "1"], model("no_weights")],
                         ids=["unknown flag", "model without weights"])
def test_the_launcher_itself_answers_bad_input_with_one_line_and_exit_code_2(place, tmp_path, argv) -> None:
    """As a process, where other libraries' words would show too."""
    before = _tree(place)
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *_at(place, argv)], capture_output=True, text=True,
                          cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=100)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    assert _tree(place) == before
