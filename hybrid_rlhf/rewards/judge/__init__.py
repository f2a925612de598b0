"""A judge as a reward source: a language model, here or behind an address, that reads a rubric and the responses."""

from hybrid_rlhf.rewards.judge.judge_config import JudgeConfig
from hybrid_rlhf.rewards.judge.judge_source import JudgeSource, open_judge
from hybrid_rlhf.rewards.judge.verdicts import Grade, Preference

__all__ = ["Grade", "JudgeConfig", "JudgeSource", "Preference", "open_judge"]
