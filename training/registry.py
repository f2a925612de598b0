"""Table of the stages, one row each. A new stage is a module with Config, run(config, command) and previews(config),
and a row here; a variant of a stage is a row alone.

Imports nothing heavy: the command line reads this table first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hybrid_rlhf.data.sources import Reads


class Rate(NamedTuple):
    """Default learning rates: of all weights, and of adapters. small: factor of both for a small model."""

    full: float
    lora: float
    small: float = 10


class By(NamedTuple):
    """A default computed from the settings. what: from which of them, in words."""

    what: str
    value: Callable[[object], float]


class Stage(NamedTuple):
    """One row of the table.

    base, preset: of a variant, its stage and the options that it presets. Options that the user gives take precedence,
    except those of IDENTITIES. defaults: option -> what null means there: a value, a Rate, or By the settings.
    unread: options of shared sections that the stage never reads -> what to set instead. reads: its rows. leaves:
    the kind of model that a finished run leaves. followed_by: the stage that a run proposes as the next one.
    """

    module: str
    help: str
    base: str | None = None
    preset: tuple[str, ...] = ()
    defaults: dict[str, float | Rate | By] = {}  # noqa: RUF012 - never changed
    unread: dict[str, str] = {}  # noqa: RUF012 - never changed
    reads: Reads | None = None
    leaves: str | None = "policy"
    followed_by: str | None = None


IDENTITIES = ("dpo.loss_type", "ppo.estimator", "ppo.policy_loss")  # options that define a variant


def _missing_eos_penalty(config: object) -> float:
    """1 with a learned score, which does not reward ending a response; 0 with functions alone."""
    is_learned = config.reward.has_model(config.roles, config.environment) or config.reward.judge.is_given
    return 1.0 if is_learned else 0.0


def _kl_coef(config: object) -> float:
    """Larger for a learned score, which can be over-optimised, than for a function that checks the answer."""
    return 0.1 if config.reward.is_learned(config.roles, config.environment) else 0.04


def _where_seen(kl: float) -> By:
    """`kl`, or 0 (off) with one update per rollout, which is never measured after it moved."""
    def value(config: object) -> float:
        ppo = config.ppo
        return 0.0 if ppo.num_ppo_epochs == ppo.num_minibatches == 1 and ppo.minibatch_size is None else kl

    return By("the updates on a rollout", value)


# Defaults: docs/guide/hyperparameters.md says which come from the literature and which were measured.
MAX_STEPS = "train.max_steps"  # default if train.num_train_epochs is not given either: also with few prompts
_OFFLINE = {"train.num_train_epochs": 1.0, "train.per_device_train_batch_size": 8}
_SFT = {"train.learning_rate": Rate(2e-5, 2e-4, small=2.5)} | _OFFLINE | {"train.num_train_epochs": 3.0}
_DPO = {"train.learning_rate": Rate(1e-6, 1e-5)} | _OFFLINE
_ONLINE = {"roles.actor.learning_rate": Rate(1e-6, 2e-5), MAX_STEPS: 100, "train.per_device_train_batch_size": 8}
_POLICY = _ONLINE | {"ppo.num_ppo_epochs": 1, "ppo.num_minibatches": 1,
                     "ppo.missing_eos_penalty": By("the rewards", _missing_eos_penalty)}
_GROUPS = _POLICY | {"ppo.kl_coef": 0.04}  # 8 prompts and 8 responses to each
_SINGLE = _POLICY | {"ppo.kl_coef": By("the rewards", _kl_coef), "train.per_device_train_batch_size": 64}
_PPO = _SINGLE | {"roles.actor.learning_rate": Rate(3e-6, 2e-5), "roles.critic.learning_rate": Rate(1e-5, 1e-4),
                  "ppo.num_ppo_epochs": 2, "ppo.num_minibatches": 2,
                  "ppo.update_kl": _where_seen(0.01), "ppo.early_stop_kl": _where_seen(0.02)}  # results/ppo_rates.md

# Options that are never read.
_ONLY_ACTOR = "only the actor generates: set roles.actor.tp"
_NO_SCORES = {"data.score_template": "it is for --stage conditional_sft"}
_TEXTS = {"data.max_prompt_length": "set data.max_length, of prompt and answer together"}
_ANSWERS = _TEXTS | _NO_SCORES | {"data.packing": "it is for --stage sft", "data.train_on": "only answers count here"}
_TRAINED_BEFORE = {"model.preset": "name the trained model by model.model_name_or_path, or run --stage sft first",
                   "model.vocab_size": "the tokenizer is that of the model"}
_NO_DROPOUT = {"model.lora.dropout": "dropout is off here, as two forwards of one policy are compared"}
_ROLES = {
    **{f"roles.{role}.tp": _ONLY_ACTOR for role in ("ref", "critic", "reward", "teacher")},
    **{f"roles.{role}.kind": "it is the critic's: set roles.critic.kind" for role in (
        "actor", "ref", "reward", "teacher")},
    "roles.teacher.learning_rate": "the teacher is not trained; set roles.actor.learning_rate",
    "roles.ref.learning_rate": "the reference is not trained; set roles.actor.learning_rate",
    "roles.reward.learning_rate": "the reward model is not trained here; set train.learning_rate of --stage reward"}
_SAMPLED = _TRAINED_BEFORE | _NO_DROPOUT | _NO_SCORES | _ROLES | {
    "data.packing": "it is for --stage sft", "train.learning_rate": "set roles.actor.learning_rate"}
PROMPTS_ONLY = {"data.max_length": "set data.max_prompt_length, and max_new_tokens of what is sampled",
                "data.train_on": "sampled answers are trained", "data.append_eos": "a sampled answer ends by itself"}
_ALONE = {"roles.critic": "this method has no critic"}
_NO_TEACHER = {"roles.teacher": "this method has no teacher; --stage distill has, and ppo and grpo with distill.coef"}
_NO_CRITIC = _SAMPLED | PROMPTS_ONLY | _ALONE | _NO_TEACHER
_NOT_TRAINED = "an evaluation trains nothing; leave it out"
_ONLY_REWARD = "of the roles only roles.reward.model_name_or_path is used; what is compared is evaluate.models"
_EVALUATE = PROMPTS_ONLY | _NO_SCORES | {
    "data.eval_sources": "name what is asked by data.sources",
    "data.packing": "it is for --stage sft", "report_to": "an evaluation has no trackers; leave it out",
    "model.model_name_or_path": "name the models by evaluate.models",
    "model.preset": "name the models by evaluate.models", "model.vocab_size": _NOT_TRAINED,
    "model.gradient_checkpointing": _NOT_TRAINED, "model.freeze": _NOT_TRAINED, "model.lora": _NOT_TRAINED,
    "roles.share_base": _ONLY_REWARD, "roles.actor": _ONLY_REWARD, "roles.ref": _ONLY_REWARD,
    "roles.critic": _ONLY_REWARD, "roles.teacher": _ONLY_REWARD, **{f"roles.reward.{name}": _ONLY_REWARD for name in (
        "learning_rate", "tp", "kind", "zero_stage", "dtype", "quantize", "offload", "micro_batch_tokens")}}

STAGES = {
    "sft": Stage("hybrid_rlhf.training.step1_sft", "supervised fine-tuning on demonstrations",
                 defaults=_SFT, unread=_TEXTS | _NO_SCORES, reads=Reads("sft", "demonstration", 0),
                 followed_by="reward"),
    "reward": Stage("hybrid_rlhf.training.step2_reward", "a reward model from preference pairs",
                    defaults={"train.learning_rate": Rate(1e-5, 1e-4)} | _OFFLINE, unread=_TRAINED_BEFORE | _ANSWERS,
                    reads=Reads("reward", "pair", 1), leaves="reward model", followed_by="ppo"),
    "ppo": Stage("hybrid_rlhf.training.step3_ppo", "PPO against the reward model", defaults=_PPO, unread=_SAMPLED,
                 reads=Reads("ppo", "prompt", 2)),
    "all": Stage("hybrid_rlhf.training.all_stages",
                 "the three in order; without further flags, the embedded demo", leaves=None,
                 unread=_NO_SCORES | _ROLES | _NO_TEACHER | {
                     "stages.ppo.learning_rate": "set roles.actor.learning_rate"}),
}


def _online(name: str, text: str, *preset: str, defaults: dict = _GROUPS, estimator: str | None = None,
            num_samples: int = 8) -> Stage:
    """A variant of PPO; num_samples: responses to each prompt (the size of a group)."""
    groups = (f"--ppo.sampling.num_samples={num_samples}",) if num_samples > 1 else ()
    return STAGES["ppo"]._replace(
        help=f"{text} (--stage ppo with {name} settings)", base="ppo", defaults=defaults, preset=(
            f"--stage={name}", f"--output_dir=outputs/{name}", f"--ppo.estimator={estimator or name}", *groups,
            *preset))


def _offline(name: str, text: str, defaults: dict = _DPO, kind: str = "pair") -> Stage:
    """A variant of DPO."""
    return STAGES["dpo"]._replace(help=text, base="dpo", defaults=defaults, reads=Reads(name, kind, 1), preset=(
        f"--stage={name}", f"--output_dir=outputs/{name}", f"--dpo.loss_type={name}"))


STAGES |= {
    "grpo": _online("grpo", "group-relative advantages, no critic"),
    "dr_grpo": _online("dr_grpo", "GRPO without the two biases, no critic"),
    "process_grpo": _online("process_grpo", "GRPO with rewards of steps (process supervision), no critic"),
    "batch_grpo": _online("batch_grpo", "GRPO with the spread of the whole batch, no critic"),
    "gdpo": _online("gdpo", "GRPO with each reward source normalised on its own, no critic"),
    "rloo": _online("rloo", "REINFORCE leave-one-out, no critic"),
    "reinforce_pp": _online("reinforce_pp", "REINFORCE++, no critic", defaults=_SINGLE, num_samples=1),
    "reinforce_pp_baseline": _online("reinforce_pp_baseline", "REINFORCE++ with the group's mean as baseline"),
    "gspo": _online("gspo", "GRPO with ratios of sequences", "--ppo.policy_loss=gspo", "--ppo.cliprange_low=3e-4",
                    "--ppo.cliprange_high=4e-4", defaults=_GROUPS | {"ppo.num_minibatches": 4}, estimator="grpo"),
    "cispo": _online("cispo", "GRPO with clipped importance weights", "--ppo.policy_loss=cispo",
                     "--ppo.cliprange_high=4.0", estimator="grpo"),
    "dpo": Stage("hybrid_rlhf.training.preferences", "direct preference optimisation on pairs, no reward model",
                 defaults=_DPO, unread=_TRAINED_BEFORE | _NO_DROPOUT | _ANSWERS, reads=Reads("dpo", "pair", 1)),
}
STAGES |= {
    "ipo": _offline("ipo", "dpo with the squared loss of IPO"),
    "hinge": _offline("hinge", "dpo with the hinge loss of SLiC"),
    "kto": _offline("kto", "KTO, on responses labelled good or bad", kind="labelled answer"),
    "orpo": _offline("orpo", "ORPO on pairs, without a reference",
                     _DPO | {"train.learning_rate": Rate(8e-6, 8e-5)}),
    "simpo": _offline("simpo", "SimPO on pairs, without a reference"),
    "conditional_sft": STAGES["sft"]._replace(
        help="sft on good and bad answers, the score in the prompt", unread=_TEXTS,
        reads=Reads("conditional_sft", "graded answer", 1), followed_by=None,
        preset=("--output_dir=outputs/conditional_sft", "--stage=conditional_sft")),
    "online_dpo": Stage("hybrid_rlhf.training.online_dpo",
                        "dpo on pairs of fresh samples, which the reward source ranks", unread=_NO_CRITIC,
                        reads=Reads("online_dpo", "prompt", 2),
                        defaults=_ONLINE | {"train.per_device_train_batch_size": 32}),  # two responses to each
    "rejection": Stage("hybrid_rlhf.training.rejection",
                       "rejection sampling: best of n, then sft on it, in rounds", unread=_NO_CRITIC,
                       reads=Reads("rejection", "prompt", 2),
                       defaults=_ONLINE | {"roles.actor.learning_rate": Rate(2e-5, 2e-4)}),
    "distill": Stage("hybrid_rlhf.training.distill",
                     "on-policy distillation: towards a teacher, on the student's own samples",
                     unread=_SAMPLED | _ALONE, reads=Reads("distill", "prompt", 2),
                     defaults=_ONLINE | {"roles.actor.learning_rate": Rate(1e-5, 1e-4),
                                         "train.per_device_train_batch_size": 32}),
    "evaluate": Stage("hybrid_rlhf.training.evaluate", "two or more models on held-out prompts, side by side",
                      unread=_EVALUATE, reads=STAGES["ppo"].reads, leaves=None),
}
PTX = Reads("ptx", "demonstration", 0)  # the texts that PPO mixes in
DEMONSTRATIONS = Reads("distill_data", "demonstration", 0)  # that distill learns from beside its samples
READS = {row.reads.stage: row.reads for row in STAGES.values() if row.reads} | {
    each.stage: each for each in (PTX, DEMONSTRATIONS)}


def by_table(stage: str, option: str) -> str | None:
    """The default of an option for a stage as text; None if it has none."""
    if stage == "all":  # its stages have options of their own
        _, method, name = option.split(".") if option.startswith("stages.") else ("", "ppo", option)
        stage, option = method, f"train.{name}" if option.startswith("stages.") else name
    value = STAGES[stage].defaults.get(option)
    if isinstance(value, Rate):
        return f"{value.lora:g} for adapters, {value.full:g} for all weights"
    if isinstance(value, By):
        return f"depends on {value.what}"
    return None if value is None else f"{value:g}"


def variant_options(name: str) -> dict[str, str]:
    """The options that define a variant, such as {"ppo.estimator": "grpo"}."""
    words = (word.removeprefix("--").partition("=") for word in STAGES[name].preset)
    return {option: value for option, _, value in words if option in IDENTITIES}
