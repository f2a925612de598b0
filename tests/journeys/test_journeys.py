"""What a new user does and meets: the README's commands from an empty folder, the demo, and mistakes on the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.inference.named_models import model_folder
from hybrid_rlhf.models import shapes
from hybrid_rlhf.models.load import ModelConfig
from tests.factories.tiny import save_tiny, tiny_causal_lm
from tests.project.docs_blocks import COLOURS, FIRST_STEPS, FRUITS, ROOT, shell_blocks

TALKS = [(f"Name a {colour} fruit{end}", f"A {fruit}.") for end in (".", "!", " please.", ", please!", " now.", "?")
         for colour, fruit in zip(COLOURS, FRUITS, strict=True)]
LEARN = ["--train.max_steps", "120", "--train.per_device_train_batch_size", "10", "--train.learning_rate", "5e-3"]


def readme(*words: str) -> list[str]:
    """The README's command that trains and holds all of `words`."""
    found = [c for b in shell_blocks() if b.page == FIRST_STEPS for c in b.commands
             if set(words) <= set(c) and "--check_signal" not in c]
    assert found, f"README has no command with {words}"
    return found[0]


def hybrid_rlhf(folder: Path, argv: list[str], question: str | None = None) -> str:
    """stdout of `hybrid-rlhf ...` in `folder`, as a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HYBRID_RLHF_CACHE": str(folder / "cache"),
                                "OMP_NUM_THREADS": "1"}
    kernels = Path(os.environ.get("HYBRID_RLHF_CACHE", Path.home() / ".cache" / "hybrid_rlhf")) / "kernels"
    (folder / "cache").mkdir(exist_ok=True)
    if kernels.exists() and not (folder / "cache" / "kernels").exists():
        (folder / "cache" / "kernels").symlink_to(kernels)
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *argv], cwd=folder, env=environment, text=True,
                          capture_output=True, input=question, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with conversations, and what the README's first command makes of them."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "my-model", max_position_embeddings=1024)
    write(folder / "conversations.jsonl", [{"messages": [{"role": "user", "content": q},
                                                         {"role": "assistant", "content": a}]} for q, a in TALKS])
    hybrid_rlhf(folder, [*readme("--stage", "sft")[1:], *LEARN])
    return folder


READER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
assert "hybrid_rlhf" not in sys.modules
tokenizer, model = AutoTokenizer.from_pretrained("my-assistant"), AutoModelForCausalLM.from_pretrained("my-assistant")
ids = tokenizer.apply_chat_template([{"role": "user", "content": "Name a blue fruit."}], add_generation_prompt=True,
                                    return_tensors="pt", return_dict=True)
out = model.generate(**ids, max_new_tokens=16, do_sample=False)
print(tokenizer.decode(out[0, ids["input_ids"].shape[1]:], skip_special_tokens=True))
"""


@pytest.mark.slow
def test_own_conversations_become_a_model_that_answers_as_they_do_here_and_elsewhere(home) -> None:
    """By the chat (a prompt of the README's, and piped ones), and by transformers and llama.cpp once exported."""
    assert hybrid_rlhf(home, [*readme("chat", "--prompt")[1:], "--temperature", "0"]).strip() == "A cherry."
    piped = hybrid_rlhf(home, ["chat", "--model", "outputs/sft", "--temperature", "0"],
                        "Name a yellow fruit!\nName a blue fruit.\n")
    assert "A lemon." in piped and "A plum." in piped
    pytest.importorskip("gguf")
    hybrid_rlhf(home, ["outputs/sft" if w == "outputs/ppo" else w for w in readme("export")[1:]])
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    plain = subprocess.run([sys.executable, "-c", READER], cwd=home, env=environment, text=True, capture_output=True)
    assert plain.stdout.strip() == "A plum.", plain.stderr[-2000:]
    assert "FROM" in (home / "my-assistant" / "Modelfile").read_text()
    llama_cpp = pytest.importorskip("llama_cpp")
    file = next((home / "my-assistant").glob("*.gguf"))
    llama = llama_cpp.Llama(str(file), n_ctx=256, n_threads=1, verbose=False)
    asked = [{"role": "user", "content": "Name a blue fruit."}]
    answer = llama.create_chat_completion(asked, temperature=0, max_tokens=16)
    assert answer["choices"][0]["message"]["content"].strip() == "A plum."


@pytest.mark.slow
def test_preferences_become_a_reward_model_that_an_sft_folder_of_somebody_else_is_trained_with(home) -> None:
    write(home / "preferences.jsonl", [{"prompt": q, "chosen": a, "rejected": "Well, hmm, maybe?"} for q, a in TALKS])
    write(home / "questions.jsonl", [{"prompt": q} for q, _ in TALKS])
    shutil.copytree(home / "outputs" / "sft" / "model", home / "given")  # a model's folder and nothing else
    reward = [*readme("--stage", "reward")[1:], "--model.model_name_or_path", "given", "--train.learning_rate", "2e-3"]
    hybrid_rlhf(home, [*reward, "--train.max_steps", "60", "--train.per_device_train_batch_size", "10"])
    assert rows_of(home / "outputs" / "reward")[-1]["eval/accuracy"] > 0.9
    ppo = [*readme("--stage", "ppo")[1:], "--roles.actor.model_name_or_path", "given"]
    hybrid_rlhf(home, [*ppo, "--train.max_steps", "2", "--train.per_device_train_batch_size", "16",
                       "--ppo.sampling.max_new_tokens", "12"])
    assert all("rewards/model/mean" in row for row in rows_of(home / "outputs" / "ppo")[:2])
    both = ["sft=given" if w == "sft=outputs/sft" else w for w in readme("chat", "sft=outputs/sft")[1:]]
    assert hybrid_rlhf(home, [*both, "--prompt", "Name a red fruit."]).count("\n") >= 2


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_gets_measurably_better_and_leaves_a_model_to_chat_with(learned):
    said, summary = (learned.parent / "said").read_text(), json.loads((learned / "summary.json").read_text())
    assert summary["reward"]["accuracy"] >= 0.90
    assert 0.35 <= summary["sft"]["accuracy"] <= 0.70
    assert summary["ppo"]["accuracy"] >= summary["sft"]["accuracy"] + 0.10
    assert summary["ppo"]["accuracy"] > summary["sft_longer"]["accuracy"]
    assert summary["ppo"]["score"] > max(summary["sft"]["score"], summary["sft_longer"]["score"])
    assert "Held-out prompts" in said and "sft longer" in said.replace("_", " ")
    chat = subprocess.run([sys.executable, str(ROOT / "inference" / "chat"), "--model", str(learned / "ppo" / "model"),
                           "--prompt", "Hello"], capture_output=True, text=True, check=False)
    assert chat.returncode == 0 and chat.stdout.strip()
    again = subprocess.run([sys.executable, str(ROOT / "train.py"), "--stage", "all", "--output_dir", str(learned)],
                           capture_output=True, text=True, cwd=ROOT, check=False)
    assert again.returncode == 0 and again.stderr.count("nothing to do") >= 3
    assert json.loads((learned / "summary.json").read_text()) == summary


# --- what new users met

PAIRS = [(f"Name fruit {i}.", f"It is fruit {i}.") for i in range(20)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    save_tiny(tmp_path / "base", template=False, max_position_embeddings=1024)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": q, "response": a}) + "\n" for q, a in PAIRS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sft(*words: str) -> int:
    return main(["--stage", "sft", "--model", "base", "--data.sources", "rows.jsonl", "--train.max_steps", "1",
                 "--train.num_fixed_prompts", "0", "--output_dir", "run", *words])


def test_questions_and_answers_in_plain_text_make_a_base_without_a_template_one_that_can_chat(place, capsys):
    assert sft() == 0
    assert "rendered as user turns" in capsys.readouterr().err
    assert main(["chat", "--model", "run", "--prompt", "Name fruit 3.", "--max_new_tokens", "2"]) == 0


def test_raw_keeps_them_as_they_are_and_adds_no_template(place):
    assert sft("--data.raw", "true") == 0
    assert not (place / "run" / "model" / "chat_template.jinja").exists()


def test_a_model_of_an_earlier_run_in_an_unfinished_run_s_folder_is_told(place, capsys):
    assert sft() == 0
    record = json.loads((place / "run" / "run.json").read_text())
    (place / "run" / "run.json").write_text(json.dumps(record | {"status": "stopped"}))
    capsys.readouterr()
    assert model_folder("run").name == "model"
    assert "the run in run is not finished (stopped); the model there is of a run before it" in capsys.readouterr().err


def test_tied_weights_are_counted_once(tmp_path):
    model = tiny_causal_lm(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    found = shapes.count_parameters(shapes.read_config(ModelConfig(str(tmp_path))))
    assert found == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("words", "said"), [
    (["--stage", "reward", "--model", "base", "--data.sources", "odd.jsonl"],
     "columns: {chosen: good, rejected: bad}}"),
    (["--stage", "sft", "--model", "somebody/some-model", "--data.sources", "rows.jsonl"],
     "the hub is out of reach: give a folder with config.json, or download it first where there is a network "
     "(hf download somebody/some-model)"),
    (["--stage", "sft", "--ppo.kl_coef", "0.1"], "unknown option ppo.kl_coef: --stage sft has no ppo options"),
    (["--stage", "grpo", "--model", "base", "--data.sources", "rows.jsonl", "--reward.functions",
      "builtin:length_penalty"], "builtin:length_penalty needs max_tokens and buffer; give reward.options"),
])
def test_a_mistake_is_one_line_with_what_would_fit(place, monkeypatch, capsys, words, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for what is imported from here on, and for what was before
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    odd = [{"prompt": question, "good": answer, "bad": "no"} for question, answer in PAIRS]
    (place / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    assert main(words) == 2
    assert said in capsys.readouterr().err
