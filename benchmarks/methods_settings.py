"""The settings of every row of methods.py: words of the command line. BESIDE stands for the folder of a seed's runs."""

from __future__ import annotations

_SHARED = ["--model.dtype=float32", "--data.split=[4,3,3]", "--data.eval_fraction=0.08", "--train.warmup_ratio=0.1",
           "--train.logging_steps=100", "--train.per_device_eval_batch_size=256"]
OF_TEXTS, OF_PROMPTS = [*_SHARED, "--data.max_length=64"], [*_SHARED, "--data.max_prompt_length=40"]
PAIRS = "--data.sources=[{path: demo/preferences}]"
FIXTURES = {  # as in the demo
    "sft": ["--model.preset=demo", "--model.vocab_size=512", "--data.sources=[{path: demo/demonstrations}]",
            "--train.learning_rate=4e-3", "--train.max_steps=600", "--train.per_device_train_batch_size=64"],
    "reward": [PAIRS, "--reward.center_coef=0", "--train.learning_rate=2e-3", "--train.max_steps=500",
               "--train.per_device_train_batch_size=48"],
}
_ONE = "--train.max_eval_batches=1"
_PROMPTS = ["--data.sources=[{path: demo/prompts}]", _ONE]
_ONLINE = [*_PROMPTS, "--ppo.sampling.max_new_tokens=16",
           "--ppo.missing_eos_penalty=1.0", "--ppo.num_ppo_epochs=2", "--ppo.num_minibatches=2"]
_ALONE = [*_ONLINE, "--train.max_steps=30", "--train.per_device_train_batch_size=128",
          "--roles.actor.learning_rate=1e-3"]
_GROUPS = [*_ONLINE, "--train.max_steps=30", "--train.per_device_train_batch_size=24",
           "--roles.actor.learning_rate=1e-3"]
_OFFLINE = [PAIRS, _ONE, "--train.max_steps=200", "--train.per_device_train_batch_size=64",
            "--train.learning_rate=1e-3"]

METHODS: dict[str, list[str]] = {
    "ppo": [*_ALONE, "--roles.critic.learning_rate=2e-3", "--ppo.kl_coef=0.2"],
    # KL in the loss: at 0.1 the reward model fooled cispo on seed 2 (7 nats), grpo in another run of seed 0 (4 nats)
    "grpo": [*_GROUPS, "--ppo.kl_coef=0.3"],
    "dr_grpo": [*_GROUPS, "--ppo.kl_coef=0.3"],
    "rloo": [*_GROUPS, "--ppo.kl_coef=0.2"],
    "reinforce_pp": [*_ALONE, "--ppo.kl_coef=0.4"],
    "gspo": [*_GROUPS, "--ppo.kl_coef=0.3"],
    "cispo": [*_GROUPS, "--ppo.kl_coef=0.3"],
    "dpo": [*_OFFLINE, "--dpo.beta=0.3"],  # 0.1, the usual one, ends 13 nats away on one seed of three
    "ipo": [*_OFFLINE, "--dpo.beta=1.0"],  # averaged over tokens: the margin aimed at is 1 / (2 beta) nats per token
    "hinge": [*_OFFLINE, "--dpo.beta=0.3"],
    "kto": [*_OFFLINE, "--dpo.beta=0.3"],
    "orpo": _OFFLINE,
    "simpo": _OFFLINE,
    "conditional_sft": [PAIRS, "--model.model_name_or_path=BESIDE/sft/model", "--train.max_steps=300",
                        "--train.per_device_train_batch_size=64", "--train.learning_rate=2e-3"],
    # at the usual beta of 0.1 it is fooled altogether: accuracy 0.08 at 12 nats after 150 steps
    "online_dpo": [*_PROMPTS, "--online.sampling.max_new_tokens=16", "--online.sampling.num_samples=4",
                   "--online.missing_eos_penalty=1.0", "--train.max_steps=120",
                   "--train.per_device_train_batch_size=48", "--roles.actor.learning_rate=1e-3", "--dpo.beta=0.5"],
    # few large rounds: with many small ones, each on eightfold rare answers that the reward model overrates, they win
    "rejection": [*_PROMPTS, "--rejection.sampling.max_new_tokens=16", "--rejection.missing_eos_penalty=1.0",
                  "--train.max_steps=3", "--train.per_device_train_batch_size=1024", "--rejection.num_epochs=2",
                  "--rejection.num_minibatches=16", "--roles.actor.learning_rate=1e-3"],
}
PROMPT = {"conditional_sft": "Score 1. {prompt}"}  # how a method's model is asked, where that is not the prompt alone


def common(name: str) -> list[str]:
    """What every method of its kind is given: one that samples reads prompts, the others whole texts."""
    return OF_PROMPTS if set(_PROMPTS) <= set(METHODS.get(name, ())) else OF_TEXTS
