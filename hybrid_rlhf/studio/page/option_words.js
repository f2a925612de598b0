// What options and their sections are called for people; an option's own name stands beside it.

const TITLES = {
  "data.max_length": "Longest row, tokens",
  "data.max_prompt_length": "Longest prompt, tokens",
  "data.packing": "Several examples to a row",
  "data.split": "Shares of the three stages",
  "distill.sampling.max_new_tokens": "Longest answer, tokens",
  "model.gradient_checkpointing": "Compute activations again, to save memory",
  "model.load_in_4bit": "Base in 4 bits",
  "model.lora.alpha": "Scale of the adapters (LoRA)",
  "model.lora.r": "Rank of the adapters (LoRA)",
  "ppo.kl_coef": "Price of drifting from the start (KL)",
  "ppo.sampling.max_new_tokens": "Longest answer, tokens",
  "ppo.sampling.num_samples": "Answers to each prompt",
  "roles.actor.learning_rate": "Learning rate",
  "roles.critic.learning_rate": "Learning rate of the critic",
  "train.eval_steps": "Steps between evaluations",
  "train.max_steps": "Steps",
  "train.num_train_epochs": "Passes over the data",
  "train.per_device_train_batch_size": "Rows of a step",
};
const SECTIONS = {
  "": "The run itself",
  compare: "The table at the end",
  data: "The data",
  distill: "Learning from a teacher",
  "distill.sampling": "How answers are drawn",
  dpo: "DPO",
  engine: "How training is laid out",
  environment: "Tools and environments",
  model: "The model",
  "model.lora": "Adapters (LoRA)",
  online: "Online DPO",
  "online.sampling": "How answers are drawn",
  ppo: "PPO",
  "ppo.sampling": "How answers are drawn",
  rejection: "Rejection sampling",
  "rejection.sampling": "How answers are drawn",
  reward: "Rewards",
  "reward.judge": "The judge",
  reward_sources: "Rewards beside the reward model",
  "reward_sources.judge": "The judge",
  roles: "Who shares weights",
  "roles.actor": "The model that is trained",
  "roles.critic": "The critic",
  "roles.ref": "The reference",
  "roles.reward": "The reward model",
  "roles.teacher": "The teacher",
  "stages.ppo": "Schedule of stage 3, PPO",
  "stages.reward": "Schedule of stage 2, the reward model",
  "stages.sft": "Schedule of stage 1, imitating",
  train: "The schedule",
};
const STAGES = {sft: "stage 1", reward: "stage 2", ppo: "stage 3"};

export const sectionTitle = (name) => SECTIONS[name] ?? name;

export function titleOf({name}) {
  const [, stage, inner] = /^stages\.(\w+)\.(.*)$/.exec(name) ?? [null, null, name];
  const words = inner.split(".").at(-1).replaceAll("_", " ");
  const title = TITLES[stage ? `train.${inner}` : inner] ?? words[0].toUpperCase() + words.slice(1);
  return stage ? `${title}, ${STAGES[stage] ?? stage}` : title;
}
