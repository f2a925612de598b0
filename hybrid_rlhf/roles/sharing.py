"""Settings of the roles, and which of them share a frozen base.

A shared base is one frozen backbone; its roles differ in a low-rank adapter and, for critic and reward, a scalar head.
Trainers do not see the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybrid_rlhf.core.config import check, nearest
from hybrid_rlhf.core.options import check_values, one_of, within

ROLES = ("actor", "ref", "critic", "reward", "teacher")
TRAINED = ("actor", "critic")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "4bit", "8bit")
CRITIC_KINDS = ("auto", "model", "adapter", "head")
SHARING = ("auto", "all", "pairs", "actor-ref", "critic-reward", "none")


@dataclass(frozen=True)
class RoleConfig:
    """Settings of one role. null takes the run's own setting.

    Attributes:
        model_name_or_path: Model of this role.
        learning_rate: Peak learning rate; null goes by the method, LoRA and the size of the model.
        zero_stage: ZeRO stage of its training; of a role that is not trained 0, or 3 to shard its weights. null takes
            engine.zero_stage (0 for a role that is not trained, but where that is 3).
        tp: Processes that share one copy of its weights while it generates.
        kind: model (weights of its own), adapter (on a base that it shares), head (a scalar head on the reward model's
            frozen states), or auto: adapter where its base is shared, else model.
        dtype: Of its weights; null takes model.dtype.
        quantize: none, 4bit or 8bit: of its frozen base; null takes model.load_in_4bit and load_in_8bit.
        offload: Whether weights, gradients and optimizer state wait on the CPU while other roles work.
        micro_batch_tokens: Overrides engine.micro_batch_tokens.
    """

    model_name_or_path: str | None = None
    learning_rate: float | None = within(None, "[0,")
    zero_stage: int | None = None
    tp: int | None = within(None, "[1,")
    kind: str = one_of("auto", CRITIC_KINDS)
    dtype: str | None = one_of(None, DTYPE_NAMES)
    quantize: str | None = one_of(None, QUANTIZATIONS)
    offload: bool = False
    micro_batch_tokens: int | None = within(None, "[1,")


def _check_role(config: RoleConfig, role: str) -> None:
    check_values(config, f"roles.{role}.")
    check(config.zero_stage in (None, 0, 1, 2, 3),
          f"roles.{role}.zero_stage is {config.zero_stage}; choose 0, 1, 2 or 3")
    check(role in TRAINED or config.zero_stage in (None, 0, 3),
          f"roles.{role}.zero_stage is {config.zero_stage} for a role that is not trained; 0 keeps its weights whole, "
          "3 shards them")


@dataclass(frozen=True)
class RolesConfig:
    """The roles of an on-policy method.

    Attributes:
        share_base: Which roles share a frozen base: true or all (one base, adapters on it, the reference is the base
            itself), pairs (actor with ref, critic with reward), actor-ref, critic-reward, false or none (four models),
            or auto: all with LoRA where the runs allow it, else none. The teacher joins in all, and only where its base
            is the actor's.
        actor: The policy that is trained; without a model, that of `model`.
        ref: The reference policy of the KL penalty; without a model, the actor's own start. Where ppo.kl_coef is 0
            there is none, and no kl is reported, unless a model is named here.
        critic: The value model; without a model, it starts as a copy of the reward model.
        reward: The reward model; without a model, the finished reward run beside output_dir, or none where `reward`
            names other sources.
        teacher: The policy that distillation moves the actor towards; it reads the actor's tokens. A model of its own,
            self (the model that the actor starts from, which reads distill.teacher_prompt), or a run trained by LoRA on
            the actor's own base, which is then that adapter on the base that is shared.
    """

    share_base: bool | str = one_of("auto", SHARING)
    actor: RoleConfig = field(default_factory=RoleConfig)
    ref: RoleConfig = field(default_factory=RoleConfig)
    critic: RoleConfig = field(default_factory=RoleConfig)
    reward: RoleConfig = field(default_factory=RoleConfig)
    teacher: RoleConfig = field(default_factory=RoleConfig)

    def __post_init__(self) -> None:
        check(isinstance(self.share_base, bool) or self.share_base in SHARING,
              f"roles.share_base is {self.share_base!r}; choose true, false, {', '.join(SHARING)}"
              f"{nearest(str(self.share_base), SHARING)}")
        for role in ROLES:
            _check_role(self[role], role)

    def __getitem__(self, role: str) -> RoleConfig:
        return getattr(self, role)

    @property
    def sharing(self) -> str:
        """share_base as one of SHARING."""
        if isinstance(self.share_base, str):
            return self.share_base
        return "all" if self.share_base else "none"


@dataclass(frozen=True)
class Start:
    """Where a role's weights come from.

    base: the model of its backbone. adapter: folder of a trained adapter on that base, or None. head: the model of its
    scalar head, or None for a policy. dtype, quantize: how the base is loaded. reason: why it starts there, for
    messages.
    """

    base: str
    adapter: str | None = None
    head: str | None = None
    dtype: str = "auto"
    quantize: str = "none"
    reason: str = ""

    @property
    def base_settings(self) -> tuple[str, str, str]:
        """Must be equal for two roles to share a base."""
        return self.base, self.dtype, self.quantize


@dataclass(frozen=True)
class Layout:
    """Which roles share a base: every role is in exactly one group. kind: the critic's, no longer "auto"."""

    bases: tuple[tuple[str, ...], ...]
    kind: str

    def group(self, role: str) -> tuple[str, ...]:
        return next(g for g in self.bases if role in g)


def resolve(roles: RolesConfig, starts: Mapping[str, Start], has_lora: bool) -> tuple[Layout, str | None]:
    """The layout for the settings `roles`, and a line to announce if auto could not share one base among all.

    `starts` has the roles of the run: without a reward model, or for a method without a critic, three. Raises UserError
    for an impossible layout: roles that cannot share a base, a critic head without a reward model to read.
    """
    wanted, kind = roles.sharing, roles.critic.kind
    is_auto = wanted == "auto"
    if is_auto:
        wanted = "all" if has_lora else "critic-reward" if kind == "head" else "none"
    groups = [_sharing(group, kind, starts) for group in GROUPS[wanted]]
    obstacles = [o for group in groups for o in _obstacles(group, starts, has_lora, kind)]
    line = None
    if obstacles and is_auto and wanted == "all":
        fewer = ((("actor", "ref", "critic", "teacher"),), GROUPS["pairs"])
        candidates = [[s for s in (_sharing(g, kind, starts) for g in each)
                       if not _obstacles(s, starts, has_lora, kind)] for each in fewer]
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
    """The roles of `group` that share its base. A critic that is a model of its own does not, nor does a teacher of
    another base than the actor's: most teachers are, and that is not an obstacle for the others."""
    alone = {"critic"} if kind == "model" else set()
    if "teacher" in starts and starts["teacher"].base_settings != starts["actor"].base_settings:
        alone.add("teacher")
    return tuple(r for r in group if r in starts and r not in alone)


def _obstacles(group: tuple[str, ...], starts: Mapping[str, Start], has_lora: bool, kind: str) -> list[str]:
    """Why the roles of `group` cannot share a base; empty if they can."""
    obstacles = []
    if len(group) > 1 and not has_lora and ("actor" in group or ("critic" in group and kind != "head")):
        obstacles.append("a base is shared through low-rank adapters, and model.lora.r is 0 (16, say, turns them on)")
    for role in group[1:]:
        first, other = starts[group[0]], starts[role]
        if first.base != other.base:
            obstacles.append(f"the {group[0]} starts from {first.base} and the {role} from {other.base}"
                             f"{f' ({other.reason})' if other.reason else ''}")
        elif first.base_settings != other.base_settings:
            obstacles.append(f"the {group[0]} is loaded as {first.dtype}, quantize {first.quantize}, and the {role} as "
                             f"{other.dtype}, quantize {other.quantize}")
    return obstacles


def _check_alone(role: str, config: RoleConfig, layout: Layout) -> None:
    """Check the settings that need a base of its own."""
    group = layout.group(role)
    check(not config.offload or len(group) == 1,
          f"roles.{role}.offload: its base is that of {', '.join(r for r in group if r != role)} too and must stay; "
          "leave it out, or set roles.share_base false")
