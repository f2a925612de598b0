"""The three stages through the launcher, on tiny models and files: what they leave, and what must not depend on how."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.data.datasets import DataConfig, StageData
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.kernels import ops_for
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.roles import Reward
from hybrid_rlhf.training import builders, on_policy, step1_sft, step2_reward, step3_ppo, supervised
from hybrid_rlhf.training.registry import STAGES
from tests.factories.stage_options import COMMON, PPO, short_sft, used, write_rows
from tests.factories.tiny import own_cache, save_tiny, tiny_tokenizer

MODULES = {"sft": step1_sft, "reward": step2_reward, "ppo": step3_ppo}
# sequences of uneven length, the short ones right-padded; 3 is EOS, 0 is pad
ROWS = [[5, 9, 12, 40, 41, 3], [7, 70, 3], [100, 101, 102, 103, 104, 105, 106, 3]]

ON_POLICY = {"reward", "reward_std", "rewards/model/mean", "rewards/model/std", "kl", "completions/mean_length",
             "completions/min_length", "completions/max_length", "completions/clipped_ratio", "objective/kl",
             "objective/score"}
TRAINED = {
    "sft": {"loss", "grad_norm", "learning_rate", "mean_token_accuracy", "num_tokens", "time/step",
            "memory/actor/update"},
    "reward": {"loss", "grad_norm", "learning_rate", "accuracy", "margin", "mean_reward", "num_tokens", "time/step",
               "memory/reward/update"},
    "ppo": ON_POLICY | {"entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
                        "loss", "num_tokens", "policy/loss", "policy/approx_kl", "policy/clip_fraction",
                        "value/loss", "value/clip_fraction",
                        "value/explained_variance", "objective/non_score_reward", "grad_norm", "learning_rate",
                        "time/generate", "time/score", "time/train", "time/step", "memory/actor/generate",
                        "memory/actor/score", "memory/ref/score", "memory/critic/score", "memory/reward/score",
                        "memory/actor/update", "memory/critic/update"}}
EVALUATED = {"sft": {"loss", "mean_token_accuracy", "perplexity"},
             "reward": {"loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward"}, "ppo": ON_POLICY}


class Place(SimpleNamespace):
    """A folder with data, a model and finished runs; `live` holds the models as they were when they were exported."""

    def launch(self, stage: str, out: str, *more: str) -> Path:
        argv = ["--stage", stage, "--output_dir", f"{self.folder}/{out}", *used(stage, COMMON),
                f"--data.sources=[{{path: {self.folder}/{stage}.jsonl}}]", *(PPO if stage == "ppo" else [])]
        argv += ["--model.model_name_or_path", self.base] if stage == "sft" else []
        assert main([*argv, *more]) == 0
        return self.folder / out

    def beside(self, stage: str) -> list[str]:
        """Options by which a run elsewhere finds this place's own parent runs."""
        sft = ["--model.model_name_or_path", f"{self.folder}/runs/sft"]
        reward = ["--roles.reward.model_name_or_path", f"{self.folder}/runs/reward"]
        return {"sft": [], "reward": sft, "ppo": sft + reward}[stage]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    write_rows(folder)
    made = Place(folder=folder, base=save_tiny(folder / "base"), live={}, before={})
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        for module in (supervised, on_policy):
            patch.setattr(module, "export", _keeping(module.export, made.live))
        for name in MODULES:
            made.launch(name, f"runs/{name}")
            made.before[name] = _digests(folder / "runs" / name)
        yield made


def _keeping(export, live: dict):
    def wrapped(model, tokenizer, folder, eos_ids):
        live[Path(folder).parent.name] = model
        return export(model, tokenizer, folder, eos_ids)

    return wrapped


def _digests(folder: Path) -> dict[str, str]:
    """Of every file but the card, which names the run and its command."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "README.md"}


def _rows(out: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The lines of a jsonl file without what the clock says."""
    lines = (out / name).read_text().splitlines()
    clocked = ("time/", "memory/", "engine/tokens_per_second", "micro_batch_tokens", "value/micro")  # of equal runs
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(clocked)} for line in lines]


def _close(a: list[dict], b: list[dict], rel: float) -> None:
    assert len(a) == len(b) > 0
    for left, right in zip(a, b, strict=True):
        assert left == pytest.approx(right, rel=rel, abs=1e-6)


def _weights(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(out / "model" / "model.safetensors" if (out / "model").exists() else out / "model.safetensors")


@pytest.mark.parametrize("stage", MODULES)
def test_a_stage_leaves_what_the_conventions_list(place, stage) -> None:
    out = place.folder / "runs" / stage
    for name in ("config.yaml", "run.json", "metrics.jsonl", "checkpoints", "model/config.json",
                 "model/model.safetensors", "model/tokenizer.json", "model/chat_template.jinja"):
        assert (out / name).exists(), name
    assert (out / "model" / "generation_config.json").exists() == (stage != "reward")
    record = json.loads((out / "run.json").read_text())
    assert (record["stage"], record["status"]) == (stage, "finished")
    assert yaml.safe_load((out / "config.yaml").read_text()) == record["config"]
    assert len(list((out / "checkpoints").iterdir())) == 1
    assert not [p for p in out.rglob("*") if p.suffix in (".bin", ".pt", ".pkl", ".tmp") or p.name.startswith(".")]


@pytest.mark.parametrize("stage", MODULES)
def test_metrics_carry_the_names_of_the_conventions(place, stage) -> None:
    lines = [json.loads(line) for line in (place.folder / "runs" / stage / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in lines if not any(k.startswith("eval/") for k in row)]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(TRAINED[stage] <= row.keys() for row in steps), TRAINED[stage] - steps[0].keys()
    assert {f"eval/{k}" for k in EVALUATED[stage]} <= lines[-1].keys()
    assert all(isinstance(v, (int, float)) for row in lines for v in row.values())  # none became null: all finite


def test_the_header_of_ppo_says_how_the_policy_decodes_and_the_report_repeats_it(place) -> None:
    line = f"decoding: native, kernels: {ops_for('cpu').name}; temperature 1, max_new_tokens "
    assert any(told.startswith(line) for told in json.loads((place.folder / "runs/ppo/run.json").read_text())[
        "facts"]["header"])
    assert line.partition(";")[0] in (place.folder / "runs/ppo/report.md").read_text()


def test_ppo_leaves_samples_of_every_logged_step(place) -> None:
    samples = _rows(place.folder / "runs" / "ppo", "samples.jsonl")
    assert {s["step"] for s in samples} == {1, 2, 3}
    assert all({"prompt", "completion", "score", "ended"} <= s.keys() for s in samples)


FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
given = torch.load(sys.argv[1], weights_only=True)
for name, expected in given["expected"].items():
    folder = f"{sys.argv[2]}/{name}/model"
    kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    model, tokenizer = kind.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0 and tokenizer.eos_token_id == 3
    assert tokenizer.chat_template
    logits = model(input_ids=given["ids"], attention_mask=given["mask"]).logits
    logits = logits[:, 0] if name == "reward" else logits[given["mask"].bool()]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
assert "hybrid_rlhf" not in sys.modules
print("same", *given["expected"])
"""


@pytest.mark.slow
@torch.no_grad()
def test_exported_models_give_the_live_models_numbers_in_a_process_that_never_imports_this_library(place, tmp_path
                                                                                                    ) -> None:
    ids, mask = pad_right(ROWS, 0), length_mask(torch.tensor([len(r) for r in ROWS]))
    expected = {}
    for name in ("sft", "ppo"):
        live = place.live[name].eval()
        expected[name] = torch.cat([live(torch.tensor([row])).logits[0] for row in ROWS])  # alone: no padding at all
    role = Reward(HybridEngine(ScalarModel(place.live["reward"]), pad_id=0))
    expected["reward"] = role.score(SequenceBatch(ids, mask, mask))
    assert expected["reward"].std() > 0.01
    torch.save({"ids": ids, "mask": mask.long(), "expected": expected}, tmp_path / "numbers.pt")
    done = subprocess.run([sys.executable, "-c", FRESH, str(tmp_path / "numbers.pt"), str(place.folder / "runs")],
                          capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.stdout.split() == ["same", "sft", "ppo", "reward"], done.stderr


def test_training_ppo_leaves_the_policy_and_the_reward_model_it_started_from_as_they_were(place) -> None:
    for name in ("sft", "reward"):
        assert _digests(place.folder / "runs" / name) == place.before[name]
    start, end = (_weights(place.folder / "runs" / n) for n in ("sft", "ppo"))
    assert any(not torch.equal(start[k], end[k]) for k in start)


@pytest.mark.parametrize("stage", MODULES)
def test_rerunning_a_finished_stage_or_its_written_config_says_so_and_does_nothing(place, stage, capfd) -> None:
    out = place.launch(stage, f"runs/{stage}")
    assert main(["--stage", stage, "--config", f"{out}/config.yaml"]) == 0
    assert capfd.readouterr().err.count("finished; nothing to do") == 2
    assert _digests(out) == place.before[stage]


@pytest.mark.parametrize("stage", MODULES)
def test_the_same_seed_gives_the_same_run_and_another_seed_another(place, stage) -> None:
    twin = place.launch(stage, f"twin/{stage}", *place.beside(stage))
    assert _rows(twin) == _rows(place.folder / "runs" / stage)
    assert _digests(twin / "model") == _digests(place.folder / "runs" / stage / "model")
    other = place.launch(stage, f"other/{stage}", "--seed", "1", *place.beside(stage))
    assert _rows(other) != _rows(twin)


def test_the_same_seed_gives_the_same_adapters_and_the_same_dropout(place) -> None:
    runs = [place.launch("sft", f"dropout{i}", "--model.lora.r", "4", "--model.lora.dropout", "0.2") for i in (1, 2)]
    assert _rows(runs[0]) == _rows(runs[1])


def test_a_lora_run_exports_a_merged_model_with_the_live_models_numbers(place) -> None:
    from transformers import AutoModelForCausalLM

    out = place.launch("sft", "lora", "--model.lora.r", "4", "--train.learning_rate", "1e-2")
    assert not [k for k in _weights(out) if "lora" in k or "base_layer" in k]
    assert not (out / "model" / "adapter_config.json").exists()
    base = _weights(Path(place.base))
    moved = {k for k, v in _weights(out).items() if not torch.equal(v, base[k])}
    assert moved and all(k.endswith("_proj.weight") for k in moved)
    ids = torch.tensor([ROWS[0]])
    plain = AutoModelForCausalLM.from_pretrained(out / "model").eval()(ids).logits
    torch.testing.assert_close(plain, place.live["lora"].eval()(ids).logits, rtol=1e-4, atol=1e-5)


def test_packing_trains_the_same_tokens_to_the_same_numbers(place) -> None:
    _close(_rows(place.launch("sft", "packed", "--data.packing", "true")), _rows(place.folder / "runs" / "sft"), 1e-4)


@pytest.mark.parametrize("stage", MODULES)
def test_small_micro_batches_and_gradient_checkpointing_change_no_number(place, stage) -> None:
    out = place.launch(stage, f"micro/{stage}", "--engine.micro_batch_tokens", "40", *place.beside(stage),
                       "--model.gradient_checkpointing", "true")
    _close(_rows(out), _rows(place.folder / "runs" / stage), 1e-4)


@pytest.mark.parametrize("stage", MODULES)
def test_accumulation_steps_multiply_the_batch(place, stage) -> None:
    out = place.launch(stage, f"accumulated/{stage}", "--train.per_device_train_batch_size", "4",
                       "--train.gradient_accumulation_steps", "2", *place.beside(stage))
    _close(_rows(out), _rows(place.folder / "runs" / stage), 1e-5)


def test_every_stage_runs_in_bfloat16(place) -> None:
    for stage in MODULES:
        out = place.launch(stage, f"bf16/{stage}", "--model.dtype", "bfloat16")
        assert {v.dtype for v in _weights(out).values()} == {torch.bfloat16}
        assert all(isinstance(v, (int, float)) for row in _rows(out) for v in row.values())


def test_frozen_weights_leave_a_run_bit_equal_and_the_others_do_not(place) -> None:
    out = place.launch("sft", "frozen", "--model.freeze=['embed_tokens', 'layers\\.0\\.']")
    base, end = _weights(Path(place.base)), _weights(out)
    for name in base:
        is_frozen = "embed_tokens" in name or "layers.0." in name
        assert torch.equal(base[name], end[name]) == is_frozen, name


def test_the_first_update_of_ppo_is_on_policy(place) -> None:
    """One epoch, one minibatch: the actor that is updated is the one that sampled, so every ratio is 1."""
    first = _rows(place.folder / "runs" / "ppo")[0]
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert first["kl"] == pytest.approx(0, abs=1e-5)  # nor has it left the reference yet
    assert first["policy/clip_fraction"] == 0
    assert first["policy/approx_kl"] == pytest.approx(0, abs=1e-6)


def test_the_reward_run_records_the_scale_of_its_scores(place) -> None:
    statistics = json.loads((place.folder / "runs" / "reward" / "run.json").read_text())["facts"]["score_statistics"]
    assert statistics["std"] > 0 and statistics["count"] > 0 and statistics["on"].startswith("both answers of ")


@pytest.mark.parametrize(("num_held_out", "count", "on"), [
    (8, 16, "both answers of held-out pairs"), (3, 10, "both answers of pairs, training ones among them")])
def test_the_scale_of_scores_is_that_of_good_and_bad_answers_together(capsys, num_held_out, count, on) -> None:
    """A role that scores a row by its first token: chosen 5, rejected 1."""
    pair = {"chosen_ids": [5, 3], "rejected_ids": [1, 3], "num_prompt_tokens": 0}
    role = SimpleNamespace(score=lambda batch: batch.input_ids[:, 0].float())
    data = StageData([pair] * 2, [pair] * num_held_out, {})
    found = step2_reward.score_statistics(role, SimpleNamespace(pad_token_id=0), data)
    assert found == {"mean": 3.0, "std": 2.0, "count": count, "on": on}
    assert ("stage ppo will normalise scores" in capsys.readouterr().err) == (num_held_out == 3)
    assert tiny_tokenizer().pad_token_id == 0  # what ROWS above takes for granted


@pytest.mark.parametrize("has_template", [True, False])
def test_a_chat_template_that_is_added_is_said(tmp_path, capsys, has_template) -> None:
    words = short_sft(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "base"))
    tokenizer.chat_template = tokenizer.chat_template if has_template else None
    tokenizer.save_pretrained(tmp_path / "mine")
    if not has_template:
        (tmp_path / "mine" / "chat_template.jinja").unlink(missing_ok=True)
    model = ModelConfig(str(tmp_path / "base"), tokenizer_name_or_path=str(tmp_path / "mine"))
    data = DataConfig(sources=[Source(str(tmp_path / words[words.index("--data.sources") + 1]))])
    assert builders.open_tokenizer(model, data, STAGES["sft"].reads, 0).chat_template
    assert ("the tokenizer has none and gets ChatML" in capsys.readouterr().err) == (not has_template)
