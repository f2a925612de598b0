"""--stage distill, and distill.coef beside rewards, through the launcher: what is built, left, resumed and refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.models.quantize import quantized_layers
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.trainers.distillation import DistillTrainer
from hybrid_rlhf.training import builders
from hybrid_rlhf.training.registry import READS
from tests.factories.counting import killed_at
from tests.factories.distill_stage import distill_place, lines, refused, steps, words
from tests.factories.stage_options import COMMON, WORDS, used
from tests.factories.tiny import chatml_tokenizer, other_tokenizer, save_tiny, tiny_causal_lm

LORA = ["--model.lora.r", "4"]
REPORTED = {"distill/divergence", "distill/teacher_kl", "entropy", "completions/mean_length", "grad_norm",
            "learning_rate", "time/generate", "time/score", "time/teacher", "time/train", "time/step"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with distill_place(tmp_path_factory.mktemp("distill")) as folder:
        yield folder


def test_the_stage_trains_reports_and_leaves_a_model_that_loads(place, built, capfd) -> None:
    from transformers import AutoModelForCausalLM

    assert main(words(place, "plain")) == 0
    size = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(place / "teacher").parameters())
    assert f"teacher: {place}/teacher; {size:,} parameters; float32\n" in capfd.readouterr().err
    out, rows = place / "plain", lines(place / "plain")
    assert built[0].critic is None and built[0].ref is None and built[0].teacher is not None
    assert len(steps(out)) == 2 and all(row.keys() >= REPORTED for row in steps(out)), rows[0].keys()
    assert not any(name.startswith(("reward", "objective", "eval/reward", "kl")) for row in rows for name in row)
    assert not any("unscored" in name for row in rows for name in row)  # else an alarm would ask for a source
    assert {"eval/distill/divergence", "eval/distill/teacher_kl", "eval/completions/mean_length"} <= rows[-1].keys()
    record = json.loads((out / "run.json").read_text())
    assert (record["stage"], record["status"]) == ("distill", "finished")
    trained, base = (AutoModelForCausalLM.from_pretrained(f) for f in (out / "model", place / "base"))
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True))
    assert yaml.safe_load((out / "config.yaml").read_text())["distill"]["divergence"] == "reverse_kl"
    assert main(words(place, "plain")) == 0
    assert "this distill run is finished; nothing to do" in capfd.readouterr().err


def test_a_reward_source_scores_the_samples_and_moves_nothing(place) -> None:
    assert main(words(place, "paid", f"--reward.functions=['{place}/pay.py:short']",
                      "--roles.ref.model_name_or_path", f"{place}/base")) == 0
    assert main(words(place, "unpaid")) == 0
    paid, unpaid = steps(place / "paid"), steps(place / "unpaid")
    assert all("rewards/short/mean" in row and row["reward"] < 0 and "kl" in row for row in paid)  # kl: of roles.ref
    assert lines(place / "paid")[-1]["eval/reward"] < 0
    for row, other in zip(paid, unpaid, strict=True):
        assert row["distill/divergence"] == other["distill/divergence"] and row["grad_norm"] == other["grad_norm"]


def test_what_became_of_the_rows_is_said_once(place, capfd, tmp_path) -> None:
    """One file that serves both as prompts and as demonstrations, and then two that differ."""
    both = ["--distill.lmbda", "0.5", "--resume", "never", f"--data.sources=[{place}/said.jsonl]"]
    assert main(words(place, "once", *both)) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("data")]
    assert [line for line in told if "rows read" in line] == told[:1] and len(told) == len(set(told)) <= 2
    (tmp_path / "few.jsonl").write_text("".join(f'{{"prompt": "say {w}", "completion": "{w}"}}\n' for w in WORDS))
    assert main(words(place, "once", *both[:-1], f"--data.sources=[{{path: {place}/rows.jsonl, stages: [distill]}}, "
                      f"{{path: {tmp_path}/few.jsonl, stages: [distill_data]}}]")) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "rows read" in line]
    assert len(told) == 2 and told[0].startswith(f"data: {2 * len(WORDS)} rows read")
    assert told[1].startswith(f"data of distill_data: {len(WORDS)} rows read")


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(place, capsys) -> None:
    more = ["--distill.lmbda", "0.5", "--distill.num_minibatches", "2", "--distill.num_epochs", "2",
            "--train.max_steps", "4", "--train.save_steps", "2"]
    assert main(words(place, "whole", *more)) == 0, capsys.readouterr().err[-2000:]
    with killed_at(DistillTrainer, 3):
        main(words(place, "parts", *more))
    assert main(words(place, "parts", *more)) == 0
    whole, parts = ((place / f"{n}/model/model.safetensors").read_bytes() for n in ("whole", "parts"))
    assert whole == parts != (place / "base/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def taught(place) -> str:
    """A run by LoRA on the student's own base: a teacher that is an adapter."""
    assert main(["--stage", "sft", "--output_dir", f"{place}/taught", *used("sft", COMMON), *LORA,
                 "--model.model_name_or_path", f"{place}/base", "--train.max_steps", "20",
                 "--train.learning_rate", "5e-2", f"--data.sources=[{place}/said.jsonl]"]) == 0
    return "taught"


@pytest.mark.slow
def test_a_teacher_by_lora_on_the_students_base_is_an_adapter_on_it(place, built, taught, capfd) -> None:
    from transformers import AutoModelForCausalLM

    assert main(words(place, "shared", *LORA, teacher=taught)) == 0
    roles = built[0]
    assert roles.teacher.engine.model is roles.actor.engine.model
    told = capfd.readouterr().err
    assert f"teacher: {place}/{taught}; computed on the student's own base\n" in told
    base = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(place / "base").parameters())
    trained = sum(p.numel() for p in roles.actor.engine.training.parameters.values())
    assert f"trained: {trained:,} of {base + trained:,} parameters by LoRA" in told  # no adapter of the teacher's
    assert main(words(place, "merged", *LORA, teacher=f"{taught}/model")) == 0
    assert built[1].teacher.engine.model is not built[1].actor.engine.model
    shared, merged = steps(place / "shared"), steps(place / "merged")
    assert shared[0]["distill/divergence"] == pytest.approx(merged[0]["distill/divergence"], rel=1e-4)
    assert shared[0]["grad_norm"] == pytest.approx(merged[0]["grad_norm"], rel=1e-4)
    assert shared[0]["distill/divergence"] > 0.01  # it has learned something
    assert main(words(place, "apart", *LORA, "--roles.share_base", "false", teacher=taught)) == 0
    assert built[2].teacher.engine.model is not built[2].actor.engine.model
    assert steps(place / "apart")[0]["distill/divergence"] == pytest.approx(shared[0]["distill/divergence"], rel=1e-4)


def test_the_base_itself_teaches_on_the_base_that_is_shared(place, built) -> None:
    """A new adapter changes nothing yet, so that the student is its teacher at the first step."""
    assert main(words(place, "own", *LORA, teacher="base")) == 0
    assert built[0].teacher.engine.model is built[0].actor.engine.model
    assert steps(place / "own")[0]["distill/divergence"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("more", "kind"), [(["--roles.teacher.quantize", "8bit"], "Linear8bitLt"),
                                            (["--roles.teacher.dtype", "bfloat16"], None)])
def test_a_teacher_in_fewer_bits_teaches_a_student_in_fp32(place, built, more, kind) -> None:
    assert main(words(place, f"few{more[-1]}", *more, "--roles.teacher.micro_batch_tokens", "40")) == 0
    teacher, actor = built[0].teacher, built[0].actor
    assert {type(m).__name__ for m in quantized_layers(teacher.engine.module).values()} == ({kind} if kind else set())
    assert kind or teacher.engine.module.model.dtype == torch.bfloat16
    assert not quantized_layers(actor.engine.module) and actor.engine.module.model.dtype == torch.float32
    assert teacher.max_tokens == 40
    assert main(words(place, "exact")) == 0
    few, exact = (steps(place / n)[0]["distill/divergence"] for n in (f"few{more[-1]}", "exact"))
    assert few == pytest.approx(exact, rel=0.2) and few != exact


@pytest.mark.parametrize(("more", "stays"), [([], ["lm_head.weight"]), (["--distill.top_k", "20"], [])])
def test_a_teacher_that_waits_leaves_its_head_on_the_device_where_it_is_read(place, monkeypatch, more, stays) -> None:
    """On a CPU there is nowhere to go: here it is made to."""
    plain, seen = HybridEngine.offload_when_idle, []

    def forced(engine, *, keeps=()):
        for tensor in (*engine.model.parameters(), *engine.model.buffers()):
            tensor.data = tensor.data.clone()  # what was read from a file has memory that is the file's
        plain(engine, keeps=keeps, is_forced=True)
        seen.extend(n for n, p in engine.model.named_parameters() if p.untyped_storage().nbytes())
        return engine

    monkeypatch.setattr(HybridEngine, "offload_when_idle", forced)
    assert main(words(place, f"waiting{''.join(more)}", "--roles.teacher.offload", "true", *more)) == 0
    monkeypatch.undo()
    assert seen == stays
    assert main(words(place, f"staying{''.join(more)}", *more)) == 0
    waiting, staying = (steps(place / f"{name}{''.join(more)}") for name in ("waiting", "staying"))
    assert [row["distill/divergence"] for row in waiting] == [row["distill/divergence"] for row in staying]


def test_the_plan_knows_the_teacher_and_the_preview_shows_prompts_and_demonstrations(place, capfd) -> None:
    assert main([*words(place, "planned"), "--plan"]) == 0
    out = capfd.readouterr().out
    assert "\nteacher  weights" in out and "\nteacher  targets" in out and "critic" not in out and "\nref " not in out
    assert main([*words(place, "planned", "--distill.divergence", "policy_gradient"), "--plan"]) == 0
    assert "targets" not in (out := capfd.readouterr().out) and "\nteacher  weights" in out
    assert main([*words(place, "shown", "--distill.lmbda", "0.5"), "--preview"]) == 0
    out = capfd.readouterr().out
    assert "rows of stage distill " in out and "rows of stage distill_data" in out and "say " in out


def test_the_plan_counts_likeliest_words_and_those_that_were_drawn_from(place, capfd) -> None:
    """5 prompts of 6 answered tokens with 64 words of 12 bytes each: 23,040 bytes. 300 words of a byte for 5 slots."""
    def lines_of(*more: str, stage: str = "distill") -> dict[str, str]:
        assert main([*words(place, "planned", *more, stage=stage), "--plan"]) == 0
        rows = [line.rsplit("  ", 1) for line in capfd.readouterr().out.splitlines()]
        return {" ".join(row[0].split()[:3]): row[0] for row in rows if row[0].startswith(("teacher", "actor"))}

    assert "22 KiB" in lines_of("--distill.top_k", "64")["teacher targets 22"]
    cut = ["--distill.sampling.top_p", "0.9"]
    assert not [name for name in lines_of(*cut) if "kept" in name]  # the whole vocabulary is compared
    assert "actor kept words" in lines_of(*cut, "--distill.divergence", "policy_gradient")
    more = ["--distill.coef", "0.5", "--ppo.kl_coef", "0", "--ppo.sampling.num_samples", "2", "--ppo.sampling.top_p",
            "0.9", f"--reward.functions=['{place}/pay.py:short']"]
    found = lines_of(*more, stage="grpo")
    assert "actor kept words" in found and not [name for name in found if name.startswith("teacher logits")]
    assert "actor kept words" not in lines_of(*more, "--ppo.replay_truncation", "false", stage="grpo")


def test_the_plan_counts_demonstrations_that_the_teacher_reads(place, capfd) -> None:
    """A step's 5 rows of 200 - 1 tokens, states of 48 numbers in fp32: 5 * 199 * 48 * 4 bytes, 0.18 MiB."""
    argv = words(place, "planned", "--distill.lmbda", "0.5", "--data.max_length", "200", "--data.max_prompt_length",
                 "32", "--plan")
    assert main(argv) == 0
    line = next(x for x in capfd.readouterr().out.splitlines() if x.startswith("teacher  targets"))
    assert line.split()[2] == "0.2", line  # MiB; of samples alone 0.0


def test_grpo_beside_a_teacher_reports_its_divergence_and_plans_for_it(place, built, capfd) -> None:
    more = ["--distill.coef", "0.5", "--distill.divergence", "jsd", "--distill.beta", "0.3", "--ppo.kl_coef", "0",
            "--ppo.sampling.num_samples", "2", f"--reward.functions=['{place}/pay.py:short']"]
    assert main(words(place, "grpo", *more, stage="grpo")) == 0
    assert built[0].teacher is not None
    assert all({"distill/divergence", "reward", "time/teacher"} <= row.keys() for row in steps(place / "grpo"))
    assert main([*words(place, "grpo-planned", *more, stage="grpo"), "--plan"]) == 0
    assert "\nteacher  weights" in capfd.readouterr().out


# --- --stage distill: what does not fit is said in one line, and what is only told

def test_what_the_stage_lacks_is_said_in_one_line(place, capfd) -> None:
    assert "no teacher: give roles.teacher.model_name_or_path" in refused(capfd, words(place, "no", teacher=None))
    said = refused(capfd, words(place, "no", "--distill.lmbda", "0.5",
                                f"--data.sources=[{{path: {place}/rows.jsonl, stages: [distill]}}]"))
    assert "distill_data" in said
    said = refused(capfd, [*words(place, "no"), "--check_signal"])
    assert "--check_signal is for stages that sample and learn from rewards" in said


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


@pytest.fixture(scope="module")
def foreign(place) -> str:
    """A teacher with tokens of its own that has learnt to say the word it is asked for."""
    tokenizer = other_tokenizer()
    tokenizer.chat_template = chatml_tokenizer().chat_template
    tiny_causal_lm(5, vocab_size=len(tokenizer), hidden_size=48, eos_token_id=tokenizer.eos_token_id,
                   pad_token_id=tokenizer.pad_token_id).save_pretrained(place / "foreign")
    tokenizer.save_pretrained(place / "foreign")
    return "foreign"


AT_SPANS = ["--distill.divergence", "policy_gradient"]


def test_a_teacher_of_other_tokens_scores_spans_of_the_students_text(place, foreign, built, capfd) -> None:
    assert main(words(place, "spans", *AT_SPANS, teacher=foreign)) == 0
    said = capfd.readouterr().err
    assert f"the teacher {place}/{foreign} has other tokens than the student: it reads prompts and responses as" in said
    teacher, tokenizer = built[0].teacher, other_tokenizer()
    assert teacher.engine.pad_id == tokenizer.pad_token_id and teacher.prompt.tokenizer is teacher.own_tokens.teacher
    asked = teacher.reads(Rollout.from_responses(Prompts([[1]], ["say cat"]), [[1]], [True], 0, [""])).prompts.ids
    assert asked == [tokenizer("<|im_start|>user\nsay cat<|im_end|>\n<|im_start|>assistant\n")["input_ids"]]
    assert all(0 <= row["distill/uncompared"] < 0.5 and row["distill/divergence"] > 0 for row in steps(place / "spans"))
    told = ["--distill.teacher_prompt", "{{ prompt }} {{ response }}"]
    assert main(words(place, "spans_told", *AT_SPANS, *told, teacher=foreign)) == 0


@pytest.mark.parametrize(("more", "message"), [
    ([], "or --stage distill with --distill.divergence policy_gradient, which compares spans of text"),
    ([*AT_SPANS, "--distill.sampling.top_p", "0.9"], "top_k, top_p or min_p of distill.sampling"),
    ([*AT_SPANS, "--data.sources=[{path: PLACE/turns.jsonl, stages: [distill]}]"], "has no chat template for prompts"),
])
def test_what_a_teacher_of_other_tokens_cannot_be_asked_is_refused(place, foreign, built, capfd, more, message):
    (place / "turns.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "say cat"}]}) + "\n")
    shutil.copytree(place / foreign, place / "bare", dirs_exist_ok=True)
    (place / "bare" / "chat_template.jinja").unlink(missing_ok=True)
    more = [each.replace("PLACE", str(place)) for each in more]
    assert message in refused(capfd, words(place, "no", *more, teacher="bare"))
    assert not built


@pytest.mark.slow
def test_a_student_comes_near_a_teacher_of_other_tokens(place, foreign) -> None:
    """The teacher says the word, the student any of five and that one more often. Wanted: it says that one."""
    some = WORDS[:5]
    right = [{"prompt": f"say {word}", "completion": word} for word in some]
    mixed = [{"prompt": f"say {word}", "completion": other} for word in some for other in some] + right * 5
    asked = [{"prompt": row["prompt"], "word": row["completion"]} for row in right]
    for name, rows in (("right", right), ("mixed", mixed), ("asked", asked)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "hit.py").write_text("def hit(completions, word, **_):\n"
                                  "    return [float(c.strip() == w) for c, w in zip(completions, word)]\n")
    for base, out, data, count in ((foreign, "says", "right", "200"), ("base", "mixes", "mixed", "150")):
        assert main(["--stage", "sft", "--output_dir", f"{place}/{out}", *used("sft", COMMON), "--data.eval_fraction",
                     "0", "--model.model_name_or_path", f"{place}/{base}", f"--data.sources=[{place}/{data}.jsonl]",
                     "--train.max_steps", count, "--train.learning_rate", "1e-2",
                     "--train.per_device_train_batch_size", "16"]) == 0
    assert main(words(place, "near", *AT_SPANS, "--model.model_name_or_path", f"{place}/mixes",
                      f"--data.sources=[{place}/asked.jsonl]", "--data.eval_fraction", "0", "--reward.functions",
                      f"[{place}/hit.py:hit]", "--train.max_steps", "40", "--roles.actor.learning_rate", "5e-3",
                      "--distill.sampling.num_samples", "16", "--distill.sampling.max_new_tokens", "8",
                      teacher="says")) == 0
    first, last = ({name: sum(row[name] for row in rows) / 5 for name in ("reward", "distill/teacher_kl")}
                   for found in [steps(place / "near")] for rows in (found[:5], found[-5:]))
    assert first["reward"] < 0.6 and last["reward"] > first["reward"] + 0.15
    assert last["distill/teacher_kl"] < 0.6 * first["distill/teacher_kl"]


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


def test_a_teacher_in_parts_needs_its_likeliest_words(place, capfd, built) -> None:
    for more in (["--roles.teacher.zero_stage", "3"], ["--engine.zero_stage", "3"]):
        said = refused(capfd, words(place, "no", *more))
        assert "give distill.top_k (such as 64), or roles.teacher.zero_stage 0" in said
        assert not built  # before anything was loaded


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


SELF = [*LORA, "--roles.teacher.model_name_or_path", "self"]
TOLD = "--distill.teacher_prompt={{ prompt }} it is {{ answer }}"


@pytest.fixture(scope="module")
def answered(place) -> list[str]:
    """Prompts with a column that the student does not read, and a student that is not indifferent."""
    rows = [{"prompt": f"say {w} {i}", "answer": w} for i in range(2) for w in WORDS]
    (place / "answered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"--data.sources=[{{path: {place}/answered.jsonl}}]", "--model.model_name_or_path", f"{place}/teacher"]


@pytest.mark.parametrize("more", [[], ["--distill.teacher_ema", "0.9"], ["--distill.divergence=policy_gradient"]])
def test_the_student_s_own_start_teaches_by_what_it_reads_beside_the_question(place, built, answered, capfd, more):
    """The base has one load; its divergence is not 0 at the first step, as the teacher reads more."""
    out = f"self{len(more and more[-1])}"
    assert main(words(place, out, *SELF, TOLD, *answered, *more, teacher=None)) == 0
    roles = built[0]
    assert roles.teacher is None if "0.9" in more else (
        roles.teacher.engine.model is roles.actor.engine.model and roles.teacher.prompt is not None)
    assert abs(steps(place / out)[0]["distill/divergence"]) > 1e-3
    report = json.loads((place / out / "run.json").read_text())["facts"]["data"]
    assert "answer" not in report.get("unread", {})


@pytest.mark.parametrize(("told", "shown"), [(TOLD, True), (TOLD + " {{ response }}", False)])
def test_a_preview_shows_what_the_teacher_reads_where_no_response_is_needed(place, answered, capfd, told, shown):
    assert main(words(place, "look", *SELF, told, *answered, "--preview", teacher=None)) == 0
    out = capfd.readouterr().out
    assert ("the teacher reads of example 1" in out) == shown == (" it is " in out)


@pytest.mark.slow
def test_a_stopped_run_whose_teacher_is_an_average_goes_on_to_the_same_bits(place, answered):
    more = [*SELF, TOLD, *answered, "--distill.teacher_ema", "0.5", "--train.max_steps", "4", "--train.save_steps", "2"]
    assert main(words(place, "whole-ema", *more, teacher=None)) == 0
    with killed_at(DistillTrainer, 3):
        main(words(place, "parts-ema", *more, teacher=None))
    assert main(words(place, "parts-ema", *more, teacher=None)) == 0
    whole, parts = ((place / f"{n}-ema/model/model.safetensors").read_bytes() for n in ("whole", "parts"))
    assert whole == parts


def test_a_template_that_may_not_read_what_is_meant_is_said_in_a_line(place, answered, capfd):
    """A column with the name of what a run makes, and one without a value."""
    rows = [{"prompt": f"say {w}", "answer": w if i else None, "score": 1} for i, w in enumerate(WORDS)]
    (place / "holes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(words(place, "holes", *SELF, TOLD + " {{ score }}", *answered[1:],
                      f"--data.sources=[{{path: {place}/holes.jsonl}}]", f"--reward.functions=['{place}/pay.py:short']",
                      teacher=None)) == 0
    out = capfd.readouterr()
    assert "answer is null in 1 of" in out.out + out.err
    assert "score is what the run makes, and not the data's column score" in out.out + out.err


def test_a_teacher_s_prompt_beside_rewards_changes_the_divergence(place, answered):
    more = [*SELF, *answered, "--distill.coef", "0.5", f"--reward.functions=['{place}/pay.py:short']",
            "--ppo.sampling.num_samples", "2"]
    assert main(words(place, "paid-told", *more, TOLD, stage="grpo", teacher=None)) == 0
    assert steps(place / "paid-told")[0]["distill/divergence"] > 1e-4


@pytest.mark.parametrize(("more", "message"), [
    ([*SELF], "which knows what the student knows; give distill.teacher_prompt"),
    ([*SELF, "--distill.teacher_prompt={{ prompt }} {{ anwser }}"], "no column anwser (did you mean answer?)"),
    ([*SELF, "--distill.teacher_prompt={{ prompt"], "distill.teacher_prompt line 1"),
    ([*SELF, TOLD, "--distill.lmbda", "0.5"], "the teacher reads demonstrations as they are"),
    ([TOLD, "--distill.teacher_ema", "0.9"], "distill.teacher_ema averages the student"),
    ([*SELF[2:], TOLD, "--distill.teacher_ema", "0.9"], "give model.lora.r"),
    ([*SELF, TOLD, "--distill.teacher_ema", "0.9", "--roles.teacher.dtype", "bfloat16"],
     "roles.teacher.dtype is set; distill.teacher_ema makes the student's own weights the teacher"),
    ([*SELF, TOLD + " in a little wood" * 60], "tokens, more than its 256 positions; say less"),
    ([*SELF, "--distill.teacher_prompt={{ prompt }} {{ answer + 1 }}"], "distill.teacher_prompt: "),
    ([*SELF, "--distill.teacher_prompt=think"], "reads nothing of the row or the response"),
    ([*SELF, "--distill.teacher_prompt={{ prompt }} {{ feedback }}"], "no judge whose remark it is"),
    ([*SELF, "--distill.teacher_prompt={{ prompt }} {{ score }}"], "nothing scores the responses"),
    ([*SELF, "--distill.teacher_prompt={{ prompt }} {{ best }}", "--reward.functions=[builtin:repetition_penalty]"],
     "and there is one response; give distill.sampling.num_samples"),
])
def test_a_teacher_that_knows_no_more_or_cannot_be_asked_is_refused(place, answered, capfd, built, more, message):
    teacher = None if "self" in more else "teacher"
    assert message in refused(capfd, words(place, "refused-self", *answered, *more, teacher=teacher))
    assert not built  # before anything was loaded


def test_an_average_that_is_kept_beside_a_teacher_is_not_named_as_the_teacher(place, capfd):
    assert main(words(place, "averaged", "--ppo.ema", "true", "--distill.coef", "0.5", "--ppo.sampling.num_samples=2",
                      f"--reward.functions=['{place}/pay.py:short']", stage="grpo")) == 0
    assert f"teacher: {place}/teacher;" in capfd.readouterr().err
