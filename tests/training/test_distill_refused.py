"""--stage distill: what does not fit is said in one line, and what is only told."""

from __future__ import annotations

import json
import shutil

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.training import builders
from hybrid_rlhf.training.registry import READS
from tests.factories.distill_stage import distill_place, refused, steps, words
from tests.factories.stage_options import COMMON, used
from tests.factories.tiny import save_tiny

LORA = ["--model.lora.r", "4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with distill_place(tmp_path_factory.mktemp("distill")) as folder:
        yield folder


def test_what_the_stage_lacks_is_said_in_one_line(place, capfd) -> None:
    assert "no teacher: give roles.teacher.model_name_or_path" in refused(capfd, words(place, "no", teacher=None))
    said = refused(capfd, words(place, "no", "--distill.lmbda", "0.5",
                                f"--data.sources=[{{path: {place}/rows.jsonl, stages: [distill]}}]"))
    assert "distill_data" in said
    said = refused(capfd, [*words(place, "no"), "--check_signal"])
    assert "--check_signal is for stages that sample and learn from rewards" in said


def test_a_teacher_without_a_readable_tokenizer_is_told_by_its_own_option(place, capfd, tmp_path) -> None:
    shutil.copytree(place / "teacher", tmp_path / "teacher")
    (tmp_path / "teacher" / "tokenizer.json").write_text('{"version": "1.0"}')
    said = refused(capfd, words(place, "no", "--roles.teacher.model_name_or_path", f"{tmp_path}/teacher", teacher=None))
    assert "cannot load a tokenizer" in said and "roles.teacher.model_name_or_path" in said
    assert "model.tokenizer_name_or_path" not in said  # the student's


def test_a_teacher_whose_tokenizer_is_code_of_its_folder_is_read_where_that_is_trusted(place, capfd, tmp_path,
                                                                                       monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    shutil.copytree(place / "teacher", tmp_path / "teacher")
    (tmp_path / "teacher" / "own_words.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnWords(PreTrainedTokenizerFast):\n    pass\n")
    path = tmp_path / "teacher" / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "OwnWords",
                                               "auto_map": {"AutoTokenizer": [None, "own_words.OwnWords"]}}
    path.write_text(json.dumps(settings))
    argv = words(place, "no", "--roles.teacher.model_name_or_path", f"{tmp_path}/teacher", "--plan", teacher=None)
    said = refused(capfd, argv)
    assert "cannot load a tokenizer" in said and "custom code" in said, said
    assert main([*argv, "--model.trust_remote_code", "true"]) == 0
    config, reads = DataConfig([Source(f"{place}/rows.jsonl")]), READS["ppo"]
    for other, wanted in (("teacher", None), ("student", "chat templates")):
        shutil.copytree(tmp_path / "teacher", tmp_path / "student", dirs_exist_ok=True)
        for each in tmp_path.glob("student/chat_template*"):
            each.write_text(each.read_text() + "{# another #}")
        both = (str(place / "base"), f"{tmp_path}/{other}", config, reads)
        assert builders.difference(*both, trust_remote_code=True) == wanted
        with pytest.raises(UserError):
            builders.difference(*both)


def test_a_teacher_of_another_tokenizer_is_refused(place, capfd, tmp_path) -> None:
    shutil.copytree(place / "teacher", tmp_path / "teacher")
    path = tmp_path / "teacher" / "tokenizer.json"
    rules = json.loads(path.read_text())
    vocab = rules["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.__getitem__)[100:102]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    path.write_text(json.dumps(rules))
    argv = words(place, "no", "--roles.teacher.model_name_or_path", f"{tmp_path}/teacher", teacher=None)
    for more in ([], ["--plan"]):
        said = refused(capfd, [*argv, *more])
        assert "have different tokenizers: token" in said and "(2 such)" in said


def test_another_template_of_the_same_tokens_is_told_and_a_padded_vocabulary_is_not(place, capfd, tmp_path) -> None:
    save_tiny(tmp_path / "teacher", seed=5, vocab_size=320)
    shutil.copytree(place / "base", tmp_path / "own")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (place / "base" / name).exists():
            shutil.copy(place / "base" / name, tmp_path / "teacher" / name)
    assert main(words(place, "padded", "--roles.teacher.model_name_or_path", f"{tmp_path}/teacher", teacher=None)) == 0
    assert "chat template" not in capfd.readouterr().err
    for path in tmp_path.glob("teacher/chat_template*"):
        path.write_text(path.read_text() + "\n{# another #}")
    assert main(words(place, "told", "--roles.teacher.model_name_or_path", f"{tmp_path}/teacher", teacher=None)) == 0
    assert "has another chat template; it reads what the student's template writes" in capfd.readouterr().err


def test_a_teacher_that_ends_its_answers_otherwise_is_told(place, capfd, tmp_path) -> None:
    """ChatML's end in one, <|endoftext|> in the other: a student that learns to write it would not stop there."""
    shutil.copytree(place / "teacher", tmp_path / "teacher")
    for path in tmp_path.glob("teacher/chat_template*"):
        path.write_text(path.read_text().replace("<|im_end|>", "<|endoftext|>"))
    shutil.copytree(place / "base", tmp_path / "base")
    argv = words(place, "ends", "--roles.teacher.model_name_or_path", f"{tmp_path}/teacher",
                 "--model.model_name_or_path", f"{tmp_path}/base", "--plan", teacher=None)
    assert main(argv) == 0
    assert "ends its answers with '<|endoftext|>', which ends none of the student's" in capfd.readouterr().err
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert main(argv) == 0
    assert "ends its answers" not in capfd.readouterr().err


def test_a_teacher_with_too_few_positions_for_the_demonstrations_is_refused(place, capfd) -> None:
    save_tiny(place / "short", seed=5, max_position_embeddings=45)
    more = ["--data.max_length", "48", "--data.max_prompt_length", "30"]
    said = refused(capfd, words(place, "no", "--distill.lmbda", "0.5", *more, teacher="short"))
    assert f"data.max_length is 48, but {place}/short has 45 positions" in said


@pytest.mark.slow
def test_a_teacher_in_parts_needs_its_likeliest_words(place, capfd, built) -> None:
    for more in (["--roles.teacher.zero_stage", "3"], ["--engine.zero_stage", "3"]):
        said = refused(capfd, words(place, "no", *more))
        assert "give distill.top_k (such as 64), or roles.teacher.zero_stage 0" in said
        assert not built  # before anything was loaded
    assert main(words(place, "parts", "--roles.teacher.zero_stage", "3", "--distill.top_k", "20")) == 0
    assert main(words(place, "scored", "--roles.teacher.zero_stage", "3", "--distill.divergence",
                      "policy_gradient")) == 0
    assert main(words(place, "whole", "--distill.top_k", "20")) == 0
    parts, whole = (steps(place / name)[0] for name in ("parts", "whole"))
    assert parts["distill/divergence"] == pytest.approx(whole["distill/divergence"], rel=1e-5)
    assert 0 < parts["distill/teacher_mass_outside"] < 1


@pytest.mark.slow
def test_an_adapter_on_the_head_is_refused_and_its_merged_model_is_not(place, capfd) -> None:
    head = ["--model.lora.target_modules", "[lm_head, q_proj]"]
    assert main(["--stage", "sft", "--output_dir", f"{place}/headed", *used("sft", COMMON), *LORA, *head,
                 "--model.model_name_or_path", f"{place}/base", "--train.max_steps", "20",
                 "--train.learning_rate", "5e-2", f"--data.sources=[{place}/said.jsonl]"]) == 0
    for more in ([], ["--roles.share_base", "false"]):
        assert "an adapter is on the output head" in refused(capfd, words(place, "no", *LORA, *more, teacher="headed"))
    assert main(words(place, "headless", *LORA, teacher="headed/model")) == 0
    assert main(words(place, "likeliest", *LORA, "--distill.top_k", "300", teacher="headed")) == 0
    found = [steps(place / name)[0]["distill/divergence"] for name in ("headless", "likeliest")]
    assert found[0] == pytest.approx(found[1], rel=1e-3) and found[0] > 1e-3


@pytest.mark.parametrize("more", [[], ["--plan"]])
def test_more_likeliest_words_than_there_are_is_refused(place, capfd, built, more) -> None:
    size = json.loads((place / "teacher" / "config.json").read_text())["vocab_size"]
    said = refused(capfd, [*words(place, "no", "--distill.top_k", str(size + 1)), *more])
    assert f"distill.top_k is {size + 1}, and the teacher's vocabulary has {size} words; give fewer" in said
    assert not built  # before anything was loaded
    more = ["--distill.coef", "0.5", "--ppo.sampling.num_samples", "2", f"--reward.functions=['{place}/pay.py:short']"]
    assert "distill.top_k is 999" in refused(capfd, words(place, "no", *more, "--distill.top_k", "999", stage="grpo"))


@pytest.mark.parametrize(("more", "message"), [
    (["--distill.beta", "0.3"], "distill.beta is set; it is for distill.divergence jsd"),
    (["--distill.divergence", "policy_gradient", "--distill.top_k", "5"], "distill.top_k is set; distill.divergence"),
    (["--distill.divergence", "policy_gradient", "--distill.temperature", "2"], "distill.temperature is set;"),
    (["--roles.ref.dtype", "float32"], "roles.ref.dtype is set; there is no reference"),
    (["--roles.reward.dtype", "float32"], "roles.reward.dtype is set; no reward model scores the samples"),
    (["--data.max_length", "40"], "data.max_length is set; it is for demonstrations"),
    (["--roles.critic.learning_rate", "1"], "roles.critic.learning_rate is not used by --stage distill"),
    (["--roles.teacher.learning_rate", "1"], "the teacher is not trained"),
    (["--roles.teacher.tp", "2"], "only the actor generates"),
    (["--roles.teacher.zero_stage", "1"], "roles.teacher.zero_stage is 1 for a role that is not trained")])
def test_options_that_nothing_reads_are_refused(place, capfd, more, message) -> None:
    assert message in refused(capfd, words(place, "no", *more))


@pytest.mark.parametrize(("stage", "more", "message"), [
    ("grpo", ["--distill.top_k", "5"], "distill.top_k is set; distill.coef is 0"),
    ("grpo", [], "roles.teacher.model_name_or_path is set; distill.coef is 0"),
    ("rejection", [], "this method has no teacher")])
def test_a_teacher_that_no_method_asks_is_refused(place, capfd, stage, more, message) -> None:
    assert message in refused(capfd, words(place, "no", *more, stage=stage, teacher=None if more else "teacher"))
