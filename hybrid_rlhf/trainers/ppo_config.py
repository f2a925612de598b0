"""Settings of the on-policy methods. The estimator and the policy loss determine the method."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rlhf.algorithms import kl
from hybrid_rlhf.algorithms.advantages import ESTIMATORS
from hybrid_rlhf.algorithms.divergence import KINDS, Divergence
from hybrid_rlhf.algorithms.policy import AGGREGATIONS, POLICY_LOSSES
from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.options import check_values, one_of, within
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.rollout.old_logprobs import OLD_LOGPROBS


@dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO and related methods.

    Attributes:
        sampling: How responses are drawn.
        estimator: Advantage estimator: gae (with a critic), reinforce_pp, reinforce_pp_baseline, rloo, grpo,
            batch_grpo (the spread of the whole batch), gdpo (each reward source normalised on its own, penalties for
            length and for not ending as one more), process_grpo or dr_grpo (all but the first two need
            sampling.num_samples > 1). With rewards at
            steps or turns, gae, reinforce_pp and process_grpo give a token the rewards that follow it; the others sum
            those of a response.
        policy_loss: ppo (clipped ratio of each token), gspo (of each sequence, geometric mean), ppo_sequence (of each
            sequence, product), cispo (clipped ratio as a weight), sapo (a sigmoid in place of the clip) or vespo (a
            weight of each sequence that fades as its ratio, a product, leaves 1).
        aggregation: How the loss is averaged: token (over all tokens of the minibatch), sequence (over each response,
            then over responses), constant (each response's sum over max_new_tokens) or sum (each response's sum; with
            gspo this is LUSPO, and a rate for it is smaller by the length); null takes the method's own.
        max_refills: Rounds of further prompts, at most, whose responses replace groups with equal scores (dynamic
            sampling, DAPO); 0 trains on such groups too.
        num_ppo_epochs: Passes over each rollout; null goes by the method.
        num_minibatches: Optimizer steps per pass; null goes by the method.
        minibatch_size: Sequences per optimizer step, over all processes; overrides num_minibatches.
        kl_coef: KL coefficient: the penalty per nat of KL to the reference (the start value, if adaptive). At 0 no
            reference is loaded; null goes by the method.
        kl_in: Whether the KL penalty is in the reward or in the loss; null takes the estimator's own.
        kl_estimator: k1, k2 or k3; null takes k1 in the reward and k3 in the loss.
        kl_bias_correction: Whether each token's KL in the loss is multiplied by its ratio (with gspo its response's),
            with the ratio's gradient: that of k3 is then unbiased (DeepSeek-V3.2; TRL's use_bias_correction_kl).
        kl_target: Nats per sequence that an adaptive kl_coef aims at; None keeps kl_coef fixed.
        kl_horizon: Sequences over which the adaptive coefficient moves.
        cliprange: Clip range of the probability ratio.
        cliprange_low: Of ratios below 1; null takes cliprange.
        cliprange_high: Of ratios above 1; null takes cliprange.
        sapo_temperature_pos: How fast sapo's sigmoid closes for tokens with a positive advantage.
        sapo_temperature_neg: For the others.
        vespo_k_pos: Exponent of the ratio in vespo's weight for advantages of 0 or more: fades ratios below 1.
        vespo_lambda_pos: Its decay there: fades ratios above 1.
        vespo_k_neg: The exponent for negative advantages.
        vespo_lambda_neg: The decay for negative advantages.
        dual_clip: Bound of the loss of tokens with a negative advantage, in advantages (3, say); null has none.
        max_off_policy_kl: Tokens with a negative advantage, of responses whose KL of the sampler to the policy (a mean
            over their tokens, in nats) is larger, are left out of the policy loss (DeepSeek-V3.2); null keeps all.
        top_entropy_quantile: Share of a minibatch's tokens, those of the largest entropy, that stay in the policy loss
            (arXiv 2506.01939; 0.2, say). Below 1 a further forward of each minibatch finds them.
        mask_truncated: Whether responses that did not end by themselves are left out of the losses (their scores stay
            in the baseline of their group, and they count where a loss is averaged over responses).
        cliprange_value: Clip range of the value's change.
        vf_coef: Factor of the value loss.
        entropy_coef: Factor of the entropy bonus, a mean over all tokens of the minibatch whatever `aggregation` is, as
            in TRL.
        gamma: Discount.
        lam: GAE's lambda.
        whiten_advantages: Whether advantages get mean 0 and variance 1 over the rollout: over its tokens, or over its
            responses where all tokens of a response have one advantage (as TRL's RLOO); null: with a critic.
        critic_warmup_steps: Steps at the start that train the critic alone; null: none for a critic that starts from
            the reward model, else a tenth of the run and at most 5.
        early_stop_kl: A minibatch whose policy/approx_kl (nats per token) is above it ends the updates on its rollout;
            0 never ends them; null goes by the method (0.02 with a critic and two updates or more on a rollout, else
            0).
        update_kl: Target of the KL per token, in nats, by which the updates on a rollout may move the policy: after a
            larger KL the actor's learning rate is lowered, after a smaller one it rises again, at most to the
            schedule's; 0 leaves the rate alone; null goes by the method (0.01 with a critic and two updates or
            more on a rollout, else 0).
        normalise_scores: Whether a reward model's scores are put on the scale (mean 0, std 1) that its stage 2 measured
            on both answers of held-out pairs.
        score_clip: Bound of a normalised score, in standard deviations; scores of functions, services and other models
            are never clipped. null has none.
        min_score: Least score of a response, all sources together, before penalties; null has none.
        max_score: Largest score, in the same way.
        missing_eos_penalty: Subtracted from the score of a response that did not end by itself; null takes 1 where a
            reward model scores, else 0.
        overlong_penalty: Subtracted from the score of a response of max_new_tokens (answers of tools included);
            shorter ones pay less.
        overlong_buffer: Tokens before max_new_tokens within which the overlong penalty rises from 0.
        old_logprobs: Source of the ratio's old log-probabilities: sampler, recompute (a training forward), or
            auto (the sampler's while their drift stays within max_logprob_drift; recompute for ratios of sequences,
            whose clip range is narrower than that).
        max_logprob_drift: Mean |sampled - training| log-probability, in nats, that auto accepts.
        importance: Importance weights for the mismatch of sampler and trainer: none; token or sequence (truncated
            importance sampling); or masked (responses whose ratio, the geometric mean of their tokens', is
            not in [importance_low, importance_cap] are left out of the loss). There are no weights where the sampler's
            log-probabilities are the old ones.
        importance_cap: Largest of these weights; with masked, the largest ratio (a mean over tokens is near 1: 1.05,
            say).
        importance_low: With masked, the smallest ratio; null takes 1 / importance_cap.
        replay_truncation: Whether all log-probabilities are normalised over the candidate tokens that top_k, top_p or
            min_p left when a token was drawn, which are kept for it: ratio, KL and entropy are then those of the policy
            that sampled. Nothing changes without truncation.
        ptx_coef: Factor of the pretraining loss (PPO-ptx) in the actor's steps, on the demonstrations or plain texts
            of sources for stage ptx. The loss is a mean over tokens, so InstructGPT's 27.8, which belongs to other
            averages, does not apply: begin near 1. 0 turns it off.
        ptx_scale: fixed, or relative: ptx_coef times the size of the policy loss (|advantage|, averaged as that loss
            is) over the pretraining loss, both of the same step, so that 1 makes them equally large.
        ptx_batch_size: Texts per process and optimizer step; null takes as many as there are sequences.
        ema: Whether a moving average of the actor's weights is kept, in fp32, and exported as model_ema at the end.
        ema_decay: Decay of the average at every optimizer step.
    """

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    estimator: str = one_of("gae", ESTIMATORS)
    policy_loss: str = one_of("ppo", POLICY_LOSSES)
    aggregation: str | None = one_of(None, AGGREGATIONS)
    max_refills: int = within(0, "[0,")
    num_ppo_epochs: int | None = within(None, "[1,")
    num_minibatches: int | None = within(None, "[1,")
    minibatch_size: int | None = within(None, "[1,")
    kl_coef: float | None = within(None, "[0,")
    kl_in: str | None = one_of(None, ("reward", "loss"))
    kl_estimator: str | None = one_of(None, kl.KL_ESTIMATORS)
    kl_bias_correction: bool = False
    kl_target: float | None = within(None, "(0,")
    kl_horizon: int = within(10000, "(0,")
    cliprange: float = within(0.2, "(0,")
    cliprange_low: float | None = within(None, "(0,")
    cliprange_high: float | None = within(None, "(0,")
    sapo_temperature_pos: float = within(1.0, "(0,")
    sapo_temperature_neg: float = within(1.05, "(0,")
    vespo_k_pos: float = within(2.0, "[0,")
    vespo_lambda_pos: float = within(3.0, "(0,")
    vespo_k_neg: float = within(3.0, "[0,")
    vespo_lambda_neg: float = within(2.0, "(0,")
    dual_clip: float | None = None
    max_off_policy_kl: float | None = within(None, "(0,")
    top_entropy_quantile: float = within(1.0, "[0, 1]")
    mask_truncated: bool = False
    cliprange_value: float = within(0.2, "(0,")
    vf_coef: float = 1.0
    entropy_coef: float = within(0.0, "[0,")
    gamma: float = within(1.0, "[0, 1]")
    lam: float = within(0.95, "[0, 1]")
    whiten_advantages: bool | None = None
    critic_warmup_steps: int | None = within(None, "[0,")
    early_stop_kl: float | None = within(None, "[0,")
    update_kl: float | None = within(None, "[0,")
    normalise_scores: bool = True
    score_clip: float | None = 5.0
    min_score: float | None = None
    max_score: float | None = None
    missing_eos_penalty: float | None = None
    overlong_penalty: float = within(0.0, "[0,")
    overlong_buffer: int = 16
    old_logprobs: str = one_of("auto", OLD_LOGPROBS)
    max_logprob_drift: float = 0.02
    importance: str = one_of("none", ("none", "token", "sequence", "masked"))
    importance_cap: float = within(2.0, "(0,")
    importance_low: float | None = within(None, "(0,")
    replay_truncation: bool = True
    ptx_coef: float = within(0.0, "[0,")
    ptx_scale: str = one_of("fixed", ("fixed", "relative"))
    ptx_batch_size: int | None = within(None, "[1,")
    ema: bool = False
    ema_decay: float = within(0.992, "[0, 1)")

    def __post_init__(self) -> None:
        check_values(self, "ppo.")
        check(self.kl_target is None or self.kl_coef != 0,
              f"ppo.kl_target is {self.kl_target}, but a ppo.kl_coef of 0 stays 0; give a start value such as 0.05")
        self._check_method()

    def _check_method(self) -> None:
        """Refuse settings that contradict each other."""
        row, size = ESTIMATORS[self.estimator], self.sampling.num_samples
        check(not row.needs_group or size > 1,
              f"ppo.estimator {self.estimator} compares the responses to one prompt, and ppo.sampling.num_samples is "
              f"{size}; give 2 or more (such as 8)")
        check(not self.max_refills or size > 1,
              f"ppo.max_refills is {self.max_refills}, and ppo.sampling.num_samples is {size}: one response has no "
              "group; give 2 or more (such as 8)")
        self.sampling.check_groups("ppo")
        passes = [n for n in (self.num_ppo_epochs, self.num_minibatches) if n is not None]  # None: not resolved yet
        check(not self.update_kl or len(passes) < 2 or max(passes) > 1 or self.minibatch_size,
              f"ppo.update_kl is {self.update_kl}, and one update on a rollout never sees how far it moved; give "
              "ppo.num_ppo_epochs 2")
        check(self.kl_in_reward or self.kl_estimator != "k1",
              "ppo.kl_estimator k1 has no gradient on average, and ppo.kl_in is loss; choose k2 or k3")
        check(row.needs_values or not self.critic_warmup_steps,
              f"ppo.critic_warmup_steps is {self.critic_warmup_steps}, and ppo.estimator {self.estimator} has no "
              "critic; choose gae")
        check(self.dual_clip is None or (self.dual_clip > 1 and POLICY_LOSSES[self.policy_loss].clips == "both"),
              f"ppo.dual_clip is {self.dual_clip} with ppo.policy_loss {self.policy_loss}; it must be above 1, and "
              "cispo, sapo and vespo have no clipped ratio to bound")
        least, most = self.min_score, self.max_score
        check(least is None or most is None or least < most,
              f"ppo.min_score is {least} and ppo.max_score {most}; the first must be less")
        longest = self.sampling.max_new_tokens
        check(not self.overlong_penalty or 1 <= self.overlong_buffer <= longest,
              f"ppo.overlong_buffer is {self.overlong_buffer}; it must lie in [1, ppo.sampling.max_new_tokens "
              f"{longest}]")
        check(self.ptx_coef > 0 or (self.ptx_scale == "fixed" and self.ptx_batch_size is None),
              "ppo.ptx_scale and ppo.ptx_batch_size are the pretraining loss's, and ppo.ptx_coef is 0; give it too")
        check(self.ema or self.ema_decay == 0.992, f"ppo.ema_decay is {self.ema_decay}, and no average is kept; give "
                                                   "ppo.ema true too")
        check(self.importance == "none" or self.old_logprobs != "sampler",
              f"ppo.importance {self.importance} weighs a training forward against the sampler; "
              "ppo.old_logprobs sampler has none; choose recompute")
        check(self.importance == "none" or self.policy_loss != "vespo",
              f"ppo.importance {self.importance} weighs the ratio to the sampler, and so does ppo.policy_loss vespo; "
              "leave it out, and choose ppo.old_logprobs sampler")
        low, high = self.importance_band
        check(self.importance != "masked" or low < high,
              f"ppo.importance masked keeps responses whose ratio lies in [{low:g}, {high:g}], where there is none; "
              "give ppo.importance_cap 1.05, say")

    @property
    def needs_critic(self) -> bool:
        return ESTIMATORS[self.estimator].needs_values

    @property
    def kl_in_reward(self) -> bool:
        return (self.kl_in or ESTIMATORS[self.estimator].kl_in) == "reward"

    @property
    def kl_kind(self) -> str:
        """kl_estimator, or what fits the place of the KL penalty."""
        return self.kl_estimator or ("k1" if self.kl_in_reward else "k3")

    @property
    def averaging(self) -> str:
        """aggregation, or the policy loss's default, or the estimator's."""
        return (self.aggregation or POLICY_LOSSES[self.policy_loss].aggregation
                or ESTIMATORS[self.estimator].aggregation)

    @property
    def loss_options(self) -> dict[str, float]:
        """The options that this policy loss alone reads."""
        return {name: getattr(self, name) for name in POLICY_LOSSES[self.policy_loss].options}

    @property
    def old_logprobs_from(self) -> str:
        """old_logprobs; auto is recompute for ratios of sequences: the drift of tokens that auto accepts is far wider
        than the clip range of such a ratio (3e-4 for GSPO, 2507.18071)."""
        is_of_tokens = POLICY_LOSSES[self.policy_loss].level == "token"
        return "recompute" if self.old_logprobs == "auto" and not is_of_tokens else self.old_logprobs

    @property
    def importance_band(self) -> tuple[float, float]:
        """The range of response ratios that masked importance sampling keeps in the loss."""
        return self.importance_low or 1 / self.importance_cap, self.importance_cap

    @property
    def whitens(self) -> bool:
        return self.needs_critic if self.whiten_advantages is None else self.whiten_advantages

    @property
    def clipranges(self) -> tuple[float, float]:
        """How far below and above 1 the ratio may go."""
        return self.cliprange_low or self.cliprange, self.cliprange_high or self.cliprange


@dataclass(frozen=True)
class DistillTerm:
    """A teacher (roles.teacher) beside the rewards: the weight of its divergence in the actor's loss.

    Attributes:
        coef: Factor of the mean divergence over the samples' tokens; 0 has no teacher.
        divergence: reverse_kl, forward_kl or jsd, over the whole vocabulary.
        beta: Of jsd, between 0 (as forward_kl) and 1 (as reverse_kl).
        temperature: Divides the logits of both before they are compared.
        top_k: The divergence over the teacher's k likeliest tokens and all others as one: a lower bound, for a teacher
            whose weights are sharded; 0 takes the whole vocabulary.
        teacher_prompt: Jinja template of what the teacher reads in the place of the last user message, as in --stage
            distill; null: what the actor reads.
    """

    coef: float = within(0.0, "[0,")
    divergence: str = one_of("reverse_kl", KINDS)
    beta: float = within(0.5, "(0, 1)")
    temperature: float = within(1.0, "(0,")
    top_k: int = within(0, "[0,")
    teacher_prompt: str | None = None

    def __post_init__(self) -> None:
        check_values(self, "distill.")

    @property
    def kind(self) -> Divergence:
        return Divergence(self.divergence, beta=self.beta, temperature=self.temperature)
