"""The hybrid engine: training and inference over one set of weights."""

from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.engine.optimizers import OptimizerConfig
from hybrid_rlhf.engine.sampling import Generation, SamplingConfig
from hybrid_rlhf.engine.zero import ZeroConfig

__all__ = ["Generation", "HybridEngine", "OptimizerConfig", "SamplingConfig", "ZeroConfig"]
