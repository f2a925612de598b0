"""How the four roles are laid out: each one's own settings, and who shares a frozen base with whom.

A shared base is one frozen backbone; what differs between its roles is a low-rank adapter and, for critic and reward, a
scalar head. Trainers never see which layout was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from hybrid_rlhf.core.config import check, nearest

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
        learning_rate: Peak learning rate; null goes by the method, LoRA and the size of the model.
        zero_stage: ZeRO stage of its training; null takes engine.zero_stage.
        tp: Processes that share one copy of its weights while it generates.
        dtype: Of its weights; null takes model.dtype.
        quantize: none, 4bit or 8bit: how its frozen base is held; null takes model.load_in_4bit and load_in_8bit.
        offload: Whether weights, gradients and optimizer state wait on the CPU while other roles work.
        micro_batch_tokens: Overrides engine.micro_batch_tokens.
    """

    model_name_or_path: str | None = None
    learning_rate: float | None = None
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
        model_name_or_path: Model of this role; null starts from the reward model, or the actor where there is none.
        learning_rate: Peak learning rate; null goes by the method, LoRA and the size of the model.
        zero_stage: ZeRO stage of its training; null takes engine.zero_stage.
        dtype: Of its weights; null takes model.dtype.
        quantize: none, 4bit or 8bit: how its frozen base is held; null takes model.load_in_4bit and load_in_8bit.
        offload: Whether weights, gradients and optimizer state wait on the CPU while other roles work.
        micro_batch_tokens: Overrides engine.micro_batch_tokens.
    """

    kind: str = "auto"
    model_name_or_path: str | None = None
    learning_rate: float | None = None
    zero_stage: int | None = None
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
        dtype: Of its weights; null takes model.dtype.
        quantize: none, 4bit or 8bit: how its weights are held; null takes model.load_in_4bit and load_in_8bit.
        offload: Whether its weights wait on the CPU while other roles work.
        micro_batch_tokens: Overrides engine.micro_batch_tokens.
    """

    model_name_or_path: str | None = None
    zero_stage: int | None = None
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
    rate = getattr(config, "learning_rate", None)
    check(rate is None or rate >= 0, f"roles.{role}.learning_rate is {rate}; it must not be negative")
    check(config.zero_stage in (None, 0, 1, 2, 3),
          f"roles.{role}.zero_stage is {config.zero_stage}; choose 0, 1, 2 or 3")
    degree = getattr(config, "tp", None)
    check(degree is None or degree >= 1, f"roles.{role}.tp is {degree}; it must be at least 1")
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
        ref: The policy it is held near to; without a model, the actor's own start. Where ppo.kl_coef is 0 there is
            none, and no kl is reported, unless a model is named here.
        critic: The value model; without a model, it starts as a copy of the reward model.
        reward: The reward model; without a model, the finished reward run beside output_dir, or none where `reward`
            names other sources.
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

    def given(self, role: str) -> list[str]:
        """Names of the role's settings that are not the defaults."""
        own = self[role]
        return [f"roles.{role}.{f.name}" for f in fields(own) if getattr(own, f.name) != f.default]

    @property
    def sharing(self) -> str:
        """share_base as one of SHARING."""
        return {True: "all", False: "none"}.get(self.share_base, self.share_base)


@dataclass(frozen=True)
class Start:
    """Where a role's weights come from.

    base: the model whose backbone it has. adapter: folder of a trained adapter on that base, or None. head: the model
    whose scalar head it has, or None for a policy. dtype, quantize: how the base is loaded. reason: why it starts
    there, for messages.
    """

    base: str
    adapter: str | None = None
    head: str | None = None
    dtype: str = "auto"
    quantize: str = "none"
    reason: str = ""

    @property
    def held(self) -> tuple[str, str, str]:
        """What must be equal for two roles to share a base."""
        return self.base, self.dtype, self.quantize


@dataclass(frozen=True)
class Layout:
    """Who shares a base with whom: every role there is in exactly one group. kind: the critic's, "auto" no more."""

    bases: tuple[tuple[str, ...], ...]
    kind: str

    def group(self, role: str) -> tuple[str, ...]:
        return next(g for g in self.bases if role in g)


def resolve(roles: RolesConfig, starts: Mapping[str, Start], has_lora: bool) -> tuple[Layout, str | None]:
    """The layout that `roles` ask for, and a line to announce where auto could not share all of it.

    `starts` names the roles that there are: without a reward model, or for a method without a critic, three.
    Raises UserError where what was asked for cannot be: roles that cannot share a base, a head without a model to read.
    """
    wanted, kind = roles.sharing, roles.critic.kind
    is_auto = wanted == "auto"
    if is_auto:
        wanted = "all" if has_lora else "critic-reward" if kind == "head" else "none"
    groups = [_sharing(group, kind, starts) for group in GROUPS[wanted]]
    obstacles = [o for group in groups for o in _obstacles(group, starts, has_lora, kind)]
    line = None
    if obstacles and is_auto and wanted == "all":
        candidates = [(("actor", "ref", "critic"),), GROUPS["pairs"]]
        candidates = [[s for s in (_sharing(g, kind, starts) for g in each)
                       if not _obstacles(s, starts, has_lora, kind)] for each in candidates]
        groups = next((c for c in candidates if c), [])
        shared = " and ".join(f"{' with '.join(g)}" for g in groups if len(g) > 1) or "no two roles"
        line = f"roles.share_base auto: not one base for all, for {obstacles[0]}; sharing: {shared}"
        obstacles = []
    check(not obstacles, f"roles that cannot share a base (roles.share_base {roles.share_base}): "
          f"{obstacles[0] if obstacles else ''}; fix that, or give roles.share_base auto")
    groups = [g for g in groups if len(g) > 1]
    alone = [(r,) for r in ROLES if r in starts and not any(r in g for g in groups)]
    is_sharing = any("critic" in g for g in groups)
    kind = kind if kind != "auto" else "adapter" if has_lora and is_sharing else "model"
    layout = Layout(tuple(sorted((*groups, *alone), key=lambda g: ROLES.index(g[0]))), kind)
    check("critic" not in starts or kind != "head" or "reward" in layout.group("critic"),
          "roles.critic.kind is head, which reads the reward model's states; " + (
              "set roles.share_base to critic-reward, pairs or all" if "reward" in starts else
              "there is none here: give roles.reward.model_name_or_path, or take another kind"))
    check("critic" not in starts or kind != "adapter" or has_lora,
          "roles.critic.kind is adapter, which needs model.lora.r > 0 (such as 16)")
    for role in starts:
        _check_alone(role, roles[role], layout)
    return layout, line


GROUPS = {"all": (ROLES,), "pairs": (("actor", "ref"), ("critic", "reward")), "actor-ref": (("actor", "ref"),),
          "critic-reward": (("critic", "reward"),), "none": ()}


def _sharing(group: tuple[str, ...], kind: str, starts: Mapping[str, Start]) -> tuple[str, ...]:
    """The roles of `group` that there are; a critic that is a model of its own shares nothing."""
    return tuple(r for r in group if r in starts and (r != "critic" or kind != "model"))


def _obstacles(group: tuple[str, ...], starts: Mapping[str, Start], has_lora: bool, kind: str) -> list[str]:
    """Why the roles of `group` cannot share a base; empty where they can."""
    found = []
    if len(group) > 1 and not has_lora and ("actor" in group or ("critic" in group and kind != "head")):
        found.append("a base is shared through low-rank adapters, and model.lora.r is 0 (16, say, turns them on)")
    for role in group[1:]:
        first, other = starts[group[0]], starts[role]
        if first.base != other.base:
            found.append(f"the {group[0]} starts from {first.base} and the {role} from {other.base}"
                         f"{f' ({other.reason})' if other.reason else ''}")
        elif first.held != other.held:
            found.append(f"the {group[0]} is held as {first.dtype}, quantize {first.quantize}, and the {role} as "
                         f"{other.dtype}, quantize {other.quantize}")
    return found


def _check_alone(role: str, config: RoleConfig, layout: Layout) -> None:
    """What only a role with a base of its own can have."""
    group = layout.group(role)
    check(not config.offload or len(group) == 1,
          f"roles.{role}.offload: its base is that of {', '.join(r for r in group if r != role)} too and must stay; "
          "leave it out, or set roles.share_base false")
