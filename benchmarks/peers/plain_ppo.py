"""One PPO step as a careful person writes it with transformers and torch alone: the peer of ppo_step.py.

Four separate bf16 models, `generate`, padded batches, whole fp32 logits, old log-probabilities recomputed by a forward,
GAE, one update of actor and critic by clipped losses and fused AdamW. It does what our step does (one epoch, one
minibatch, gradients clipped), nothing twice, and nothing to be slow: no gradient checkpointing, no entropy, optimizer
states in bf16 like the weights, which is less work than our fp32 masters.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

CLIP, KL_COEF, GAMMA, LAM, MAX_NORM = 0.2, 0.05, 1.0, 0.95, 1.0


class PlainPPO:
    """limits: response length of each row. step(ids (B, P)) does all of it."""

    def __init__(self, base: Path, reward: Path, limits: list[int], lora_rank: int = 0) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        def load(kind: type, folder: Path, **more: object) -> nn.Module:
            return kind.from_pretrained(folder, dtype=torch.bfloat16, **more)

        self.actor, self.ref = (load(AutoModelForCausalLM, base) for _ in range(2))
        self.critic, self.reward = (load(AutoModelForSequenceClassification, reward, num_labels=1) for _ in range(2))
        for frozen in (self.ref, self.reward):
            frozen.eval().requires_grad_(False)
        self.limits = torch.tensor(limits)
        self.trained = [self._adapted(self.actor, lora_rank), self._adapted(self.critic, lora_rank)]
        self.optimizers = [torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0, fused=True) for p in self.trained]

    def _adapted(self, model: nn.Module, rank: int) -> list[nn.Parameter]:
        if rank:
            import peft

            settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
            peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
            if hasattr(model, "score"):
                model.score.weight.requires_grad_(True)
        return [p for p in model.parameters() if p.requires_grad]

    def step(self, prompts: Tensor) -> float:
        """One step; returns the mean score."""
        width = prompts.shape[1]
        ids, mask = self.generate(prompts)
        with torch.no_grad():
            old, ref = self.logprobs(self.actor, ids, width), self.logprobs(self.ref, ids, width)
            values = self.values(self.critic, ids)[:, width - 1 : -1]
            ends = width + self.limits - 1
            scores = self.values(self.reward, ids).gather(1, ends[:, None])[:, 0]
        rewards = -KL_COEF * (old - ref) * mask
        rewards[torch.arange(len(ids)), self.limits - 1] += scores
        advantages, returns = self.gae(rewards, values * mask, mask)
        flat = advantages[mask]
        advantages = (advantages - flat.mean()) / (flat.std() + 1e-8)
        self.update_actor(ids, width, mask, old, advantages)
        self.update_critic(ids, width, mask, values, returns)
        return float(scores.mean())

    @torch.no_grad()
    def generate(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """(B, P + R) tokens and (B, R) bool of those that count."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        longest, width, ends = int(self.limits.max()), prompts.shape[1], prompts.shape[1] + self.limits

        class AtLimit(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: object, **_others: object) -> Tensor:
                return input_ids.shape[1] >= ends

        self.actor.eval()
        ids = self.actor.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0,
                                  top_p=1.0, temperature=1.0, max_new_tokens=longest, pad_token_id=0, eos_token_id=None,
                                  stopping_criteria=StoppingCriteriaList([AtLimit()]))
        return ids, torch.arange(ids.shape[1] - width)[None] < self.limits[:, None]

    def logprobs(self, model: nn.Module, ids: Tensor, width: int) -> Tensor:
        """(B, R), from the logits of the whole sequence in fp32."""
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, width - 1 :, 0]

    def values(self, model: nn.Module, ids: Tensor) -> Tensor:
        """(B, T) fp32."""
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return model.score(hidden)[..., 0].float()

    def gae(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        advantages, last = torch.zeros_like(rewards), torch.zeros(len(rewards))
        for t in reversed(range(rewards.shape[1])):
            after = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros(len(rewards))
            last = rewards[:, t] + GAMMA * after - values[:, t] + GAMMA * LAM * last
            advantages[:, t] = last
        return advantages * mask, (advantages + values) * mask

    def update_actor(self, ids: Tensor, width: int, mask: Tensor, old: Tensor, advantages: Tensor) -> None:
        self.actor.train()
        ratio = (self.logprobs(self.actor, ids, width) - old).exp()
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
        self._apply(losses[mask].mean(), 0)

    def update_critic(self, ids: Tensor, width: int, mask: Tensor, values: Tensor, returns: Tensor) -> None:
        self.critic.train()
        new = self.values(self.critic, ids)[:, width - 1 : -1]
        bounded = values + (new - values).clamp(-CLIP, CLIP)
        losses = 0.5 * torch.maximum((new - returns) ** 2, (bounded - returns) ** 2)
        self._apply(losses[mask].mean(), 1)

    def _apply(self, loss: Tensor, which: int) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained[which], MAX_NORM)
        self.optimizers[which].step()
        self.optimizers[which].zero_grad(set_to_none=True)
