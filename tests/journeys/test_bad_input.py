"""Bad input: exit code 2, one line that says what is wrong, where, and what would fit; nothing written, nothing run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.data import sources
from hybrid_rlhf.data.datasets import DataConfig, build
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from hybrid_rlhf.run.runfile import RunRecord
from hybrid_rlhf.training.registry import READS
from hybrid_rlhf.training.step1_sft import Config
from tests.factories.tiny import chatml_tokenizer, own_cache, save_tiny, tiny_tokenizer

ROOT = Path(__file__).parents[2]
WORDS = ["red", "blue", "green", "cat", "dog", "fox", "sun", "moon", "tree", "book"]


# PLACE stands for the folder that `place` fills


def rows_of(*names: str) -> str:
    return "--data.sources=[" + ", ".join(f"{{path: '{n}'}}" for n in names) + "]"


MODEL = ["--model.model_name_or_path", "PLACE/good"]
SMALL = ["--data.split", "null", "--data.max_length", "64", "--train.max_steps", "1"]
SAMPLED = ["--data.split", "null", "--data.max_prompt_length", "32", "--train.max_steps", "1"]
OUT = ["--output_dir", "PLACE/runs/out"]
DEMOS, PAIRS, PROMPTS = (rows_of(f"PLACE/{n}.jsonl") for n in ("demos", "pairs", "prompts"))
SFT = ["--stage", "sft", *OUT, *MODEL, DEMOS, *SMALL]
REWARD = ["--stage", "reward", *OUT, *MODEL, PAIRS, *SMALL]
PPO = ["--stage", "ppo", *OUT, *MODEL, PROMPTS, *SAMPLED, "--roles.reward.model_name_or_path", "PLACE/good",
       "--ppo.sampling.max_new_tokens", "8", "--train.per_device_train_batch_size", "8"]
DPO = ["--stage", "dpo", *OUT, *MODEL, PAIRS, *SMALL]
ALL = ["--stage", "all", *OUT, "--model.preset", "tiny", DEMOS, *SMALL[:4], *SAMPLED[2:4],
       "--stages.ppo.per_device_train_batch_size", "8"]

EVALUATE = ["--stage", "evaluate", *OUT, PROMPTS, "--data.split", "null", "--roles.reward.model_name_or_path",
            "PLACE/good", "--evaluate.rows", "all", "--data.max_prompt_length", "32",
            "--evaluate.sampling.max_new_tokens", "8"]
BOTH = "--evaluate.models=[PLACE/good, other=PLACE/good]"


def data(stage: list[str], name: str) -> list[str]:
    """`stage` on PLACE/name instead of its data."""
    return [rows_of(f"PLACE/{name}") if w.startswith("--data.sources") else w for w in stage]


def model(name: str, stage: list[str] = SFT) -> list[str]:
    return [*stage, "--model.model_name_or_path", f"PLACE/{name}"]


def put(stage: list[str], name: str) -> list[str]:
    """`stage` with its output in PLACE/name."""
    return [*stage, "--output_dir", f"PLACE/{name}"]


# what is wrong, the command line, what the message must hold: that which no module's own test has
BAD = [
    ("unknown flag", [*SFT, "--train.learning_rat", "1"], ["train.learning_rat", "did you mean train.learning_rate?"]),
    ("unknown flag of no section", [*SFT, "--learning_rate", "1"], ["did you mean train.learning_rate?"]),
    ("flag of another stage", [*SFT, "--ppo.kl_coef", "1"], ["ppo.kl_coef"]),
    ("stray word", [*SFT, "whatever"], ["whatever"]),
    ("unknown stage", ["--stage", "pop"], ["--stage pop", "did you mean ppo?", "sft, reward, ppo, all"]),
    ("no stage", DEMOS.split(), ["--stage is missing", "sft, reward, ppo, all"]),
    ("no command", ["train", "--stage", "sft"], ["train: there is no such command or stage", "demo, chat", ", sft, "]),
    ("a slip in a command", ["exprot"], ["exprot: ", "(did you mean export?)"]),
    ("stage without a value", ["--stage"], ["--stage needs a value", "sft"]),
    ("flag without a value", [*SFT, "--seed"], ["seed"]),
    ("text for an integer", [*SFT, "--train.max_steps", "many"], ["train.max_steps", "'many'; it must be a whole"]),
    ("text for a boolean", [*SFT, "--data.packing", "perhaps"], ["data.packing", "perhaps"]),
    ("source with an unknown key", [*SFT, "--data.sources=[{path: a.jsonl, wieght: 1}]"],
     ["unknown key wieght in data.sources (did you mean weight?)", "path, name, split"]),
    ("source without a path", ["--stage", "sft", *OUT, *MODEL, "--data.sources=[{weight: 1}]"],
     ["data.sources", "path"]),
    ("missing config file", [*SFT, "--config", "PLACE/none.yaml"], ["none.yaml"]),
    ("malformed YAML", [*SFT, "--config", "PLACE/torn.yaml"], ["PLACE/torn.yaml line 2"]),
    ("unknown key in YAML", [*SFT, "--config", "PLACE/unknown.yaml"], ["did you mean train.learning_rate?"]),
    ("wrong type in YAML", [*SFT, "--config", "PLACE/type.yaml"], ["train.max_steps", "many"]),

    ("no data", [w for w in SFT if w != DEMOS], ["no data for stage sft", "data.sources"]),
    ("missing data file", data(SFT, "none.jsonl"), ["PLACE/none.jsonl", "does not exist"]),
    ("empty jsonl", data(SFT, "empty.jsonl"), ["PLACE/empty.jsonl", "empty"]),
    ("malformed jsonl", data(SFT, "torn.jsonl"), ["PLACE/torn.jsonl line 3", "not valid JSON"]),
    ("unknown columns", data(SFT, "columns.jsonl"), ["PLACE/columns.jsonl", "alpha, beta", "prompt"]),
    ("prompts where demonstrations are needed", data(SFT, "prompts.jsonl"), ["PLACE/prompts.jsonl", "stage sft"]),
    ("demonstrations where pairs are needed", data(REWARD, "demos.jsonl"), ["PLACE/demos.jsonl", "stage reward"]),
    ("unknown kind of file", data(SFT, "good/config.xyz"), ["config.xyz", ".jsonl"]),
    ("unknown embedded data", [*SFT, rows_of("demo/demonstration")], ["did you mean demo/demonstrations?"]),
    ("no row usable after truncation, sft", [*data(SFT, "long.jsonl"), "--data.max_length", "16"],
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
    ("configuration of no known model", model("unknown_type"), ["PLACE/unknown_type"]),
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
    ("ppo without reward", [*PPO, "--roles.reward.model_name_or_path", "null"],
     ["PLACE/runs/reward", "--stage reward", "roles.reward.model_name_or_path"]),
    ("all with a reward function that is not there", [*ALL, "--reward_sources.functions", "PLACE/none.py:pay"],
     ["PLACE/none.py"]),
    ("variant that its settings make another", ["--stage", "ipo", *DPO[2:], "--dpo.loss_type", "hinge"],
     ["--stage ipo", "dpo.loss_type hinge", "give --stage dpo"]),
    ("estimator that is not the stage's", ["--stage", "grpo", *PPO[2:], "--ppo.estimator", "rloo"],
     ["--stage grpo", "ppo.estimator rloo", "give --stage ppo"]),
    ("reward function that names none", [*PPO, "--reward.functions", "pay"], ["reward.functions", "path.py:name"]),
    ("reward function of no file", [*PPO, "--reward.functions", "PLACE/pay.py:f"], ["pay.py does not exist"]),
    ("reward service without an address", [*PPO, "--reward.url", "localhost:8000"], ["reward.url", "http://"]),
    ("unknown builtin reward", [*PPO, "--reward.functions=[builtin:fromat]"], ["did you mean format?"]),
    ("reward function without its column", [*PPO, "--reward.functions", "builtin:numeric_match"],
     ["numeric_match needs a column answer", "completions, completion_ids are always given"]),
    ("weights of another number than sources", [*PPO, "--reward.functions", "builtin:exact_match",
                                                "--reward.weights=[1]"], ["reward.weights", "model, exact_match"]),
    ("critic that is a head without a reward model",
     [*PPO, "--roles.reward.model_name_or_path", "null", "--reward.functions", "builtin:exact_match",
      "--roles.critic.kind", "head"], ["roles.critic.kind is head", "roles.reward.model_name_or_path"]),
    ("unfinished parent run", put([*REWARD, "--model.model_name_or_path", "null"], "half/reward"),
     ["PLACE/half/sft", "not finished", "--stage sft"]),
    ("parent run of another stage", model("other_stage", REWARD), ["PLACE/other_stage", "reward run", "sft"]),
    ("critic with another tokenizer", [*PPO, "--roles.critic.model_name_or_path", "PLACE/other_tokens"],
     ["PLACE/other_tokens", "tokenizers differ"]),

    ("tensor parallelism without enough processes", [*PPO, "--roles.actor.tp", "2"],
     ["roles.actor.tp is 2, but there is 1 process", "--nproc_per_node 2"]),
    ("grpo with groups of one", [*PPO, "--ppo.estimator", "grpo"],
     ["ppo.estimator grpo", "ppo.sampling.num_samples is 1", "2 or more"]),
    ("unknown estimator", [*PPO, "--ppo.estimator", "grop"], ["ppo.estimator", "did you mean grpo?"]),
    ("k1 in the loss", [*PPO, "--ppo.kl_in", "loss", "--ppo.kl_estimator", "k1"], ["k1", "choose k2 or k3"]),
    ("overlong buffer beyond the response", [*PPO, "--ppo.overlong_penalty", "1", "--ppo.overlong_buffer", "9"],
     ["ppo.overlong_buffer is 9", "[1, ppo.sampling.max_new_tokens 8]"]),
    ("refills without groups", [*PPO, "--ppo.max_refills", "2"], ["ppo.max_refills is 2", "num_samples is 1"]),
    ("dual clip of cispo", ["--stage", "cispo", *PPO[2:], "--ppo.dual_clip", "3"], ["ppo.dual_clip", "cispo"]),
    ("settings of a reference that there is not", [*PPO, "--ppo.kl_coef", "0", "--roles.ref.dtype", "bfloat16"],
     ["roles.ref.dtype", "ppo.kl_coef is 0", "roles.ref.model_name_or_path"]),
    ("a target for a price of 0", [*PPO, "--ppo.kl_coef", "0", "--ppo.kl_target", "1"],
     ["ppo.kl_target is 1.0", "ppo.kl_coef of 0 stays 0"]),
    ("one base without adapters", [*PPO, "--roles.share_base", "true"],
     ["roles that cannot share a base", "model.lora.r is 0"]),
    ("one base for two models", [*PPO, "--roles.share_base", "true", "--model.lora.r", "4",
                                 "--roles.reward.model_name_or_path", "PLACE/twin"],
     ["roles that cannot share a base", "PLACE/good", "PLACE/twin"]),
    ("quantised base with full fine-tuning, ppo", [*PPO, "--roles.actor.quantize", "4bit"],
     ["roles.actor.quantize 4bit", "model.lora.r"]),
    ("a band that nobody looks at", [*PPO, "--ppo.importance_low", "0.9"],
     ["ppo.importance_low is set", "ppo.importance masked"]),
    ("a replay of nothing", [*PPO, "--ppo.replay_truncation", "false"],
     ["ppo.replay_truncation is set", "ppo.sampling.top_p"]),

    ("output_dir with something else", put(SFT, "thesis"), ["PLACE/thesis", "chapter.txt"]),
    ("output_dir with other settings", put(SFT, "other_settings"), ["other settings", "seed", "--resume never"]),

    ("max_length above the model's positions", [*SFT, "--data.max_length", "257"], ["data.max_length", "257", "256"]),
    ("prompt and response above the model's positions", [*PPO, "--ppo.sampling.max_new_tokens", "225"],
     ["data.max_prompt_length", "ppo.sampling.max_new_tokens", "257", "256"]),
    ("prompt and response above the reward model's positions",
     [*PPO, "--roles.reward.model_name_or_path", "PLACE/short"], ["data.max_prompt_length", "40", "PLACE/short", "32"]),
    ("negative learning rate", [*SFT, "--train.learning_rate", "-1"], ["train.learning_rate", "-1"]),
    ("split of two shares", [*SFT, "--data.split=[1, 2]"], ["data.split", "three"]),
    ("unknown dtype", [*SFT, "--model.dtype", "bf16"], ["model.dtype", "bf16", "bfloat16"]),
    ("ZeRO 7", [*SFT, "--engine.zero_stage", "7"], ["engine.zero_stage", "7", "0, 1, 2 or 3"]),
    ("offload of what does not exist", [*SFT, "--engine.offload=[optimiser]"], ["engine.offload", "did you mean opt"]),
    ("parameters offloaded at ZeRO 2", [*SFT, "--engine.zero_stage", "2", "--engine.offload=[parameters]"],
     ["engine.offload", "engine.zero_stage 3"]),
    ("optimizer offloaded at ZeRO 0", [*PPO, "--engine.zero_stage", "0", "--engine.offload=[optimizer]"],
     ["engine.offload", "engine.zero_stage 1"]),
    *([] if torch.cuda.is_available() else [
        ("flash attention on a CPU", [*SFT, "--model.attn_implementation", "flash_attention_2"],
         ["model.attn_implementation", "accelerator", "sdpa"])]),
    ("ZeRO 0 with bfloat16 and sgd",
     [*SFT, "--engine.zero_stage", "0", "--model.dtype", "bfloat16", "--train.optim", "sgd"], ["engine.zero_stage"]),
    *([] if torch.cuda.is_available() else [("float16 on a CPU", [*SFT, "--model.dtype", "float16"],
                                             ["model.dtype", "float16", "bfloat16"])]),
    ("negative LoRA rank", [*SFT, "--model.lora.r", "-1"], ["lora.r", "-1"]),
    ("negative centering", [*REWARD, "--reward.center_coef", "-1"], ["reward.center_coef"]),
    ("demonstrations where labels are needed", ["--stage", "kto", *data(DPO, "demos.jsonl")[2:]],
     ["PLACE/demos.jsonl", "labelled answers for stage kto"]),
    ("demonstrations where scores are needed", ["--stage", "conditional_sft", *data(SFT, "demos.jsonl")[2:]],
     ["PLACE/demos.jsonl", "graded answers for stage conditional_sft"]),
    ("beta 0", [*DPO, "--dpo.beta", "0"], ["dpo.beta is 0", "positive", "0.1"]),
    ("smoothing of a loss that has none", ["--stage", "hinge", *DPO[2:], "--dpo.label_smoothing", "0.1"],
     ["dpo.label_smoothing", "hinge", "sigmoid and simpo"]),
    ("kto of single rows", ["--stage", "kto", *DPO[2:], "--train.per_device_train_batch_size", "1"],
     ["train.per_device_train_batch_size", "2 or more"]),
    ("score template without a score", ["--stage", "conditional_sft", *SFT[2:], "--data.score_template", "{prompt}"],
     ["data.score_template", "{score}"]),
    ("top_p 2", [*PPO, "--ppo.sampling.top_p", "2"], ["top_p", "2", "(0, 1]"]),
    ("negative kl_coef", [*PPO, "--ppo.kl_coef", "-1"], ["ppo.kl_coef"]),
    ("learning rate of a role that is not trained", [*PPO, "--roles.ref.learning_rate", "1"],
     ["roles.ref.learning_rate"]),
    ("both quantisations", [*SFT, "--model.load_in_4bit", "true", "--model.load_in_8bit", "true"], ["load_in_8bit"]),
    ("quantised base with full fine-tuning", [*SFT, "--model.load_in_4bit", "true"],
     ["model.load_in_4bit", "model.lora.r"]),
    ("minibatch larger than the rollout", [*PPO, "--ppo.minibatch_size", "9"], ["ppo.minibatch_size", "9", "8"]),
    ("the same in all stages", [*ALL, "--ppo.minibatch_size", "9"], ["ppo.minibatch_size", "9", "8"]),
    ("ppo alone in all stages", [*ALL, "--run_stages=[pppo]"], ["run_stages", "pppo", "sft, reward, ppo"]),
    ("preset as the reward model's start", ["--stage", "reward", *OUT, PAIRS, *SMALL, "--model.preset", "tiny"],
     ["model.preset", "--stage sft"]),
    ("two models of one name", [*EVALUATE, "--evaluate.models=[PLACE/good, good=PLACE/short]"],
     ["two are called good", "good_2="]),
    ("a model to compare that is no policy", [*EVALUATE, "--evaluate.models=[PLACE/good, PLACE/other_stage]"],
     ["PLACE/other_stage holds a reward run"]),
    ("a model to compare that is none", [*EVALUATE, "--evaluate.models=[PLACE/good, PLACE/no_model]"],
     ["PLACE/no_model"]),
    ("nothing held out to compare on", [*EVALUATE, BOTH, "--evaluate.rows", "held_out", "--data.eval_fraction", "0"],
     ["none of the 10 prompts is held out", "--evaluate.rows all"]),
    ("template for an unknown model", [*EVALUATE, BOTH, "--evaluate.prompt_templates={othr: 'now {prompt}'}"],
     ["othr", "did you mean other?"]),
    ("template without the prompt", [*EVALUATE, BOTH, "--evaluate.prompt_templates={other: now}"],
     ["evaluate.prompt_templates: other", "{prompt}"]),
    ("unknown checker", [*EVALUATE, BOTH, "--evaluate.checker", "demos"], ["evaluate.checker", "did you mean demo?"]),
    ("confidence in percent", [*EVALUATE, BOTH, "--evaluate.confidence", "95"], ["evaluate.confidence", "0.95"]),
    ("a plan of an evaluation", [*EVALUATE, BOTH, "--plan"], ["--plan", "stages that train"]),
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
    (folder / "empty.jsonl").write_text("\n\n")
    (folder / "torn.jsonl").write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": "a", "comp\n')
    (folder / "torn.yaml").write_text("train: {learning_rate: 1.0\nmodel: [\n")
    (folder / "unknown.yaml").write_text("train:\n  learning_rat: 1.0\n")
    (folder / "type.yaml").write_text("train:\n  max_steps: many\n")


def _write_models(folder: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    good = Path(save_tiny(folder / "good"))
    (good / "config.xyz").write_text("{}")
    for name in ("no_weights", "no_tokenizer", "pickled", "damaged", "unknown_type", "other_tokens", "twin"):
        shutil.copytree(good, folder / name)
    for name in ("no_weights", "pickled"):
        (folder / name / "model.safetensors").unlink()
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    (folder / "no_tokenizer" / "tokenizer.json").unlink()
    weights = (good / "model.safetensors").read_bytes()
    (folder / "damaged" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
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
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter.txt").write_text("years of work")


@pytest.fixture(autouse=True)
def _own_cache(place, tmp_path, monkeypatch) -> Iterator[None]:
    own_cache(monkeypatch, tmp_path / "cache")
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


BEFORE_WEIGHTS = ["tensor parallelism without enough processes", "quantised base with full fine-tuning",
                  "quantised base with full fine-tuning, ppo", "LoRA target that matches nothing",
                  "one base without adapters", "one base for two models", "minibatch larger than the rollout"]


@pytest.mark.parametrize(("argv", "wanted"), [row[1:] for row in BAD if row[0] in BEFORE_WEIGHTS])
def test_what_cannot_be_laid_out_is_said_before_any_weight_is_read(place, capfd, monkeypatch, argv, wanted) -> None:
    def read(*_given, **_named):
        raise AssertionError("weights are read")

    monkeypatch.setattr(load, "_load", read)
    assert main(_at(place, argv)) == 2
    assert all(part in capfd.readouterr().err for part in _at(place, wanted[:1]))


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


@pytest.mark.slow
def test_a_good_command_line_is_not_refused(place, tmp_path, capfd) -> None:
    """The table above means something only if its common part is right."""
    assert main([*_at(place, SFT), "--output_dir", str(tmp_path / "sft")]) == 0
    assert main([*_at(place, REWARD), "--output_dir", str(tmp_path / "reward")]) == 0
    assert main([*_at(place, PPO), "--output_dir", str(tmp_path / "ppo"),
                 "--roles.reward.model_name_or_path", str(tmp_path / "reward")]) == 0
    capfd.readouterr()


@pytest.mark.slow
def test_the_launcher_itself_answers_bad_input_with_one_line_and_exit_code_2(place, tmp_path) -> None:
    """As a process, where other libraries' words would show too."""
    before = _tree(place)
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *_at(place, model("no_weights"))],
                          capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
                          timeout=280)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    assert _tree(place) == before


# --- Folders, files and rows of strangers: nothing of theirs runs, nothing hangs, and what cannot be read is one line

@pytest.fixture
def tokenizer():
    return chatml_tokenizer()


class Evil:
    """A pickle that runs a command when it is read."""

    def __init__(self, mark) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


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


def _write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _data(path: str, tmp_path) -> DataConfig:
    return DataConfig(sources=[Source(path)], split=None, eval_fraction=0.0, cache_dir=str(tmp_path / "cache"),
                      max_length=64, max_prompt_length=32)


@pytest.mark.parametrize("content", ["y " * 300_000, "\u202e\x1b[2J", "<|im_end|>" * 2000, "\ud800"], ids=range(4))
def test_contents_of_any_kind_are_trained_on(content, tokenizer, tmp_path):
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a {content}"}]}
    found = build(_data(_write(tmp_path / "rows.jsonl", [row]), tmp_path), READS["sft"], tokenizer, 0)
    ids = found.train[0]["input_ids"]
    assert ids.count(2) == 2 and ids.count(3) == (1 if len(ids) == 64 else 2)


@pytest.mark.parametrize(("row", "said"), [
    ('{"prompt": "a", "completions": ["b", "c"], "scores": [1, NaN]}', "scores must be a number"),
    ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": ' + "9" * 400 + "}", "margin must be a number"),
    ("{" + ", ".join(f'"column {i}": 1' for i in range(5000)) + "}", "and 4980 more")], ids=range(3))
def test_a_row_that_says_too_much_is_one_short_line(row, said, tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(UserError) as caught:
        build(_data(str(tmp_path / "rows.jsonl"), tmp_path), READS["reward"], tokenizer, 0)
    text = str(caught.value)
    assert said in text
    assert "\n" not in text and len(text.replace(str(tmp_path), "")) < 1500


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]\n", "seed: !!python/object/apply:os.getcwd []\n"], ids=range(3))
def test_settings_that_are_a_trap_are_one_line(text, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        parse(Config, ["--config", str(tmp_path / "c.yaml")], prog="x")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert time.process_time() - start < 5


def test_an_error_that_quotes_data_cannot_drive_the_terminal(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"\x1b[2J\u202e": 1}\n')
    assert main(["--stage", "sft", "--model.preset", "tiny", "--output_dir", str(tmp_path / "out"),
                 f"--data.sources=[{{path: {tmp_path}/rows.jsonl, stages: [\"\x1b]0;x\x07\"]}}]"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and not any(ord(c) < 32 for c in err.rstrip("\n"))
