// Names of metrics for people; the metric's own name stands beside in small letters.

const TITLES = {
  reward: "Reward", reward_std: "Spread of the rewards", loss: "Loss",
  kl: "Distance from the start (KL)", kl_coef: "Price of the distance (KL)", entropy: "How undecided it is (entropy)",
  accuracy: "Pairs told apart", margin: "From worse to better", mean_token_accuracy: "Tokens guessed right",
  perplexity: "Perplexity", "rewards/accuracies": "Pairs told apart", "rewards/margins": "From worse to better",
  "rewards/chosen": "Implicit reward of the better answer", "rewards/rejected": "Implicit reward of the worse answer",
  frac_reward_zero_std: "Prompts that teach nothing", "completions/mean_length": "Length of the answers",
  "completions/clipped_ratio": "Answers that do not end", "completions/empty_ratio": "Empty answers",
  "completions/distinct_2": "Variety of the words", "completions/distinct_answers": "Variety of the answers",
  "policy/loss": "Loss of the model", "policy/clip_fraction": "Updates held back", "value/loss": "Loss of the critic",
  "value/explained_variance": "How much the critic foresees", grad_norm: "Size of the gradient",
  learning_rate: "Learning rate", "distill/divergence": "Distance from the teacher", "time/step": "Seconds of a step",
  "mark/before": "Before the mark", "mark/after": "After the mark", "mark/kl": "Distance from the start per token (KL)",
  "mark/held": "Other marks still held", "mark/updates": "Updates for the mark",
  "time/generate": "Seconds to answer", "time/score": "Seconds to score", "time/train": "Seconds to train",
};

// The title of a metric; its name where it has none.
export function titleOf(name) {
  const source = /^rewards\/(.+)\/mean$/.exec(name)?.[1];
  return TITLES[name] ?? (source ? `Reward by ${source}` : name);
}
