"""The stages from Python, on a tiny model: the page's code runs, what comes back is usable, and errors are one line."""

from __future__ import annotations

import json
import linecache
import subprocess
import sys

import pytest
import torch

import hybrid_rlhf
from hybrid_rlhf import DistillTrainer, DPOTrainer, GRPOTrainer, PPOTrainer, RewardTrainer, SFTTrainer, UserError
from hybrid_rlhf.api_inputs import dotted, environments_of
from hybrid_rlhf.rewards.functions import open_functions
from hybrid_rlhf.training import step3_ppo
from tests.factories.chats import without_end
from tests.project.docs_blocks import ROOT, blocks, documents_folder

PAGE = [b for b in blocks() if b.page == "docs/guide/from-python.md" and b.language == "python"]
SHORT = {"max_steps": 1, "per_device_train_batch_size": 4, "dtype": "float32", "num_fixed_prompts": 0}
ROWS = [{"prompt": f"say {i}", "completion": str(i)} for i in range(12)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with documents_folder(tmp_path_factory.mktemp("python")) as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("block", PAGE, ids=[b.name for b in PAGE])
def test_the_code_of_the_page_runs(place, block, capsys) -> None:
    exec(compile(block.text, block.name, "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.strip()


def test_the_package_is_imported_without_torch() -> None:
    code = "import hybrid_rlhf, sys; assert 'SFTTrainer' in dir(hybrid_rlhf); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'SFTTrainr'"):
        _ = hybrid_rlhf.SFTTrainr


@pytest.fixture(scope="module")
def sft(place):
    trainer = SFTTrainer("my-model", ROWS, output_dir="runs/sft", eval_fraction=0.2, **SHORT)
    trainer.train()
    return trainer


def test_a_model_of_rows_from_memory_answers_as_plain_transformers_does(place, sft) -> None:
    assert sft.metrics["eval/loss"] > 0 and not sft.model.training
    record = json.loads((place / "runs/sft/run.json").read_text())
    assert record["status"] == "finished" and record["facts"]["data"]["read"] == 12
    path = record["config"]["data"]["sources"][0]["path"]
    assert [json.loads(line) for line in (place / path).read_text().splitlines()] == ROWS
    asked = [{"role": "user", "content": "say 3"}]
    ids = sft.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    plain = sft.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    said = without_end(sft.tokenizer, plain[0, ids.shape[1]:].tolist())
    assert sft.generate(asked, max_new_tokens=6) == sft.generate("say 3", max_new_tokens=6) == said
    assert sft.generate(["say 3", asked], max_new_tokens=6) == [said, said]


def test_a_data_set_object_and_a_run_of_before_are_taken_and_a_finished_run_is_left(place, sft, capsys) -> None:
    import datasets

    again = SFTTrainer("my-model", datasets.Dataset.from_list(ROWS), output_dir="runs/sft", eval_fraction=0.2, **SHORT)
    assert again.train() == sft.metrics and "nothing to do" in capsys.readouterr().err
    other = SFTTrainer("my-model", ROWS[:6], output_dir="runs/sft", eval_fraction=0.2, **SHORT)
    assert "train() will be refused: output_dir runs/sft holds a finished run with other" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"finished run with other settings \(data.sources\)"):
        other.train()
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "no"} for r in ROWS]
    dpo = DPOTrainer(sft, pairs, loss_type="ipo", output_dir="runs/ipo", settings={"dpo": {"beta": 0.3}}, **SHORT)
    assert (dpo.config.dpo.loss_type, dpo.config.dpo.beta, dpo.config.model.model_name_or_path) == (
        "ipo", 0.3, "runs/sft")


def test_functions_of_the_program_pay_and_are_given_the_columns(place) -> None:
    seen = []

    def length(completions, **rest):
        return [float(len(str(c))) for c in completions]

    def wanted(prompts, completions, level):
        seen.extend(level)
        return [1.0] * len(completions)

    rows = [{"prompt": f"say {i}", "level": i} for i in range(8)]
    trainer = GRPOTrainer("my-model", rows, [length, wanted], output_dir="runs/grpo", num_generations=2,
                          max_new_tokens=4, reward__weights=[1.0, 2.0], learning_rate=1e-4, **SHORT)
    metrics = trainer.train()
    assert trainer.config.roles.actor.learning_rate == 1e-4 and trainer.config.ppo.sampling.num_samples == 2
    assert set(seen) <= set(range(8)) and len(seen) >= 8
    record = json.loads((place / "runs/grpo/run.json").read_text())
    named = record["config"]["reward"]["functions"]
    assert [name.partition("@")[0] for name in named] == ["python:length", "python:wanted"] and metrics
    assert "rewards/length/mean" in metrics and "rewards/wanted/mean" in metrics
    length = lambda completions, **rest: [0.0] * len(completions)  # noqa: E731 - another function of the same name
    length.__name__ = "length"
    other = GRPOTrainer("my-model", rows, [length, wanted], output_dir="runs/grpo", num_generations=2,
                        max_new_tokens=4, reward__weights=[1.0, 2.0], learning_rate=1e-4, **SHORT)
    with pytest.raises(UserError, match=r"finished run with other settings \(reward.functions\)"):
        other.train()
    with pytest.raises(UserError, match="length was given from Python, and nothing gives it here"):
        open_functions(["python:length"], {}, 1.0)


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_given_as_trl_gives_it(place) -> None:
    teacher = SFTTrainer("my-model", ROWS, output_dir="runs/teacher", **SHORT)
    teacher.train()
    trainer = DistillTrainer("my-model", teacher_model=teacher, train_dataset=[{"prompt": r["prompt"]} for r in ROWS],
                             output_dir="runs/distill", max_new_tokens=4, lmbda=1.0, divergence="jsd", beta=0.1,
                             learning_rate=1e-3, **SHORT)
    assert trainer.config.distill.beta == 0.1 and trainer.config.distill.sampling.max_new_tokens == 4
    assert trainer.config.roles.teacher.model_name_or_path == "runs/teacher"
    assert trainer.train()["distill/divergence"] > 0
    assert isinstance(trainer.generate("say 1", max_new_tokens=3), str)


def test_the_samplers_temperature_is_what_a_method_with_rewards_is_given() -> None:
    given = dotted(step3_ppo.Config, {"temperature": 0.9, "top_k": 5, "beta": 0.1})
    assert given == {"ppo.sampling.temperature": 0.9, "ppo.sampling.top_k": 5, "ppo.kl_coef": 0.1}


@pytest.mark.parametrize(("make", "said"), [
    (lambda: DistillTrainer("my-model", torch.nn.Linear(1, 1), ROWS), "teacher_model is a Linear; give a hub id"),
    (lambda: SFTTrainer("my-model", ROWS, learning_rat=1), r"unknown option learning_rat \(did you mean learning_rate"),
    (lambda: SFTTrainer("my-model", ROWS, max_steps="many"), "train.max_steps"),
    (lambda: SFTTrainer("my-model", ROWS, train__max_stps=1), r"unknown option train.max_stps \(did you mean"),
    (lambda: SFTTrainer("my-model", ROWS, settings={"train": {"steps": 1}}), "unknown option train.steps"),
    (lambda: SFTTrainer("my-model", []), "train_dataset is empty"),
    (lambda: SFTTrainer("my-model", {"train": ROWS}), "train_dataset is a mapping of train; give one of its parts"),
    (lambda: SFTTrainer("my-model", [{"prompt": object()}]), "row 1 holds a object; give text"),
    (lambda: SFTTrainer("my-model", ["a.jsonl", {"prompt": "x"}]), "row 1 is a str; a row is a mapping"),
    (lambda: SFTTrainer("my-model", 3), "train_dataset is a int"),
    (lambda: SFTTrainer(torch.nn.Linear(1, 1), ROWS), "model is a Linear; give a hub id, a folder"),
    (lambda: SFTTrainer("my-model", "none.jsonl", output_dir="runs/x").train(), "none.jsonl does not exist"),
    (lambda: SFTTrainer("my-model", ROWS, output_dir="runs/x").model, "runs/x holds no model yet; call train"),
    (lambda: DPOTrainer("my-model", ROWS, loss_type="dpu"), "loss_type is 'dpu'; choose dpo, ipo"),
    (lambda: PPOTrainer("my-model", ROWS, ["a", "b"]), "a and b are two reward models"),
    (lambda: RewardTrainer(None, ROWS, output_dir="runs/none/reward").train(), "no finished sft run"),
])
def test_what_is_wrong_is_one_line_without_the_frames_inside(place, make, said) -> None:
    with pytest.raises(UserError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value) and caught.value.__suppress_context__
    assert not (place / "runs" / "x").exists()


def test_a_prompt_of_another_kind_and_an_unknown_setting_of_generate_are_refused(sft) -> None:
    for given, more, said in ((3, {}, "3 is not a prompt"), ("x", {"top": 1}, "unknown option top"),
                              ([{"text": "x"}], {}, "give messages with role and content")):
        with pytest.raises(UserError, match=said):
            sft.generate(given, **more)


def test_trl_s_names_are_the_options_they_mean_here():
    assert dotted(step3_ppo.Config, {"beta": 0.1, "num_generations": 4}) == {
        "ppo.kl_coef": 0.1, "ppo.sampling.num_samples": 4}


def test_a_class_of_a_notebook_s_cell_is_known_by_its_text():
    def cell(text: str) -> type:
        name = f"<cell {len(linecache.cache)}>"  # as IPython keeps the text of its cells
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space = {"__name__": "__main__"}
        exec(compile(text, name, "exec"), space)
        return space["Game"]

    text = "class Game:\n    def reset(self):\n        return 1\n    @staticmethod\n    def step():\n        return 2\n"
    names = [environments_of(None, cell(each), {})["environment.factory"] for each in (
        text, text, text.replace("1", "3"), text.replace("2", "4"))]
    assert names[0] == names[1] and names[0].startswith("python:Game@") and len(set(names)) == 3
