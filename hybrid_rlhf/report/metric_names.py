"""The meaning of every metric, one line each: shown in the reports, and as a table in docs/guide/report.md."""

from __future__ import annotations

from fnmatch import fnmatchcase

# * matches any text; the first matching row counts.
MEANINGS: dict[str, str] = {
    "step": "optimizer steps so far",
    "epoch": "passes over the rows",
    "loss": "training loss of the step",
    "mean_token_accuracy": "share of the trained tokens that are the most likely ones",
    "perplexity": "exp of the loss",
    "num_tokens": "tokens read so far",
    "accuracy": "share of pairs whose chosen response has the higher score; 0.5 is chance",
    "margin": "score of the chosen response minus that of the rejected one, mean",
    "mean_reward": "mean score of both responses",
    "min_reward": "lowest score of a response",
    "max_reward": "highest score of a response",
    "reward": "mean score of the responses, all sources weighed together",
    "reward_std": "standard deviation of the scores",
    "rewards/accuracies": "share of pairs whose chosen response has the higher implicit reward",
    "rewards/chosen": "beta times log(policy / reference) of the chosen responses",
    "rewards/rejected": "beta times log(policy / reference) of the rejected responses",
    "rewards/margins": "rewards/chosen minus rewards/rejected",
    "rewards/*/mean": "mean score of this source",
    "rewards/*/std": "standard deviation of this source's scores",
    "rewards/*/max": "highest score of this source, which is not optimised (weight 0)",
    "rewards/*/correlation": "correlation of this source, which is not optimised, with the score that is",
    "logps/*": "log-probability of these responses, in nats, mean",
    "kl": "nats per response away from the reference model (the start), estimated from the samples",
    "objective/kl": "as kl (TRL's name)",
    "objective/score": "as reward (TRL's name)",
    "objective/non_score_reward": "the KL penalty of a response, mean",
    "kl_coef": "coefficient of the KL penalty",
    "kto/kl": "the reference point of KTO, in nats",
    "entropy": "entropy of the next token, in nats, mean; near 0 the policy explores no more",
    "frac_reward_zero_std": "share of prompts whose responses all score the same: they teach nothing",
    "prompts/num_responses": "responses to each prompt",
    "prompts/with_spread": "share of prompts whose responses score differently",
    "prompts/best_score": "mean over the prompts of the best response's score",
    "completions/mean_length": "tokens of a response, mean",
    "completions/min_length": "tokens of the shortest response",
    "completions/max_length": "tokens of the longest response",
    "completions/mean_terminated_length": "tokens per response that ended by itself",
    "completions/min_terminated_length": "tokens of the shortest of these",
    "completions/max_terminated_length": "tokens of the longest of these",
    "completions/clipped_ratio": "share of responses that were cut off at max_new_tokens",
    "completions/empty_ratio": "share of responses without text",
    "completions/unscored_ratio": "share of responses that every reward source skipped",
    "completions/distinct_2": "distinct pairs of neighbouring tokens, as a share of all pairs",
    "completions/distinct_answers": "distinct answers to different prompts, as a share of all",
    "completions/top3_share": "share of the three most common responses",
    "completions/same_ending": "share of the responses that end with the most common last sentence",
    "score/clip_fraction": "share of the scores that ppo.score_clip cut",
    "policy/loss": "policy loss, mean over tokens",
    "policy/approx_kl": "nats per token between the policy that sampled and the one in training",
    "policy/ratio": "probability under the new policy over that under the old one, mean",
    "policy/clip_fraction": "share of tokens (or responses) whose ratio was clipped",
    "policy/importance": "mean weight that corrects the sampler's log-probabilities",
    "policy/masked_sequences": "share of the responses left out of the loss, for sampler and training disagree on them",
    "policy/early_stop": "1 if ppo.early_stop_kl ended the step's updates early",
    "policy/rate_factor": "factor on the learning rate, by which the step's KL is kept at ppo.update_kl",
    "clip_ratio/low_mean": "share clipped because the ratio fell too low",
    "clip_ratio/high_mean": "share clipped because the ratio rose too high",
    "clip_ratio/region_mean": "share clipped, either way",
    "value/loss": "loss of the critic",
    "value/mean": "mean value that the critic predicts",
    "value/explained_variance": "share of the returns' variance that the critic explains; a constant has 0",
    "value/clip_fraction": "share of the critic's predictions that were clipped",
    "ptx/coef": "weight of the pretraining loss",
    "ptx/*": "the same of the pretraining rows (PPO-ptx)",
    "aux_loss": "the router's load-balancing loss; lower is more even",
    "grad_norm": "norm of the gradient before clipping",
    "learning_rate": "learning rate of the step",
    "micro_batch_tokens": "tokens that a micro-batch may have",
    "train/skipped_updates": "updates left out so far because a gradient was not finite",
    "train/loss_scale": "factor of the loss in float16, by which small gradients survive",
    "value/*": "the same of the critic",
    "pairs/kept": "share of prompts that gave a pair: their responses score differently",
    "pairs/score_margin": "score of a pair's better response minus that of its worse one",
    "rejection/kept": "share of prompts whose best response is trained on",
    "rejection/chosen_score": "mean score of the responses trained on",
    "distill/divergence": "divergence from the teacher, in nats per token of the samples, mean",
    "distill/data_divergence": "the same on the tokens of demonstrations",
    "distill/teacher_kl": "nats per token by which the student finds its samples likelier than the teacher does, mean",
    "distill/uncompared": "share of the tokens in no span of text that ends with a token of both, which learn nothing",
    "distill/teacher_mass_outside": "probability that the teacher gives to words outside its distill.top_k, mean",
    "refill/rounds": "rounds of sampling until enough prompts had spread",
    "refill/filled": "share of the wanted prompts that were found",
    "judge/failed": "share of the responses that the judge gave no verdict on",
    "judge/asked_again": "share of the questions that the judge's first reply to could not be read",
    "judge/cached": "share of the questions whose answer was known from before",
    "judge/order_changed": "share of the pairs whose winner changed when the two were shown in the other order",
    "judge/word_mass": "probability of all words that the judge may answer with; near 0 it says something else",
    "judge/calls": "questions to the judge so far, of one process, second ones counted",
    "judge/cost": "spent on the judge so far, of one process, in the unit of reward.judge.cost_per_1m_input",
    "tools/call_frequency": "calls of tools in a response, mean",
    "tools/failure_frequency": "share of the calls that failed: raised, unknown, unreadable or too late",
    "tools/malformed_frequency": "share of the calls that could not be read",
    "tools/late_frequency": "share of the calls without an answer within environment.timeout",
    "tools/cut_frequency": "share of the calls whose answer was cut at environment.max_answer_chars",
    "episodes/turns": "turns of the model in a response, mean",
    "episodes/max_turns_ratio": "share of the episodes that ended at environment.max_turns",
    "episodes/no_room_ratio": "share of the episodes whose last answer no longer fitted into max_new_tokens",
    "engine/tokens_per_second": "tokens sampled in a second",
    "engine/kv_bytes": "memory of the sampler's keys and values (in metrics.jsonl: bytes)",
    "engine/preempted": "preemptions: responses that waited for cache memory and were prefilled again",
    "engine/kept_bytes": "memory of the words that truncated sampling drew from (in metrics.jsonl: bytes)",
    "engine/logprobs_recomputed": "1 where the sampler's log-probabilities were too far off and recomputed",
    "engine/logprob_drift": "nats per token between the sampler's log-probabilities and the trained model's",
    "memory/free": "memory of the computer that programs can still have (in metrics.jsonl: bytes)",
    "mark/before": "p(preferred) before the mark was learnt; of a thumb the mean probability of the answer's tokens",
    "mark/after": "mark/before, after the mark was learnt",
    "mark/kl": "nats per token away from the start, on neutral texts",
    "mark/held": "share of the other marks that were looked at which the model still holds to",
    "mark/updates": "optimizer steps of this mark",
    "time/*": "seconds of this part of the step",
    "memory/*": "most memory in use during this part (in metrics.jsonl: bytes)",
}
# measured on the machine, or counts of what is kept between runs: another value in an equal run
UNREPEATED = ("time/*", "memory/*", "engine/tokens_per_second", "engine/kv_bytes", "*micro_batch_tokens",
              "judge/calls", "judge/cost", "judge/cached")
BYTES = ("engine/kv_bytes", "engine/kept_bytes", "memory/*")  # shown as MiB and GiB


def meaning(name: str) -> str:
    """The meaning of a metric, held out (eval/...) or not; empty for one that a reward source or a script added."""
    plain = name.removeprefix("eval/")
    return next((text for pattern, text in MEANINGS.items() if fnmatchcase(plain, pattern)), "")


def is_repeatable(name: str) -> bool:
    """Whether the same run has the same value again."""
    return not any(fnmatchcase(name.removeprefix("eval/"), pattern) for pattern in UNREPEATED)


def shown(name: str, value: float | None) -> float | str:
    """A metric's value to show: bytes as MiB or GiB, text for a missing number."""
    from hybrid_rlhf.report.terminal import memory  # imports torch, which the studio does not need for meanings

    if value is None:
        return "not a number"
    return memory(value) if any(fnmatchcase(name, pattern) for pattern in BYTES) else value
