"""Three journeys of somebody who has read the README and nothing else, each from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories.tiny import save_tiny
from tests.project.docs_blocks import COLOURS, FRUITS, ROOT, shell_blocks

pytestmark = pytest.mark.slow

TALKS = [(f"Name a {colour} fruit{end}", f"A {fruit}.") for end in (".", "!", " please.", ", please!", " now.", "?")
         for colour, fruit in zip(COLOURS, FRUITS, strict=True)]
LEARN = ["--train.max_steps", "120", "--train.per_device_train_batch_size", "10", "--train.learning_rate", "5e-3"]


def readme(*words: str) -> list[str]:
    """The README's command that trains and holds all of `words`."""
    found = [c for b in shell_blocks() if b.page == "README.md" for c in b.commands
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


@pytest.fixture
def home(tmp_path):
    save_tiny(tmp_path / "my-model", max_position_embeddings=1024)
    write(tmp_path / "conversations.jsonl", [{"messages": [{"role": "user", "content": q},
                                                           {"role": "assistant", "content": a}]} for q, a in TALKS])
    return tmp_path


def test_own_conversations_become_a_model_that_answers_as_they_do(home) -> None:
    hybrid_rlhf(home, [*readme("--stage", "sft")[1:], *LEARN])
    said = hybrid_rlhf(home, [*readme("chat", "--prompt")[1:], "--temperature", "0"])
    assert said.strip() == "A cherry."
    piped = hybrid_rlhf(home, ["chat", "--model", "outputs/sft", "--temperature", "0"], "Name a yellow fruit!\n")
    assert "A lemon." in piped


def test_preferences_become_a_reward_model_that_an_sft_folder_of_somebody_else_is_trained_with(home) -> None:
    write(home / "preferences.jsonl", [{"prompt": q, "chosen": a, "rejected": "Well, hmm, maybe?"} for q, a in TALKS])
    write(home / "questions.jsonl", [{"prompt": q} for q, _ in TALKS])
    hybrid_rlhf(home, [*readme("--stage", "sft")[1:], *LEARN[:2], "--train.max_steps", "30", *LEARN[2:]])
    (home / "outputs" / "sft" / "model").rename(home / "given")  # a model's folder and nothing else
    reward = [*readme("--stage", "reward")[1:], "--model.model_name_or_path", "given", "--train.learning_rate", "2e-3"]
    hybrid_rlhf(home, [*reward, "--train.max_steps", "60", "--train.per_device_train_batch_size", "10"])
    judged = rows_of(home / "outputs" / "reward")
    assert judged[-1]["eval/accuracy"] > 0.9
    ppo = [*readme("--stage", "ppo")[1:], "--roles.actor.model_name_or_path", "given"]
    hybrid_rlhf(home, [*ppo, "--train.max_steps", "30", "--train.per_device_train_batch_size", "16",
                       "--ppo.sampling.max_new_tokens", "12", "--roles.actor.learning_rate", "1e-3",
                       "--roles.critic.learning_rate", "2e-3"])
    paid = [row["reward"] for row in rows_of(home / "outputs" / "ppo") if "reward" in row]
    assert sum(paid[-5:]) / 5 > sum(paid[:5]) / 5 + 0.2, paid
    both = readme("chat", "sft=outputs/sft")[1:]
    both = ["sft=given" if w == "sft=outputs/sft" else w for w in both]
    assert hybrid_rlhf(home, [*both, "--prompt", "Name a red fruit."]).count("\n") >= 2


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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


def test_an_exported_model_says_the_same_in_transformers_and_in_llama_cpp(home) -> None:
    pytest.importorskip("gguf")
    hybrid_rlhf(home, [*readme("--stage", "sft")[1:], *LEARN])
    export = ["outputs/sft" if w == "outputs/ppo" else w for w in readme("export")[1:]]
    hybrid_rlhf(home, export)
    ours = hybrid_rlhf(home, ["chat", "--model", "outputs/sft", "--temperature", "0", "--prompt", "Name a blue fruit."])
    assert ours.strip() == "A plum."
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    plain = subprocess.run([sys.executable, "-c", READER], cwd=home, env=environment, text=True, capture_output=True)
    assert plain.stdout.strip() == ours.strip(), plain.stderr[-2000:]
    assert "FROM" in (home / "my-assistant" / "Modelfile").read_text()
    llama_cpp = pytest.importorskip("llama_cpp")
    file = next((home / "my-assistant").glob("*.gguf"))
    llama = llama_cpp.Llama(str(file), n_ctx=256, n_threads=1, verbose=False)
    asked = [{"role": "user", "content": "Name a blue fruit."}]
    answer = llama.create_chat_completion(asked, temperature=0, max_tokens=16)
    assert answer["choices"][0]["message"]["content"].strip() == ours.strip()
