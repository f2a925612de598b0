"""SFT, a reward model and PPO from Python, on embedded data: python examples/three_stages.py [OUTPUT_DIR]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybrid_rlhf.data.datasets import DataConfig, Source
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.ppo_config import PPOConfig, SamplingConfig
from hybrid_rlhf.training import step1_sft, step2_reward, step3_ppo

SHORT = {"per_device_train_batch_size": 32, "max_eval_batches": 8}  # enough to see it work; `make demo` learns it
SFT, REWARD = (TrainConfig(learning_rate=2e-3, max_steps=n, **SHORT) for n in (100, 50))
PPO = TrainConfig(max_steps=5, **SHORT)


def main(out: str = "outputs/three_stages") -> None:
    names = {"sft": "demo/demonstrations", "reward": "demo/preferences", "ppo": "demo/prompts"}
    sources = [Source(names[s], stages=[s]) for s in names]
    texts, prompts = DataConfig(sources, max_length=64), DataConfig(sources, max_prompt_length=40)
    step1_sft.run(step1_sft.Config(output_dir=f"{out}/sft", model=ModelConfig(preset="demo"), data=texts, train=SFT))
    step2_reward.run(step2_reward.Config(output_dir=f"{out}/reward", data=texts, train=REWARD))  # starts from out/sft
    ppo = PPOConfig(sampling=SamplingConfig(max_new_tokens=16))
    step3_ppo.run(step3_ppo.Config(output_dir=f"{out}/ppo", data=prompts, train=PPO, ppo=ppo))


if __name__ == "__main__":
    main(*sys.argv[1:])
