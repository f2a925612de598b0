"""TRL's documented scripts, and some as users write them: each trains here with its imports changed, a line or two.

The texts are written anew after the calls that TRL documents. Where they name a model or a data set of the hub, there
is a tiny one: a folder of that name, and a few rows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl")
import datasets

from hybrid_rlhf.core.own_files import write_file
from tests.factories.tiny import tiny_causal_lm
from tests.factories.trl_templates import tokenizer_of

HUB = {"Qwen/Qwen2.5-0.5B": ("qwen2_5", 288), "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2_5", 640),
       "Qwen/Qwen3-0.6B": ("qwen3", 4096)}  # model: its template, positions
ASKED = [[{"role": "user", "content": f"What is {n} + {n}?"}] for n in range(1, 5)]
SAID = [[{"role": "assistant", "content": f"It is ${2 * n}$."}] for n in range(1, 5)]
ROWS = {
    "trl-lib/Capybara": [{"messages": [*a, *b]} for a, b in zip(ASKED, SAID, strict=True)],
    "roneneldan/TinyStories": [{"text": f"Once there were {n} dogs."} for n in range(4)],
    "trl-lib/ultrafeedback_binarized": [{"chosen": [*a, *b], "rejected": [*a, *SAID[0]], "score_chosen": 9.0}
                                        for a, b in zip(ASKED, SAID, strict=True)],
    "trl-lib/ultrafeedback-prompt": [{"prompt": a} for a in ASKED[:2]],
    "trl-lib/kto-mix-14k": [{"prompt": a, "completion": b, "label": n % 2 == 0}
                            for n, (a, b) in enumerate(zip(ASKED, SAID, strict=True))],
    "trl-lib/DeepMath-103K": [{"prompt": a, "solution": f"${2 * n}$"} for n, a in enumerate(ASKED[:2], 1)],
    "openai/gsm8k": [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(4)],
}

SFT = """
from trl import SFTTrainer
from datasets import load_dataset

trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
)
trainer.train()
"""

SFT_LORA = """
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train")
training_args = SFTConfig(output_dir="Qwen2.5-0.5B-SFT", learning_rate=2.0e-4, packing=True, assistant_only_loss=True,
                          model_init_kwargs={"dtype": "bfloat16"})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", args=training_args, train_dataset=dataset, peft_config=LoraConfig())
trainer.train()
trainer.save_model(training_args.output_dir)
"""

DPO = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
train_dataset = load_dataset("trl-lib/ultrafeedback_binarized", split="train")

training_args = DPOConfig(output_dir="Qwen2.5-0.5B-DPO")
trainer = DPOTrainer(model=model, args=training_args, processing_class=tokenizer, train_dataset=train_dataset)
trainer.train()
"""

DPO_LORA = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", dtype=torch.float32)
dataset = load_dataset("trl-lib/ultrafeedback_binarized", split="train")
training_args = DPOConfig(output_dir="dpo-lora", beta=0.1, logging_steps=1, learning_rate=5e-6, max_length=1024,
                          gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
trainer = DPOTrainer(
    model,
    ref_model=None,
    args=training_args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM"),
)
trainer.train()
print(trainer.state.log_history[-1]["rewards/margins"])
"""

KTO = DPO.replace("DPO", "KTO").replace("ultrafeedback_binarized", "kto-mix-14k")

REWARD = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
model = AutoModelForSequenceClassification.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", num_labels=1)
model.config.pad_token_id = tokenizer.pad_token_id
dataset = load_dataset("trl-lib/ultrafeedback_binarized", split="train")

training_args = RewardConfig(output_dir="Qwen2.5-0.5B-Reward", per_device_train_batch_size=2)
trainer = RewardTrainer(args=training_args, model=model, processing_class=tokenizer, train_dataset=dataset)
trainer.train()
"""

GRPO = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import think_format_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B",
    reward_funcs=think_format_reward,
    train_dataset=dataset,
)
trainer.train()
"""

RLOO = """
from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer

dataset = load_dataset("trl-lib/ultrafeedback-prompt", split="train")

# Dummy reward function for demonstration purposes
def reward_num_unique_letters(completions, **kwargs):
    completion_contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in completion_contents]

training_args = RLOOConfig(output_dir="Qwen2.5-0.5B-RLOO", num_train_epochs=1, normalize_advantages=True)
trainer = RLOOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=reward_num_unique_letters,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
"""

GRPO_TOOLS = '''
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b

dataset = Dataset.from_list([
    {"prompt": [{"role": "user", "content": "What is 3 multiplied by 4?"}], "answer": 12},
    {"prompt": [{"role": "user", "content": "Calculate 7 times 8."}], "answer": 56},
])

def accuracy(completions, answer, **kwargs):
    return [1.0 if str(a) in str(c[-1]["content"]) else 0.0 for c, a in zip(completions, answer)]

trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    args=GRPOConfig(output_dir="grpo-tools", chat_template_kwargs={"enable_thinking": False}, num_train_epochs=1,
                    max_completion_length=128),
    train_dataset=dataset,
    reward_funcs=accuracy,
    tools=[multiply],
)
trainer.train()
'''

GRPO_ENVIRONMENT = '''
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_dict({
    "prompt": [[{"role": "user", "content": f"Increment the counter by {i}."}] for i in range(1, 3)]
})

def reward_func(environments, **kwargs):
    return [env.counter for env in environments]

class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    args=GRPOConfig(output_dir="grpo-env", chat_template_kwargs={"enable_thinking": False}, num_train_epochs=1,
                    max_completion_length=128),
    train_dataset=dataset,
    reward_funcs=reward_func,
    environment_factory=IncrementEnv,
)
trainer.train()
'''

GRPO_OF_USERS = """
import re
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = "Answer in <reasoning>...</reasoning><answer>...</answer>."
model_name = "Qwen/Qwen2.5-0.5B-Instruct"

def get_gsm8k_questions(split="train"):
    data = load_dataset("openai/gsm8k", "main")[split]
    return data.map(lambda x: {
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": x["question"]}],
        "answer": x["answer"].split("####")[1].strip()})

def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    assert prompts[0][-1]["role"] == "user" and len(kwargs["question"]) == len(answer)
    return [2.0 if a in r else 0.0 for r, a in zip(responses, answer)]

def format_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if re.match(r"<reasoning>.*</answer>", c[0]["content"]) else len(c[0]["content"]) / 999
            for c in completions]

training_args = GRPOConfig(
    output_dir="outputs/Qwen-GRPO", run_name="Qwen-GRPO-gsm8k", learning_rate=5e-6, adam_beta1=0.9, adam_beta2=0.99,
    weight_decay=0.1, warmup_steps=0.1, lr_scheduler_type="cosine", logging_steps=1, bf16=True,
    per_device_train_batch_size=1, gradient_accumulation_steps=4, num_generations=4, max_completion_length=64,
    num_train_epochs=1, save_steps=100, max_grad_norm=0.1, log_on_each_node=False, use_vllm=True,
    vllm_gpu_memory_utilization=.3, report_to="none", reward_weights=[1.0, 0.5],
)
model = AutoModelForCausalLM.from_pretrained(model_name)
tokenizer = AutoTokenizer.from_pretrained(model_name)
tokenizer.pad_token = tokenizer.eos_token
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[format_reward_func, correctness_reward_func],
    args=training_args,
    train_dataset=get_gsm8k_questions(),
)
trainer.train()
print(trainer.state.log_history[-1]["rewards/format_reward_func/mean"])
"""

SFT_OF_USERS = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("openai/gsm8k", "main", split="train")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", torch_dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")

def formatting_prompts_func(example):
    return f"### Question: {example['question']}\\n ### Answer: {example['answer']}"

trainer = SFTTrainer(
    model,
    SFTConfig(output_dir="sft", packing=True, max_length=256, num_train_epochs=1, logging_steps=1, report_to="none",
              per_device_train_batch_size=2, gradient_accumulation_steps=2, warmup_steps=0, save_strategy="epoch"),
    train_dataset=dataset,
    eval_dataset=dataset.select(range(2)),
    processing_class=tokenizer,
    formatting_func=formatting_prompts_func,
)
trainer_stats = trainer.train()
metrics = trainer_stats.metrics
metrics["train_samples"] = len(dataset)
trainer.log_metrics("train", metrics)
trainer.save_metrics("train", metrics)
print(trainer.evaluate()["eval_loss"], trainer_stats.training_loss)
tokenizer.save_pretrained("sft")
"""

SCRIPTS = {"sft": SFT, "sft_lora": SFT_LORA, "dpo": DPO, "dpo_lora": DPO_LORA, "kto": KTO, "reward": REWARD,
           "grpo": GRPO, "rloo": RLOO, "grpo_tools": GRPO_TOOLS, "grpo_environment": GRPO_ENVIRONMENT,
           "grpo_of_users": GRPO_OF_USERS, "sft_of_users": SFT_OF_USERS}


def load_dataset(name: str, _config: str | None = None, split: str | None = None):
    rows = datasets.Dataset.from_list(ROWS[name])
    return rows if split else datasets.DatasetDict({"train": rows})


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for name, (template, positions) in HUB.items():
        tokenizer = tokenizer_of(template)
        tiny_causal_lm(0, vocab_size=len(tokenizer), max_position_embeddings=positions,
                       eos_token_id=tokenizer.eos_token_id).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_trl_s_trains_with_its_imports_changed(name, hub, tmp_path, monkeypatch):
    lines = SCRIPTS[name].splitlines()
    changed = [line.replace("from trl", "from hybrid_rlhf") for line in lines]
    assert sum(a != b for a, b in zip(lines, changed, strict=True)) == 1 + (name == "grpo")  # and of trl.rewards
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").symlink_to(hub / "Qwen")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    path = tmp_path / "script.py"
    write_file(path, "\n".join(changed) + "\n")
    space = {"__name__": "__main__"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    trainer = space["trainer"]
    record = json.loads((Path(trainer.output_dir) / "run.json").read_text())
    assert record["status"] == "finished" and trainer.state.global_step == trainer.history[-1]["step"]
    norms = [row["grad_norm"] for row in trainer.history if "grad_norm" in row]
    assert norms and (min(norms) > 0 or hasattr(trainer.config, "ppo"))  # a group of one score has no gradient
