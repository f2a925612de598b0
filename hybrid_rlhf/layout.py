"""How the four roles are laid out: each one's own settings, and who shares a frozen base with whom.

A shared base is one frozen backbone; what differs between its roles is a low-rank adapter and, for critic and reward, a
scalar head. Trainers never see which layout was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rlhf.config import check, nearest

ROLES = ("actor", "ref", "critic", "reward")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "4bit", "8bit")
CRITIC_KINDS = ("auto", "model", "adapter", "head")
SHARING = ("auto", "all", "pairs", "actor-ref", "critic-reward", "none")


@dataclass(frozen=True)
class ActorConfig:
    """Settings of the policy that is trained. null takes the run's own setting.

    Attributes:
        model_name_or_path: Model of this role.
        learning_rate: Peak learning rate.
        zero_stage: ZeRO stage of its training; null takes engine.zero_stage.
        tp: Processes that share one copy of its weights while it generates.
        dtype: Of its weights; null takes model.dtype.
        quantize: none, 4bit or 8bit: how its frozen base is held; null takes model.load_in_4bit and load_in_8bit.
        offload: Whether weights, gradients and optimizer state wait on the CPU while other roles work.
        micro_batch_tokens: Overrides engine.micro_batch_tokens.
    """

    model_name_or_path: str | None = None
    learning_rate: float = 1e-5
    zero_stage: int | None = None
    tp: int | None = None
    dtype: str | None = None
    quantize: str | None = None
    offload: bool = False
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_role(self, "actor")


@dataclass(frozen=True)
class CriticConfig:
    """Settings of the value model. null takes the run's own setting.

    Attributes:
        kind: model (weights of its own), adapter (on a base that it shares), head (a scalar head on the reward model's
            frozen states), or auto: adapter where its base is shared, else model.
        model_name_or_path: Model of this role; null starts from the reward model.
        learning_rate: Peak learning rate.
        zero_stage: ZeRO stage of its training; null takes engine.zero_stage.
        tp: 1; only the actor generates.
        dtype: Of its weights; null takes model.dtype.
        quantize: none, 4bit or 8bit: how its frozen base is held; null takes model.load_in_4bit and load_in_8bit.
        offload: Whether weights, gradients and optimizer state wait on the CPU while other roles work.
        micro_batch_tokens: Overrides engine.micro_batch_tokens.
    """

    kind: str = "auto"
    model_name_or_path: str | None = None
    learning_rate: float = 1e-5
    zero_stage: int | None = None
    tp: int | None = None
    dtype: str | None = None
    quantize: str | None = None
    offload: bool = False
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        check(self.kind in CRITIC_KINDS, f"roles.critic.kind is {self.kind!r}; choose {', '.join(CRITIC_KINDS)}"
                                         f"{nearest(self.kind, CRITIC_KINDS)}")
        _check_role(self, "critic")


@dataclass(frozen=True)
class FrozenConfig:
    """Settings of a role that is never trained (ref, reward). null takes the run's own setting.

    Attributes:
        model_name_or_path: Model of this role.
        zero_stage: 0, or 3 to shard its weights; null takes 3 where engine.zero_stage is 3.
        tp: 1; only the actor generates.
        dtype: Of its weights; null takes model.dtype.
        quantize: none, 4bit or 8bit: how its weights are held; null takes model.load_in_4bit and load_in_8bit.
        offload: Whether its weights wait on the CPU while other roles work.
        micro_batch_tokens: Overrides engine.micro_batch_tokens.
    """

    model_name_or_path: str | None = None
    zero_stage: int | None = None
    tp: int | None = None
    dtype: str | None = None
    quantize: str | None = None
    offload: bool = False
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_role(self, "*")
        check(self.zero_stage in (None, 0, 3), f"roles.*.zero_stage is {self.zero_stage} for a role that is not "
                                               "trained; 0 keeps its weights whole, 3 shards them")


RoleConfig = ActorConfig | CriticConfig | FrozenConfig


def _check_role(config: RoleConfig, role: str) -> None:
    rate = getattr(config, "learning_rate", 0.0)
    check(rate >= 0, f"roles.{role}.learning_rate is {rate}; it must not be negative")
    check(config.zero_stage in (None, 0, 1, 2, 3),
          f"roles.{role}.zero_stage is {config.zero_stage}; choose 0, 1, 2 or 3")
    check(config.tp is None or config.tp >= 1, f"roles.{role}.tp is {config.tp}; it must be at least 1")
    check(role == "actor" or config.tp in (None, 1),
          f"roles.{role}.tp is {config.tp}, but only the actor generates; leave it out")
    check(config.dtype is None or config.dtype in DTYPE_NAMES,
          f"roles.{role}.dtype is {config.dtype!r}; choose {', '.join(DTYPE_NAMES)}"
          f"{nearest(config.dtype or '', DTYPE_NAMES)}")
    check(config.quantize is None or config.quantize in QUANTIZATIONS,
          f"roles.{role}.quantize is {config.quantize!r}; choose {', '.join(QUANTIZATIONS)}"
          f"{nearest(config.quantize or '', QUANTIZATIONS)}")
    check(config.micro_batch_tokens is None or config.micro_batch_tokens > 0,
          f"roles.{role}.micro_batch_tokens is {config.micro_batch_tokens}; it must be positive")


@dataclass(frozen=True)
class RolesConfig:
    """The four roles.

    Attributes:
        share_base: Whose frozen base is one: true or all (one base, adapters on it, the reference is the base itself),
            pairs (actor with ref, critic with reward), actor-ref, critic-reward, false or none (four models), or auto:
            all with LoRA where the runs allow it, else none.
        actor: The policy that is trained; without a model, that of `model`.
        ref: The policy it is held near to; without a model, the actor's own start.
        critic: The value model; without a model, it starts as a copy of the reward model.
        reward: The reward model; without a model, the finished reward run beside output_dir.
    """

    share_base: bool | str = "auto"
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: FrozenConfig = field(default_factory=FrozenConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: FrozenConfig = field(default_factory=FrozenConfig)

    def __post_init__(self) -> None:
        check(isinstance(self.share_base, bool) or self.share_base in SHARING,
              f"roles.share_base is {self.share_base!r}; choose true, false, {', '.join(SHARING)}"
              f"{nearest(str(self.share_base), SHARING)}")

    def __getitem__(self, role: str) -> RoleConfig:
        return getattr(self, role)

    @property
    def sharing(self) -> str:
        """share_base as one of SHARING."""
        return {True: "all", False: "none"}.get(self.share_base, self.share_base)
