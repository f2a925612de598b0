"""GRPO and RLOO steps by TRL's own trainers: the peers of grpo_step.py.

Set up as who knows TRL would on a CPU: weights in bf16 (which is faster here than autocast over fp32 ones), no gradient
checkpointing, one forward for the whole batch, no old log-probabilities (one update per rollout needs none), nothing
saved or logged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from peers.turns import Turns


class TrlGRPO:
    """prompts: texts, each sampled num_samples times. limits: response length of each sequence. step() does one step.

    Responses end where `limits` say, by a stopping criterion, and carry the tokenizer's EOS as their last token, from
    which TRL makes its masks. estimator: grpo or rloo (whose KL is paid in the reward).
    """

    def __init__(self, model: Path, tokenizer, prompts: list[str], num_samples: int, limits: list[int],  # noqa: ANN001
                 reward: Callable, beta: float, out: Path, estimator: str = "grpo") -> None:
        import trl
        from datasets import Dataset
        from transformers import AutoModelForCausalLM

        kind = estimator.upper()
        own = dict(loss_type="grpo", use_bias_correction_kl=False) if estimator == "grpo" else {}
        self.limits, self.eos, self.longest = torch.tensor(limits), tokenizer.eos_token_id, max(limits)
        config = getattr(trl, f"{kind}Config")(
            **own, output_dir=str(out), per_device_train_batch_size=len(limits), gradient_accumulation_steps=1,
            num_iterations=1, num_generations=num_samples, max_completion_length=self.longest, beta=beta,
            max_steps=100_000, learning_rate=1e-6,
            lr_scheduler_type="constant", bf16=False, gradient_checkpointing=False, use_cpu=True,
            save_strategy="no", report_to="none", logging_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False, shuffle_dataset=False)
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)  # the reference has its dtype
        self.trainer = getattr(trl, f"{kind}Trainer")(
            model=policy, reward_funcs=reward, args=config, processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]))
        self._bound(policy)
        self.step = Turns(self.trainer).step

    def _bound(self, policy) -> None:  # noqa: ANN001
        """Let `policy.generate` end each row at its limit."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        generate, limits, eos = policy.generate, self.limits, self.eos
        for settings in (self.trainer.generation_config, policy.generation_config):
            settings.eos_token_id = -1  # None would be filled in from the model's configuration

        def bounded(input_ids: torch.Tensor, **named: object) -> torch.Tensor:
            width = input_ids.shape[1]

            class AtLimit(StoppingCriteria):
                def __call__(self, ids: torch.Tensor, scores: object, **_others: object) -> torch.Tensor:
                    return ids.shape[1] >= limits + width

            is_even = bool((limits == limits[0]).all())  # then max_new_tokens says it all
            criteria = None if is_even else StoppingCriteriaList([AtLimit()])
            ids = generate(input_ids=input_ids, stopping_criteria=criteria, **named)
            responses = ids[:, width:]
            responses[responses == eos] = eos + 1  # one drawn by chance does not end a response here
            responses[torch.arange(len(ids)), limits - 1] = eos
            return ids

        policy.generate = bounded
