"""--stage dpo and its variants through the launcher: what they leave, and what must not depend on how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.cli import main
from tests.factories.tiny import own_cache, save_tiny

WORDS = ["red", "blue", "green sea", "cat", "a small dog", "fox", "sun", "the moon", "tree", "old book"]
COMMON = ["--model.dtype", "float32", "--data.split", "null", "--data.eval_fraction", "0.25", "--data.max_length", "48",
          "--train.max_steps", "6", "--train.per_device_train_batch_size", "8", "--train.learning_rate", "1e-3"]
VARIANTS = ["dpo", "ipo", "hinge", "kto", "orpo", "simpo"]
REPORTED = {"loss", "grad_norm", "learning_rate", "rewards/chosen", "rewards/rejected", "rewards/margins",
            "logps/chosen", "logps/rejected", "time/step"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline")
    tables = {"pairs": [{"prompt": f"say {w} {i}", "chosen": w, "rejected": "no no"} for i in range(3) for w in WORDS],
              "labels": [{"prompt": f"say {w} {i}", "completion": w if i % 2 else "no no", "label": bool(i % 2)}
                         for i in range(4) for w in WORDS],
              "ranked": [{"prompt": f"say {w} {i}", "completions": [w, "no", "never"], "scores": [2.5, -1, 0]}
                         for i in range(3) for w in WORDS]}
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    save_tiny(folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def launch(place: Path, stage: str, out: str, *more: str, data: str = "pairs") -> Path:
    assert main(["--stage", stage, "--output_dir", f"{place}/{out}", "--model.model_name_or_path", f"{place}/base",
                 f"--data.sources=[{{path: {place}/{data}.jsonl}}]", *COMMON, *more]) == 0
    return place / out


def lines(out: Path) -> list[dict]:
    """The lines of metrics.jsonl without what the clock says."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k != "micro_batch_tokens"} for row in rows]


def close(a: Path, b: Path, rel: float) -> None:
    for left, right in zip(lines(a), lines(b), strict=True):
        names = [n for n in left if not n.startswith(("time/", "memory/"))]
        if abs(left.get("rewards/margins", 1.0)) < 1e-5:  # still the reference: the side on which
            names = [n for n in names if n != "rewards/accuracies"]  # a margin of 0 falls is a matter of rounding
        assert {n: left[n] for n in names} == pytest.approx({n: right[n] for n in names}, rel=rel, abs=1e-5)


@pytest.mark.parametrize("stage", VARIANTS)
def test_a_variant_runs_to_an_exported_model_and_prefers_what_was_chosen(place, stage) -> None:
    from transformers import AutoModelForCausalLM

    out = launch(place, stage, stage)
    steps = [row for row in lines(out) if "loss" in row]
    record = json.loads((out / "run.json").read_text())
    assert (record["stage"], record["status"]) == (stage, "finished")
    assert record["config"]["dpo"]["loss_type"] == ("sigmoid" if stage == "dpo" else stage)
    assert len(steps) == 6 and all(row.keys() >= REPORTED for row in steps), REPORTED - steps[0].keys()
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"] + 0.02
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert "eval/rewards/margins" in lines(out)[-1] and "eval/loss" in lines(out)[-1]
    if stage not in ("orpo", "simpo"):  # the policy starts as its reference
        assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(out / "model")
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True))


def test_kto_reads_labels_as_well_as_pairs(place) -> None:
    steps = [row for row in lines(launch(place, "kto", "labels", data="labels")) if "loss" in row]
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"] + 0.02
    assert all("kl" in row for row in steps)


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_small_micro_batches_and_checkpointing_change_no_number(place, stage) -> None:
    close(launch(place, stage, f"{stage}-micro", "--engine.micro_batch_tokens", "40",
                 "--model.gradient_checkpointing", "true"), launch(place, stage, stage), 1e-3)


@pytest.mark.slow
def test_with_adapters_the_reference_is_the_base_itself_and_the_numbers_are_those_of_a_copy(place, monkeypatch) -> None:
    from hybrid_rlhf.models.lora import LoraConfig
    from hybrid_rlhf.training import preferences

    lora = ["--model.lora.r", "4", "--train.learning_rate", "1e-2"]
    shared = launch(place, "dpo", "shared", *lora)
    assert (shared / "adapter" / "adapter_config.json").exists()
    opened = preferences.open_roles

    def apart(config, model, tokenizer, steps):
        """The same adapter, and a reference with weights of its own."""
        policy, reference = opened(config, model, tokenizer, steps)
        assert reference.engine.model is policy.engine.model
        copy = preferences.builders.open_policy(preferences.reference_model(model), tokenizer, 0, dropout=False)
        assert preferences.reference_model(model).lora == LoraConfig()
        return policy, preferences.Reference(preferences.builders.policy_engine(copy.requires_grad_(False), tokenizer))

    monkeypatch.setattr(preferences, "open_roles", apart)
    close(shared, launch(place, "dpo", "apart", *lora), 1e-4)
    steps = [row for row in lines(shared) if "loss" in row]
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["rewards/margins"] > 0.02


def test_a_rerun_of_a_finished_run_does_nothing_and_the_plan_knows_the_reference(place, capfd) -> None:
    launch(place, "ipo", "twice")
    launch(place, "ipo", "twice")
    assert "this ipo run is finished; nothing to do" in capfd.readouterr().err
    argv = ["--stage", "dpo", "--plan", "--model.model_name_or_path", f"{place}/base", *COMMON]
    assert main([*argv, f"--data.sources=[{{path: {place}/pairs.jsonl}}]"]) == 0
    out = capfd.readouterr().out
    assert "policy" in out and "reference" in out


def test_conditional_sft_trains_on_every_answer_with_its_score_in_the_prompt(place, capfd) -> None:
    more = ["--data.score_template", "{prompt} [{score:.1f}]:"]
    capfd.readouterr()
    assert main(["--stage", "conditional_sft", "--preview", "--model.model_name_or_path", f"{place}/base",
                 f"--data.sources=[{{path: {place}/ranked.jsonl}}]", *COMMON, *more]) == 0
    shown = capfd.readouterr().out
    assert all(part in shown for part in ("[2.5]:", "⟦red", "[-1.0]:", "⟦no", "[0.0]:", "⟦never"))
    out = launch(place, "conditional_sft", "conditional", *more, data="ranked")
    steps = [row for row in lines(out) if "loss" in row]
    assert json.loads((out / "run.json").read_text())["stage"] == "conditional_sft"
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_a_score_goes_into_the_last_user_turn() -> None:
    from hybrid_rlhf.data.examples import with_score

    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert with_score(messages, 1.0, "{prompt} = {score:g}") == [messages[0], {"role": "user", "content": "q = 1"}]
    assert messages[1]["content"] == "q"
