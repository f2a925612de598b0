"""A TRL SFT script of a few lines, as its documentation writes them: the peer of startup.py.

    python benchmarks/peers/trl_sft_script.py MODEL DATA.jsonl OUTPUT_DIR

It trains as our run of startup.py does (rows of 8, fp32, prompt and completion) and ends after one optimizer step, at
which it touches OUTPUT_DIR/first_step.
"""

import sys
from pathlib import Path

from datasets import load_dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class Mark(TrainerCallback):
    def on_step_end(self, *_given: object, **_named: object) -> None:
        (Path(out) / "first_step").touch()


model, data, out = sys.argv[1:]
config = SFTConfig(output_dir=out, max_steps=1, per_device_train_batch_size=8, bf16=False, use_cpu=True,
                   gradient_checkpointing=False, report_to="none", save_strategy="no", dataloader_pin_memory=False,
                   max_length=64)
trainer = SFTTrainer(model=model, args=config, train_dataset=load_dataset("json", data_files=data, split="train"),
                     callbacks=[Mark()])
trainer.train()
