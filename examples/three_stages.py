"""SFT, a reward model and PPO from Python, on embedded data: python examples/three_stages.py [OUTPUT_DIR]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybrid_rlhf import PPOTrainer, RewardTrainer, SFTTrainer

STEPS = {"sft": 100, "reward": 50, "ppo": 5}
SHORT = {"per_device_train_batch_size": 32, "max_eval_batches": 8}  # enough to see it work; `make demo` learns it


def main(out: str = "outputs/three_stages") -> None:
    sft = SFTTrainer(None, "demo/demonstrations", output_dir=f"{out}/sft", model__preset="demo", max_length=64,
                     learning_rate=2e-3, max_steps=STEPS["sft"], **SHORT)
    sft.train()
    reward = RewardTrainer(sft, "demo/preferences", output_dir=f"{out}/reward", max_length=64, learning_rate=2e-3,
                           max_steps=STEPS["reward"], **SHORT)
    reward.train()
    ppo = PPOTrainer(sft, "demo/prompts", reward.output_dir, output_dir=f"{out}/ppo", max_prompt_length=40,
                     max_new_tokens=16, max_steps=STEPS["ppo"], **SHORT)
    print(f"mean score of held-out prompts: {ppo.train()['eval/reward']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
