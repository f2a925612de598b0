"""TRL's scripts with the import changed: their classes, fields, defaults and losses, with TRL itself as the oracle."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
import subprocess
import sys

import pytest
import torch

import hybrid_rlhf
from hybrid_rlhf import GKDConfig, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, UserError, trl_fields
from hybrid_rlhf.core.options import value_of
from tests.factories.processes import TORCHRUN
from tests.factories.tiny import save_tiny
from tests.project import trl_page

trl = pytest.importorskip("trl")
WORDS = ["red", "big", "old", "sad", "fun", "new", "hot", "wet"]
TOLD = [{"prompt": f"The {w} dog", "completion": f" ran to the {w} tree{' again' * i}."} for i, w in enumerate(WORDS)]
TEXTS = [{"text": row["prompt"] + row["completion"]} for row in TOLD]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": f" is a cat{' no' * i}."}
         for i, row in enumerate(TOLD)]
LABELLED = [{**row, "label": i % 2 == 0} for i, row in enumerate(TOLD)]
ASKED = [{"prompt": f"\n\nHuman: Name {row['prompt']}\n\nAssistant:", "chosen": row["completion"],
          "rejected": " No."} for row in TOLD]  # strings, though they look like a conversation
TALKS = [{"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
         for row in TOLD]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("door")
    save_tiny(folder / "model")
    return folder


def theirs_of(name: str):
    module = {"GKDConfig": "trl.experimental.gkd"}.get(name, "trl")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", [name for name in trl_fields.CONFIGS if name != "PPOConfig"])  # gone since TRL 1.0
def test_every_field_of_trl_is_classified_and_has_its_default(name):
    fields = trl_fields.CONFIGS[name]
    for each in dataclasses.fields(theirs_of(name)):
        assert each.name in fields, each.name
        if each.default is not dataclasses.MISSING:
            default = getattr(each.default, "value", each.default)
            assert fields[each.name].default == default, (each.name, default)
    assert not fields.keys() - {each.name for each in dataclasses.fields(theirs_of(name))}


def test_the_page_has_the_table_of_fields():
    page = trl_page.PAGE.read_text(encoding="utf-8")
    assert page == trl_page.written(page), "python -m tests.project.trl_page writes it anew"


def test_an_option_that_a_field_names_exists():
    stages = {"SFTConfig": "sft", "DPOConfig": "dpo", "KTOConfig": "kto", "RewardConfig": "reward",
              "GRPOConfig": "grpo", "RLOOConfig": "rloo", "PPOConfig": "ppo", "GKDConfig": "distill"}
    for name, fields in trl_fields.CONFIGS.items():
        row = hybrid_rlhf.training.registry.STAGES[stages[name]]
        config = importlib.import_module(row.module).Config()
        for field in fields.values():
            if field.option:
                value_of(config, field.option)


def losses(place, capsys, trainer: str, rows: list, **given) -> tuple[list[float], list[float]]:
    """Of four steps on all of eight rows: TRL's and ours, both with TRL's other defaults."""
    from datasets import Dataset

    config, model = trainer.replace("Trainer", "Config"), str(place / "model")
    given = {"max_steps": 4, "logging_steps": 1, "bf16": False, "report_to": "none", "save_strategy": "no", **given}
    data = Dataset.from_list(rows)
    given["use_cpu"] = True
    oracle = getattr(trl, trainer)(model, args=getattr(trl, config)(
        str(place / "theirs"), gradient_checkpointing=False, **given), train_dataset=data)
    oracle.train()
    capsys.readouterr()
    ours = getattr(hybrid_rlhf, trainer)(model, args=getattr(hybrid_rlhf, config)(
        str(place / f"ours{len(list(place.iterdir()))}"), **given), train_dataset=data)
    ours.train()
    theirs, found = oracle.state.log_history, ours.state.log_history
    for mine, row in zip(found, theirs, strict=False):  # the last is of the whole run
        assert (mine["num_tokens"], mine["epoch"]) == (row["num_tokens"], row["epoch"])
    if "logps/chosen" in found[0]:  # at the first step, before any update
        assert found[0]["logps/chosen"] == pytest.approx(theirs[0]["logps/chosen"], rel=1e-5)
    return [row["loss"] for row in theirs if "loss" in row], [row["loss"] for row in found if "loss" in row]


@pytest.mark.parametrize(("trainer", "rows", "given"), [
    ("SFTTrainer", TOLD, {}), ("SFTTrainer", TEXTS, {"learning_rate": 1e-3}),
    ("SFTTrainer", TOLD, {"completion_only_loss": False, "warmup_steps": 2, "weight_decay": 0.1}),
    ("SFTTrainer", TOLD, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    ("DPOTrainer", PAIRS, {"learning_rate": 1e-3}), ("DPOTrainer", PAIRS, {"loss_type": ["ipo"], "beta": 0.3}),
    ("DPOTrainer", ASKED, {"learning_rate": 1e-4}),
    ("KTOTrainer", LABELLED, {"learning_rate": 1e-3, "desirable_weight": 1.3})])
def test_losses_are_trl_s_step_by_step(place, capsys, trainer, rows, given):
    theirs, ours = losses(place, capsys, trainer, rows, **given)
    first = 1 if "warmup_steps" in given else 4  # TRL's warm-up begins with an update at rate 0
    assert len(ours) == 4
    assert ours[:first] == pytest.approx(theirs[:first], rel=1e-3, abs=2e-5)


def test_a_conversation_is_trained_whole_unless_only_the_assistant_is_asked_for(place):
    for given, expected in (({}, "all"), ({"assistant_only_loss": True}, "response")):
        trainer = SFTTrainer(str(place / "model"), args=SFTConfig("x", **given), train_dataset=TALKS)
        assert trainer.config.data.train_on == expected
    assert SFTTrainer("m", args=SFTConfig("x"), train_dataset=TOLD).config.data.train_on == "response"
    assert SFTTrainer("m", args=SFTConfig("x"), train_dataset=TEXTS).config.data.train_on == "all"
    assert SFTTrainer("m", args=SFTConfig("x", max_length=None), train_dataset=TEXTS).config.data.max_length == 1 << 20


def test_defaults_are_trl_s_and_a_line_has_the_launcher_s(place, capsys):
    trainer = SFTTrainer(str(place / "model"), args=SFTConfig("x", dataloader_num_workers=4), train_dataset=TOLD)
    train, data = trainer.config.train, trainer.config.data
    assert (train.learning_rate, train.num_train_epochs, train.per_device_train_batch_size) == (2e-5, 3.0, 8)
    assert (train.lr_scheduler_type, train.warmup_ratio, train.weight_decay) == ("linear", 0, 0)
    positions = json.loads((place / "model" / "config.json").read_text())["max_position_embeddings"]
    assert (data.raw, data.eval_fraction, trainer.config.seed) == (True, 0.0, 42)
    assert data.max_length == positions < 1024  # TRL's default, 1024, and no more than the model has
    told = capsys.readouterr().err
    assert "SFTConfig, as in TRL (in brackets train.py's default): train.learning_rate 2e-05 (0.0002)" in told
    assert "without effect here: dataloader_num_workers (docs/coming-from.md#trl says why)" in told


def grpo(place, **given) -> GRPOTrainer:
    return GRPOTrainer(str(place / "model"), reward_funcs=len, args=GRPOConfig("x", **given),
                       train_dataset=[{"prompt": "a"}] * 16)


@pytest.mark.parametrize(("given", "prompts", "minibatches", "steps"), [
    ({}, 1, 1, -1), ({"per_device_train_batch_size": 16, "max_steps": 5}, 2, 1, 5),
    ({"gradient_accumulation_steps": 4, "max_steps": 6, "num_iterations": 2}, 4, 1, 3),
    ({"steps_per_generation": 4, "max_steps": 9}, 4, 4, 3),
    ({"generation_batch_size": 32, "num_generations": 4, "max_steps": 8}, 8, 4, 2)])
def test_answers_and_updates_are_counted_as_trl_does(place, given, prompts, minibatches, steps):
    train = (config := grpo(place, **given).config).train
    assert (train.per_device_train_batch_size, config.ppo.num_minibatches, train.max_steps) == (
        prompts, minibatches, steps)
    theirs = trl.GRPOConfig("x", use_cpu=True, bf16=False, **given)  # its own arithmetic
    assert prompts == theirs.generation_batch_size / theirs.num_generations
    updates = theirs.num_iterations * theirs.steps_per_generation / theirs.gradient_accumulation_steps
    assert steps == -1 or steps == math.ceil(theirs.max_steps / updates)


def test_grpo_has_no_penalty_that_trl_does_not_have(place):
    config = grpo(place).config
    assert (config.ppo.kl_coef, config.ppo.missing_eos_penalty, config.ppo.normalise_scores, config.ppo.score_clip) == (
        0, 0, False, None)
    assert (config.ppo.aggregation, config.ppo.policy_loss, config.ppo.estimator) == ("token", "ppo", "grpo")
    assert config.roles.actor.learning_rate == 1e-6
    assert config.ppo.sampling.max_new_tokens == 512
    positions = json.loads((place / "model" / "config.json").read_text())["max_position_embeddings"]
    assert grpo(place, max_completion_length=20).config.data.max_prompt_length == positions - 20


@pytest.mark.parametrize(("given", "expected"), [
    ({"loss_type": "grpo"}, ("grpo", "grpo", "ppo", "sequence")),
    ({"loss_type": "bnpo", "scale_rewards": "batch"}, ("batch_grpo", "batch_grpo", "ppo", "token")),
    ({"loss_type": "dr_grpo", "scale_rewards": False}, ("dr_grpo", "dr_grpo", "ppo", "constant")),
    ({"scale_rewards": "none", "epsilon_high": 0.28}, ("dr_grpo", "dr_grpo", "ppo", "token")),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4},
     ("grpo", "grpo", "gspo", "sequence")),
    ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, ("grpo", "grpo", "gspo", "sum")),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, ("grpo", "grpo", "cispo", None)),
    ({"loss_type": "sapo", "sapo_temperature_neg": 1.2}, ("grpo", "grpo", "sapo", None)),
    ({"loss_type": "vespo", "vespo_k_neg": 2.5}, ("grpo", "grpo", "vespo", None)),
    ({"multi_objective_aggregation": "normalize_then_sum", "mask_truncated_completions": True},
     ("gdpo", "gdpo", "ppo", "token")),
    ({"beta": 0.1, "top_entropy_quantile": 0.2, "off_policy_mask_threshold": 0.3, "delta": 4.0},
     ("grpo", "grpo", "ppo", "token"))])
def test_each_loss_of_grpo_is_a_setting(place, given, expected):
    trainer = grpo(place, **given)
    ppo = trainer.config.ppo
    assert (trainer.stage, ppo.estimator, ppo.policy_loss, ppo.aggregation) == expected
    assert ppo.kl_bias_correction == ("beta" in given) and ppo.mask_truncated == ("mask_truncated_completions" in given)
    for theirs, ours in (("sapo_temperature_neg", ppo.sapo_temperature_neg), ("vespo_k_neg", ppo.vespo_k_neg),
                         ("top_entropy_quantile", ppo.top_entropy_quantile), ("delta", ppo.dual_clip)):
        assert given.get(theirs, ours) == ours


def test_rloo_has_trl_s_ratio_bounds_and_number_of_answers(place):
    ppo = hybrid_rlhf.RLOOTrainer(str(place / "model"), reward_funcs=len, args=hybrid_rlhf.RLOOConfig(
        "x", reward_clip_range=(-1.0, 2.0), normalize_advantages=True), train_dataset=[{"prompt": "a"}] * 16).config.ppo
    assert (ppo.policy_loss, ppo.sampling.num_samples, ppo.kl_coef) == ("ppo_sequence", 2, 0.05)
    assert (ppo.min_score, ppo.max_score, ppo.kl_in_reward, ppo.whitens) == (-1, 2, True, True)


def test_all_that_is_not_taken_is_told_at_once():
    with pytest.raises(UserError) as caught:
        SFTTrainer("m", args=SFTConfig("x", deepspeed="z.json", lerning_rate=1, loss_type="dft", optim="lion",
                                       model_init_kwargs={"revision": "b"}), train_dataset=TOLD, compute_metrics=len)
    lines = str(caught.value).splitlines()
    assert lines[0] == "these are not taken here:" and len(lines) == 7
    for said in ("compute_metrics is not taken here; held-out rows", "deepspeed='z.json': set engine__zero_stage",
                 "lerning_rate: SFTConfig has no such field (did you mean learning_rate?)",
                 "loss_type='dft': only the negative", "optim='lion': there are adamw",
                 "model_init_kwargs: revision is"):
        assert any(said in line for line in lines), said


def test_a_model_and_a_tokenizer_from_memory_are_trained_and_stay_as_they_are(place):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(place / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"max_steps": 2, "report_to": [], "learning_rate": 1e-3}
    trainer = SFTTrainer(model=model, args=SFTConfig(place / "memory", **given), train_dataset=TOLD,
                         processing_class=tokenizer)
    ended = trainer.train()
    assert ended.training_loss == ended.metrics["loss"] == trainer.history[-1]["loss"]
    trainer.log_metrics("train", ended.metrics), trainer.save_metrics("train", ended.metrics), trainer.save_state()
    assert json.loads((place / "memory" / "train_results.json").read_text())["loss"] == ended.training_loss
    with pytest.raises(AttributeError, match="SFTTrainer has no optimizer; there are train, evaluate"):
        print(trainer.optimizer)
    path = SFTTrainer(str(place / "model"), args=SFTConfig(place / "path", bf16=False, **given), train_dataset=TOLD)
    path.train()
    assert [row["loss"] for row in trainer.history] == [row["loss"] for row in path.history]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(trainer.model.state_dict()["lm_head.weight"], before["lm_head.weight"])
    assert trainer.save_model(str(place / "memory")) == str(place / "memory")
    again = AutoModelForCausalLM.from_pretrained(place / "memory").state_dict()  # as TRL's scripts
    assert torch.equal(again["lm_head.weight"], trainer.model.state_dict()["lm_head.weight"])
    assert trainer.processing_class.vocab_size == tokenizer.vocab_size and trainer.is_world_process_zero()


def test_peft_chooses_the_modules_as_it_does_for_trl(place):
    import peft

    trainer = SFTTrainer(str(place / "model"), args=SFTConfig("x"), train_dataset=TOLD,
                         peft_config=peft.LoraConfig(r=4, lora_dropout=0.1))
    assert trainer.config.model.lora.target_modules == ["q_proj", "v_proj"]
    assert trainer.config.model.lora.dropout == 0


def test_callbacks_are_called_as_by_transformers_and_may_stop_the_run(place):
    from transformers import EarlyStoppingCallback, TrainerCallback

    class Notes(TrainerCallback):
        def __init__(self):
            self.events = []

        def __getattribute__(self, name):
            if not name.startswith("on_"):
                return super().__getattribute__(name)

            def note(args, state, control, **facts):
                self.events.append((name, state.global_step))
                assert args.per_device_train_batch_size == 4 and facts["model"].training in (True, False)
                if name == "on_step_end" and state.global_step == 3:
                    control.should_training_stop = True
                if name == "on_step_end":
                    control.should_save = state.global_step == 2
                if name == "on_evaluate":
                    assert "eval_loss" in facts["metrics"]
                return control
            return note

    notes = Notes()
    trainer = SFTTrainer(str(place / "model"), args=SFTConfig(
        place / "noted", max_steps=9, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2,
        logging_steps=2, save_strategy="no"), train_dataset=TOLD, eval_dataset=TOLD[:2], callbacks=[notes])
    trainer.train()
    assert [event for event in notes.events if event[0] != "on_log"] == [
        ("on_train_begin", 0), ("on_epoch_begin", 0), ("on_step_begin", 0), ("on_step_end", 1), ("on_step_begin", 1),
        ("on_step_end", 2), ("on_epoch_end", 2), ("on_epoch_begin", 2), ("on_evaluate", 2), ("on_save", 2),
        ("on_step_begin", 2), ("on_step_end", 3), ("on_evaluate", 3), ("on_save", 3), ("on_epoch_end", 3),
        ("on_train_end", 3)]
    assert trainer.state.global_step == 3 and any("eval_loss" in row for row in trainer.state.log_history)
    stopping = SFTTrainer(str(place / "model"), args=SFTConfig(
        place / "early", max_steps=20, learning_rate=1e-9, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss"), train_dataset=TOLD, eval_dataset=TOLD[:2],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.5)])
    stopping.train()
    assert stopping.state.global_step == 3


def test_the_best_checkpoint_is_what_is_exported_where_trl_would_load_it(place):
    trainer = SFTTrainer(str(place / "model"), args=SFTConfig(
        place / "best", max_steps=6, learning_rate=0.3, lr_scheduler_type="constant", eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, bf16=False), train_dataset=TOLD,
        eval_dataset=[{"prompt": "x y", "completion": " z"}])
    trainer.train()
    measured = {row["step"]: row["eval/loss"] for row in trainer.history if "eval/loss" in row}
    best = min(measured, key=measured.get)
    assert best < 6
    last = SFTTrainer(str(place / "model"), args=SFTConfig(
        place / "cut", max_steps=best, learning_rate=0.3, lr_scheduler_type="constant", bf16=False), train_dataset=TOLD)
    last.train()
    assert trainer.evaluate()["eval_loss"] == measured[best]
    ours, theirs = (each.model.state_dict() for each in (trainer, last))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(UserError, match="greater_is_better=True: the best loss is the smallest here"):
        SFTTrainer("m", args=SFTConfig("x", load_best_model_at_end=True, greater_is_better=True), train_dataset=TOLD)


@pytest.mark.parametrize(("count", "given", "updates"), [
    (5, {"per_device_train_batch_size": 4}, 6), (9, {"num_train_epochs": 100.0}, 200), (64, {"max_steps": 7}, 7)])
def test_warm_up_and_epochs_are_of_the_updates_that_the_run_makes(place, count, given, updates):
    train = SFTTrainer("m", args=SFTConfig("x", warmup_steps=4, save_strategy="epoch", **given),
                       train_dataset=TEXTS[:1] * count).config.train
    assert train.warmup_ratio * updates == pytest.approx(4)
    assert train.save_steps == (2 if count < 64 else 8)
    with pytest.raises(UserError, match="warmup_steps=4: the number of rows is not known"):
        SFTTrainer("m", args=SFTConfig("x", warmup_steps=4), train_dataset=["a.jsonl"])


def test_fifteen_prompts_make_the_updates_that_the_run_makes_of_them(place):
    config = GRPOConfig("x", per_device_train_batch_size=64, num_iterations=2, warmup_steps=3)
    train = GRPOTrainer(str(place / "model"), reward_funcs=len, args=config,
                        train_dataset=[{"prompt": "a"}] * 15).config.train
    assert train.warmup_ratio == pytest.approx(3 / 6)  # 3 epochs of one rollout, used twice


def test_attributes_that_are_set_later_count_as_those_given_at_once():
    config = SFTConfig("x")
    config.bf16, config.gradient_checkpointing, config.dataloader_num_workers = False, True, 2
    model = SFTTrainer("m", args=config, train_dataset=TOLD).config.model
    assert (model.dtype, model.gradient_checkpointing) == ("float32", True) and config.idle() == [
        "dataloader_num_workers"]
    config.neftune_noise_alpha = 5
    with pytest.raises(UserError, match="neftune_noise_alpha=5: it is not offered"):
        SFTTrainer("m", args=config, train_dataset=TOLD)
    assert SFTTrainer("m", args=SFTConfig("x", bf16=None), train_dataset=TOLD).config.model.dtype == "auto"


def test_samples_under_top_p_and_calls_of_tools_are_trl_s(place):
    def ask(question: str) -> str:
        """Answers a question.

        Args:
            question: What is asked.
        """
        return question

    config = GRPOTrainer(str(place / "model"), reward_funcs=len, tools=[ask], train_dataset=[{"prompt": "a"}] * 16,
                         args=GRPOConfig("x", top_p=0.5, max_tool_calling_iterations=1)).config
    assert config.ppo.replay_truncation is False and config.environment.max_turns == 2


def test_conversations_in_a_file_are_trained_as_those_in_memory(tmp_path):
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TALKS))
    for rows in (str(tmp_path / "talks.jsonl"), [str(tmp_path / "talks.jsonl")]):
        assert SFTTrainer("m", args=SFTConfig("x"), train_dataset=rows).config.data.train_on == "all"


def test_a_callback_that_waits_for_what_does_not_come_is_refused():
    from transformers import TrainerCallback

    class Waits(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **facts):
            pass

    with pytest.raises(UserError, match=r"Waits\.on_optimizer_step would never be called; use on_step_end"):
        SFTTrainer("m", args=SFTConfig("x"), train_dataset=TOLD, callbacks=[Waits])


def test_rows_that_can_be_read_once_lose_none(place):
    trainer = SFTTrainer(str(place / "model"), args=SFTConfig("x"), train_dataset=(row for row in TOLD))
    assert [json.loads(line) for line in trainer._rows["data.sources"].text.splitlines()] == TOLD
    assert trainer.config.data.train_on == "response"


def test_ppo_counts_rollouts_and_minibatches_as_trl_0_24_does(place):
    config = hybrid_rlhf.PPOTrainer(str(place / "model"), reward_funcs=len, train_dataset=[{"prompt": "a"}] * 100,
                                    args=hybrid_rlhf.PPOConfig(
        "x", per_device_train_batch_size=5, gradient_accumulation_steps=4, num_mini_batches=2, total_episodes=1000,
        save_strategy="epoch", response_length=8)).config
    assert (config.train.per_device_train_batch_size, config.ppo.num_minibatches) == (20, 2)
    assert (config.train.max_steps, config.train.save_steps, config.roles.actor.learning_rate) == (50, 5, 5e-5)
    assert config.ppo.num_ppo_epochs == 4
    assert (config.ppo.kl_coef, config.ppo.sampling.temperature, config.ppo.whitens) == (0.05, 0.7, True)


def test_a_text_column_of_another_name_and_a_formatting_function(place):
    named = SFTTrainer(str(place / "model"), args=SFTConfig("x", dataset_text_field="words"),
                       train_dataset=[{"words": "a b", "text": "other"}])
    assert json.loads(named._rows["data.sources"].text) == {"text": "a b"}
    made = SFTTrainer(str(place / "model"), args=SFTConfig("x"), train_dataset=[{"q": "a"}],
                      formatting_func=lambda row: f"<{row['q']}>")
    assert json.loads(made._rows["data.sources"].text) == {"text": "<a>"}


def test_trackers_have_the_name_of_the_run(place):
    pytest.importorskip("tensorboard")
    for name in (None, "third try"):
        SFTTrainer(str(place / "model"), args=SFTConfig(
            place / f"tracked{name}", max_steps=1, report_to="tensorboard", run_name=name), train_dataset=TOLD).train()
        assert [path.name for path in (place / f"tracked{name}" / "trackers").iterdir()] == [name or "sft"]


def test_push_to_hub_without_a_login_is_said_before_training():
    with pytest.raises(UserError, match=r"push_to_hub: the hub cannot be reached or does not .*; run `hf auth"):
        SFTTrainer("m", args=SFTConfig("x", push_to_hub=True), train_dataset=TOLD)


def test_gkd_is_distillation_by_the_jensen_shannon_divergence(place):
    trainer = hybrid_rlhf.GKDTrainer(str(place / "model"), teacher_model=str(place / "model"), train_dataset=TOLD,
                                     args=GKDConfig("x", lmbda=1.0))
    distill = trainer.config.distill
    assert (distill.divergence, distill.beta, distill.lmbda, distill.sampling.max_new_tokens) == ("jsd", 0.5, 1.0, 128)


SCRIPT = """from hybrid_rlhf import GRPOConfig, GRPOTrainer
trainer = GRPOTrainer(model={model!r}, reward_funcs=lambda completions, **rest: [len(c) / 9 for c in completions],
                      args=GRPOConfig({out!r}, max_steps=2, max_completion_length=4),
                      train_dataset=[{{"prompt": "a"}}] * 8)
print("steps", len([row for row in trainer.train() and trainer.history if "reward" in row]))
"""


@pytest.mark.slow
@pytest.mark.dist
def test_a_script_trains_in_several_processes_and_says_when_there_is_one(place):
    (place / "script.py").write_text(SCRIPT.format(model=str(place / "model"), out=str(place / "two")))
    done = subprocess.run([*TORCHRUN, "--nproc_per_node", "2", str(place / "script.py")], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("steps 2") == 2 and "run: 2 steps of 2 prompts with 8 responses each" in done.stderr
    (place / "script.py").write_text(SCRIPT.format(model=str(place / "model"), out=str(place / "one")))
    done = subprocess.run([sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu",
                           str(place / "script.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("accelerate launch made one process; --num_processes 2 makes two") == 1


# -- images ------------------------------------------------------------------------------------------------------------


def test_rows_with_images_train_as_in_trl_with_a_processor_and_pillow_s_images(tmp_path):
    """SFT of a model object beside TRL on its own batches, two steps, all weights: the losses."""
    from PIL import Image

    from hybrid_rlhf.models.images import load_reader
    from tests.factories.vision import folder, image_files, image_text_model

    processor, model = copy.deepcopy(load_reader(folder("qwen3_vl"))._processor), image_text_model("qwen3_vl")
    # without the line break behind a turn, of which TRL trains the last one too
    processor.chat_template = processor.tokenizer.chat_template = processor.chat_template.replace("|>\\n' }}", "|>' }}")
    rows = [{"messages": [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": said}],
             "images": [Image.open(image.path)]} for said, image in zip(("a fox", "the sky", "no"), image_files(),
                                                                        strict=True)]
    options = dict(output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=3, learning_rate=1e-3,
                   report_to="none", max_length=None, logging_steps=1, lr_scheduler_type="constant", seed=1)
    ours = SFTTrainer(model=copy.deepcopy(model), args=SFTConfig(**options),
                                  train_dataset=rows, processing_class=processor)
    ours.train()
    datasets = pytest.importorskip("datasets")
    theirs = trl.SFTTrainer(model=model, args=trl.SFTConfig(**options, use_cpu=True, bf16=False,
                                                            gradient_checkpointing=False, save_strategy="no"),
                            train_dataset=datasets.Dataset.from_list(rows).cast_column(
                                "images", datasets.List(datasets.Image())), processing_class=processor)
    theirs.train()
    losses = [[row["loss"] for row in trainer.state.log_history if "loss" in row] for trainer in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
