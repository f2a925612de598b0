"""What TRL's users write: what is the same here does what the command line does, and the rest is one line."""

from __future__ import annotations

import importlib
import inspect
import json
import re

import pytest
import safetensors.torch
import torch

from hybrid_rlhf import (
    DPOConfig,
    DPOTrainer,
    GKDConfig,
    GKDTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
    UserError,
    trl_fields,
    trl_words,
)
from hybrid_rlhf.api_inputs import dotted
from hybrid_rlhf.cli import main
from hybrid_rlhf.training.registry import STAGES
from tests.project.docs_blocks import documents_folder

ROWS = [{"prompt": f"say {i}", "completion": str(i)} for i in range(12)]
APART = [{"prompt": f"tell {i}", "completion": str(i)} for i in range(3)]
SHORT = {"max_steps": 2, "per_device_train_batch_size": 4, "dtype": "float32", "num_fixed_prompts": 0}
FLAGS = ["--train.max_steps=2", "--train.per_device_train_batch_size=4", "--model.dtype=float32",
         "--train.num_fixed_prompts=0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with documents_folder(tmp_path_factory.mktemp("trl")) as folder:
        yield folder


@pytest.fixture(scope="module")
def lora(place):
    """A run as TRL's users write it."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(model="my-model", train_dataset=ROWS, eval_dataset=APART, peft_config=config, logging_steps=1,
                         save_steps=1, output_dir="runs/lora", **SHORT)
    trainer.train()
    return trainer


def weights(folder) -> dict:
    return safetensors.torch.load_file(folder / "model/model.safetensors")


def test_it_is_the_run_of_the_command_line_with_the_same_settings(place, lora):
    for name, rows in (("rows", ROWS), ("apart", APART)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["sft", "--model", "my-model", "--data.sources=rows.jsonl", "--data.eval_sources=apart.jsonl",
                 "--data.eval_fraction=0", "--model.lora.r=4", "--model.lora.alpha=12",
                 "--model.lora.target_modules=[q_proj, v_proj]", "--output_dir=runs/words", *FLAGS]) == 0
    ours, theirs = weights(place / "runs/lora"), weights(place / "runs/words")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    record = json.loads((place / "runs/words/run.json").read_text())
    assert lora.evaluate() == {k: v for k, v in record["metrics"].items() if k.startswith("eval/")}
    assert lora.evaluate()["eval/loss"] > 0 and record["facts"]["data"]["held_out"] == len(APART)


def test_the_history_is_what_was_written_of_each_step(place, lora):
    rows = [json.loads(line) for line in (place / "runs/lora/metrics.jsonl").read_text().splitlines()]
    assert lora.history == rows and [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert SFTTrainer("my-model", ROWS, output_dir="runs/none").history == []


@pytest.mark.slow
def test_save_model_writes_what_the_export_does(place, lora):
    assert lora.save_model() == "runs/lora/model"
    assert lora.save_model("saved") == "saved"
    assert main(["export", "--model", "runs/lora", "--output_dir", "exported"]) == 0
    names = sorted(path.name for path in (place / "exported").iterdir())
    assert sorted(path.name for path in (place / "saved").iterdir()) == names and "tokenizer.json" in names
    assert (place / "saved/model.safetensors").read_bytes() == (place / "exported/model.safetensors").read_bytes()
    with pytest.raises(UserError, match="saved is not empty"):
        lora.save_model("saved")


def test_push_to_hub_uploads_the_folder_of_the_model(lora, monkeypatch):
    import huggingface_hub

    calls = []

    class Hub:
        def create_repo(self, name, **options):
            calls.append((name, options))

        def upload_folder(self, **options):
            calls.append(options["folder_path"])
            return "https://hub/me/mine"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert lora.push_to_hub("me/mine") == "https://hub/me/mine"
    assert calls[0] == ("me/mine", {"private": True, "exist_ok": True}) and str(calls[1]) == "runs/lora/model"


@pytest.mark.slow
def test_resume_from_checkpoint_goes_on_or_begins_again(place, capsys):
    def trainer(**more):
        return SFTTrainer("my-model", ROWS, output_dir="runs/again", save_steps=1, lr_scheduler_type="constant",
                          warmup_ratio=0, **{**SHORT, **more})

    with pytest.raises(UserError, match="resume_from_checkpoint: runs/again holds no checkpoint to go on from"):
        trainer().train(resume_from_checkpoint=True)
    first = trainer().train(resume_from_checkpoint=False)
    assert trainer().train(resume_from_checkpoint=True) == first and "nothing to do" in capsys.readouterr().err
    longer = trainer(max_steps=3)
    checkpoint = next((place / "runs/again/checkpoints").glob("*2"))
    assert longer.train(resume_from_checkpoint=checkpoint)
    assert [row["step"] for row in longer.history if "loss" in row] == [1, 2, 3]
    assert f"from {checkpoint.name}" in capsys.readouterr().err
    assert trainer().train(resume_from_checkpoint=False)["loss"] == first["loss"]
    assert "started again from the beginning" in capsys.readouterr().err


def test_what_a_cell_ends_with_is_one_line_and_a_dict_all_the_same(lora):
    class Printer:
        said = ""

        def text(self, words):
            self.said += words

    printer, metrics = Printer(), lora.metrics
    metrics._repr_pretty_(printer, False)
    assert re.fullmatch(rf"{len(metrics)} metrics, of which loss [\d.]+, eval/loss [\d.]+, "
                        r"mean_token_accuracy [\d.e-]+, eval/mean_token_accuracy [\d.e-]+", printer.said), printer.said
    assert metrics == dict(metrics) and json.loads(json.dumps(metrics)) == metrics


def test_variants_have_trl_s_names():
    assert KTOTrainer("my-model", "x.jsonl").stage == "kto"
    assert RLOOTrainer("my-model", "x.jsonl", reward_funcs="pay.py:f", epsilon=0.3, num_iterations=2,
                       reward_weights=[2.0]).config.ppo.cliprange == 0.3


def peft_config(**given):
    import peft

    return peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **given})


def test_a_lora_config_is_what_it_says_at_stages_with_and_without_dropout():
    ours = GRPOTrainer("my-model", "x.jsonl", "pay.py:f", peft_config=peft_config(lora_alpha=3)).config.model.lora
    assert (ours.r, ours.alpha, ours.dropout, ours.target_modules) == (4, 3, 0.0, "all-linear")
    ours = SFTTrainer("my-model", "x.jsonl", peft_config=peft_config(
        lora_dropout=0.25, target_modules=["v_proj", "q_proj"])).config.model.lora
    assert (ours.r, ours.alpha, ours.dropout, ours.target_modules) == (4, 8, 0.25, ["q_proj", "v_proj"])


@pytest.mark.parametrize(("make", "said"), [
    (lambda: GRPOTrainer("my-model", ROWS, args=object()), "args is a builtins.object; this trainer takes a GRPO"),
    (lambda: GRPOTrainer("my-model", ROWS, len, args=SFTConfig()), r"SFTConfig; this trainer takes a GRPO"),
    (lambda: GRPOTrainer("my-model", ROWS, processing_class=1), "processing_class is a int; give a tokenizer"),
    (lambda: SFTTrainer("my-model", ROWS, callbacks=[3]), "callbacks: 3 is not a transformers.TrainerCallback"),
    (lambda: SFTTrainer("my-model", ROWS, bf16=True), r"bf16 is not an option here; args=SFTConfig\(bf16=...\) takes"),
    (lambda: SFTTrainer("my-model", ROWS, args=SFTConfig(report_to="clearml")), "report_to clearml: its package is"),
    (lambda: SFTTrainer("my-model", "rows.jsonl", args=SFTConfig(dataset_text_field="t")), "need rows in memory"),
    (lambda: DPOTrainer("my-model", ROWS, ref_model="x"), "ref_model is not taken here; the reference is"),
    (lambda: SFTTrainer("my-model", trl_config()), "args is a trl.*; this trainer takes a SFTConfig of hybrid"),
    (lambda: DPOTrainer("my-model", "x", DPOConfig(), None, ROWS), "ref_model is not taken here; the reference is"),
    (lambda: SFTTrainer("my-model", SFTConfig(), len, ROWS), "data_collator is not taken here; rows are made into"),
    (lambda: SFTTrainer("my-model", ROWS, train_dataset=ROWS, args=SFTConfig()), "args is given by position and by"),
    (lambda: SFTTrainer("my-model", ROWS, None), "SFTTrainer takes 2 arguments by position: model, train_dataset;"),
    (lambda: DPOTrainer("my-model", ROWS, formatting_func=str), "formatting_func: DPOTrainer has none; give rows"),
    (lambda: SFTTrainer("my-model", ROWS, eval_dataset={"a": ROWS}), "eval_dataset is a mapping of a; give one"),
    (lambda: SFTTrainer("my-model", ROWS, eval_dataset=[3]), "eval_dataset: row 1 is a int"),
    (lambda: SFTTrainer("my-model", ROWS, peft_config=3), "peft_config is a int; give a peft.LoraConfig"),
    (lambda: SFTTrainer("my-model", ROWS, peft_config=peft_config(use_dora=True)), "peft_config: use_dora=True is not"),
    (lambda: SFTTrainer("my-model", ROWS, peft_config=peft_config(bias="all")), "peft_config: bias='all' is not taken"),
    (lambda: SFTTrainer("my-model", ROWS, peft_config=peft_config(target_modules=None)), "write target_modules='all"),
    (lambda: SFTTrainer("my-model", ROWS, peft_config=peft_config(), model__lora__r=4),
     "peft_config and model.lora.r are both given"),
    (lambda: DPOTrainer("my-model", ROWS, peft_config=peft_config(lora_dropout=0.1)), "model.lora.dropout is not used"),
    (lambda: SFTTrainer("my-model", ROWS, output_dir="runs/none").evaluate(), "holds no model yet; call train"),
    (lambda: SFTTrainer("my-model", ROWS, output_dir="runs/none").save_model("x"), "holds no model yet; call train"),
])
def test_what_is_not_taken_is_said_in_one_line_with_what_to_write(place, make, said):
    with pytest.raises(UserError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_run_without_held_out_rows_has_no_evaluation(place):
    trainer = SFTTrainer("my-model", ROWS, eval_fraction=0.0, output_dir="runs/whole", **SHORT)
    trainer.train()
    with pytest.raises(UserError, match="runs/whole has evaluated nothing; give eval_dataset"):
        trainer.evaluate()


def test_classes_of_trl_that_are_not_here_are_named_with_what_to_use():
    with pytest.raises(ImportError, match=r"no ORPOTrainer; use DPOTrainer.loss_type='orpo'"):
        from hybrid_rlhf import ORPOTrainer  # noqa: F401
    with pytest.raises(ImportError, match="no DistillationConfig; use GKDConfig"):
        from hybrid_rlhf import DistillationConfig  # noqa: F401


def test_every_argument_of_trl_s_trainers_is_taken_or_refused():
    import trl

    for ours, theirs in ((SFTTrainer, trl.SFTTrainer), (RewardTrainer, trl.RewardTrainer), (DPOTrainer, trl.DPOTrainer),
                         (GRPOTrainer, trl.GRPOTrainer), (RLOOTrainer, trl.RLOOTrainer), (KTOTrainer, trl.KTOTrainer)):
        given = list(inspect.signature(theirs.__init__).parameters)[1:]
        taken = {*inspect.signature(ours).parameters, *trl_words.ARGUMENTS, *ours._MODELS}
        assert taken.issuperset(given) and ours._ORDER.split() == given, theirs


def in_order(trainer: type, config: object, **values: object) -> dict:
    """By position in TRL's order, up to the last that is given -> those of the trainer's settings that say so."""
    names = trainer._ORDER.split()
    named = {"args": config, "model": "my-model", **values}
    given = [named.get(name) for name in names]
    while given[-1] is None:
        given.pop()
    made = trainer(*given)
    return {"data": made._rows["data.sources"].text.count("\n"), "model": made.config.model.model_name_or_path,
            "callbacks": len(made.callbacks)}


def test_arguments_stand_in_trl_s_order_too():
    from transformers import TrainerCallback

    expected = {"data": len(ROWS), "model": "my-model", "callbacks": 1}
    more = {"train_dataset": ROWS, "eval_dataset": APART, "callbacks": [TrainerCallback]}
    for trainer, config in ((SFTTrainer, SFTConfig("x")), (RewardTrainer, RewardConfig("x")),
                            (DPOTrainer, DPOConfig("x")), (KTOTrainer, KTOConfig("x"))):
        assert in_order(trainer, config, **more) == expected
    for trainer, config in ((GRPOTrainer, GRPOConfig("x")), (RLOOTrainer, RLOOConfig("x"))):
        assert in_order(trainer, config, reward_funcs=[len, len], **more) == expected
    acting = [{"train_dataset": ROWS, "reward_funcs": len, "args": GRPOConfig("x"), "model": "my-model",
               "tools": ["pay.py:f"]}.get(name) for name in GRPOTrainer._ORDER.split()]
    assert GRPOTrainer(*acting).config.environment.tools == ["pay.py:f"]
    distilled = GKDTrainer("my-model", "teacher", GKDConfig("x"), None, ROWS)
    assert distilled.config.roles.teacher.model_name_or_path == "teacher"
    ppo = PPOTrainer(PPOConfig("x"), None, "my-model", None, "judge", ROWS, None, None, APART)
    assert ppo.config.roles.reward.model_name_or_path == "judge" and len(ppo._rows["data.eval_sources"].text)
    functions = GRPOTrainer("my-model", [len, len], train_dataset=ROWS).functions
    assert list(functions) == list(GRPOTrainer("my-model", ROWS, [len, len]).functions) == ["len", "len_2"]


def test_a_reference_of_the_weights_that_are_trained_is_taken(place):
    from transformers import AutoModelForCausalLM

    one, other = (AutoModelForCausalLM.from_pretrained(place / "my-model") for _ in range(2))
    assert DPOTrainer(one, other, DPOConfig("x"), None, ROWS).stage == "dpo"
    other.lm_head.weight.data += 1
    with pytest.raises(UserError, match="ref_model is not taken here"):
        DPOTrainer(one, other, DPOConfig("x"), None, ROWS)


def test_the_options_that_are_to_be_written_instead_exist():
    configs = [importlib.import_module(row.module).Config for row in STAGES.values()]
    notes = [field.note for fields in trl_fields.CONFIGS.values() for field in fields.values()]
    for text in (*trl_words.ARGUMENTS.values(), *notes):
        for name in re.findall(r"(\w+)=", text):
            if name in ("reward_funcs", "peft_config", "tools", "environment_factory"):
                continue  # of the trainers themselves
            if name not in ("lmbda", "CUDA_VISIBLE_DEVICES"):
                assert any(fits(config, name) for config in configs), name


def test_a_subclass_with_a_method_that_nothing_would_call_is_refused():
    with pytest.raises(UserError, match=r"Mine\.compute_loss would never be called; .* write a step of your"):
        class Mine(SFTTrainer):
            def compute_loss(self, model, inputs):
                return 0.0

    class Other(SFTTrainer):
        """One that does something more."""

        def train(self, *given, **named):
            return {"mine": super().train(*given, **named)}

    assert isinstance(Other("my-model", ROWS, output_dir="runs/other"), SFTTrainer)


def trl_config():
    import trl

    return trl.SFTConfig(output_dir="runs/theirs", use_cpu=True, bf16=False)


def fits(config, name) -> bool:
    try:
        return bool(dotted(config, {name: 1}))
    except UserError:
        return False
