"""The hybrid engine: training and inference over one set of weights."""

from hybrid_rlhf.engine.decode.sampling import Generation, SamplingConfig
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.engine.train.optimizers import OptimizerConfig
from hybrid_rlhf.engine.train.zero import ZeroConfig

__all__ = ["Generation", "HybridEngine", "OptimizerConfig", "SamplingConfig", "ZeroConfig"]
