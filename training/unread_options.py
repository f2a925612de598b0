"""Options of shared sections that a stage never reads, and what to set instead.

They are not options of that stage: its --help, files and records leave them out, and setting one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache

from hybrid_rlhf.algorithms.advantages import ESTIMATORS
from hybrid_rlhf.algorithms.policy import POLICY_LOSSES
from hybrid_rlhf.algorithms.preference import LOSSES
from hybrid_rlhf.core.config import Option, UserError, check, nearest, options_of
from hybrid_rlhf.core.options import value_of, with_value
from hybrid_rlhf.rewards.judge.judge_config import BASE, VERDICT, JudgeConfig
from hybrid_rlhf.training.registry import PROMPTS_ONLY, READS, STAGES, variant_options

_SECTIONS = {"online": "online_dpo", "stages": "all", "rejection": "rejection", "evaluate": "evaluate", "ppo": "ppo",
             "dpo": "dpo", "distill": "distill"}  # section that only one stage has -> that stage

_COLUMNS = 'columns belong to a source: --data.sources "{path: FILE, columns: {prompt: question}}"'


_CLIPS = {"both": {}, "above": {"ppo.cliprange_low": "has no lower bound; set ppo.cliprange_high"},
          "none": dict.fromkeys(("ppo.cliprange", "ppo.cliprange_low", "ppo.cliprange_high"), "does not clip")}


def of_method(estimator: str | None = None, policy_loss: str | None = None,
              loss_type: str | None = None) -> dict[str, str]:
    """The options of its stage that a method does not read -> why. None: any method may be chosen."""
    unread: dict[str, str] = {}
    if loss_type is not None:
        only_for = {"dpo.simpo_gamma": ("simpo",), "dpo.label_smoothing": ("sigmoid", "simpo"),
              "dpo.desirable_weight": ("kto",), "dpo.undesirable_weight": ("kto",)}
        unread = {option: f"it is for dpo.loss_type {' and '.join(losses)}" for option, losses in only_for.items()
                 if loss_type not in losses}
    if estimator is not None and not ESTIMATORS[estimator].needs_values:
        unread = dict.fromkeys(("roles.critic", "ppo.cliprange_value", "ppo.vf_coef", "ppo.lam",
                               "ppo.critic_warmup_steps"), f"ppo.estimator {estimator} has no critic; that of gae has")
        if not ESTIMATORS[estimator].discounts:
            unread["ppo.gamma"] = f"ppo.estimator {estimator} does not discount"
        if ESTIMATORS[estimator].by_source:
            unread |= dict.fromkeys(("ppo.min_score", "ppo.max_score"),
                                    f"ppo.estimator {estimator} normalises each source; clip it in the source")
    if policy_loss is not None:
        row = POLICY_LOSSES[policy_loss]
        unread |= {option: f"ppo.policy_loss {policy_loss} {text}" for option, text in _CLIPS[row.clips].items()}
        unread |= {f"ppo.{option}": f"it is for ppo.policy_loss {name}" for name, other in POLICY_LOSSES.items()
                   for option in other.options if option not in row.options}
    return unread


def of_stage(name: str) -> dict[str, str]:
    """Options and sections that a stage never reads, whatever its settings -> what to set instead."""
    named = {option.split(".")[1]: value for option, value in variant_options(name).items()}
    return {"data.columns": _COLUMNS} | STAGES[STAGES[name].base or name].unread | of_method(**named)


def of(config: object) -> dict[str, str]:
    """Options and sections that a recipe with these settings never reads -> what to set instead."""
    check(config.stage in STAGES, f"stage: {config.stage}: there is no such stage; choose {', '.join(STAGES)}"
                                  f"{nearest(config.stage, STAGES)}")
    stage = next((name for section, name in _SECTIONS.items() if hasattr(config, section)), config.stage)
    ppo, dpo = getattr(config, "ppo", None), getattr(config, "dpo", None)
    if stage == "all":
        return STAGES[stage].unread
    method = {"estimator": ppo.estimator, "policy_loss": ppo.policy_loss} if ppo else {}
    return STAGES[stage].unread | of_method(**method, loss_type=dpo.loss_type if dpo else None)


def refuse(config: object) -> None:
    """Raise UserError for an option that is set but not read, at this stage or with these settings, and for a data
    source that names an unknown stage. Sets config.unused to the names of the options that are not read."""
    named = [("data.sources", s) for s in config.data.sources] + [
        ("data.eval_sources", s) for s in config.data.eval_sources]
    for option, source in named:
        for stage in source.stages:
            check(stage in READS, f"{option}: {source.path} names stage {stage!r}{nearest(stage, READS)}; there "
                                  f"are {', '.join(READS)}")
    unused = of(config)
    object.__setattr__(config, "unused", tuple(unused))  # derived from the settings, not one of them
    for option, text in unused.items():
        for name in _given(config, option):
            raise UserError(f"{name} is not used by --stage {config.stage}; {text}")
    for section, options in SWITCHED.items():
        for names, is_on, text in options if hasattr(config, section) else ():
            for option in (each for name in names for each in _given(config, name)):
                check(is_on(config), f"{option} is set; {text}")


def without(stage: str, sections: dict[str, object]) -> dict[str, object]:
    """The shared sections, with the options that `stage` never reads reset to their defaults."""
    unread = STAGES[stage].unread | (PROMPTS_ONLY if stage == "ppo" and not sections["ppo"].ptx_coef else {})
    for option in unread:
        name, _, inner = option.partition(".")
        if name in sections and inner:
            sections[name] = with_value(sections[name], inner, value_of(type(sections[name])(), inner))
    return sections


def _given(config: object, option: str) -> list[str]:
    """The options at or below `option` that are not at their defaults."""
    return [each.name for each in _at_or_below(type(config), option) if value_of(config, each.name) != each.default]


@cache
def _at_or_below(config_class: type, option: str) -> list[Option]:
    return [each for each in options_of(config_class) if f"{each.name}.".startswith(f"{option}.")]


def _of_judge(*names: str) -> tuple[str, ...]:
    """These options of the judge, or all but model and url."""
    return tuple(f"reward.judge.{name}" for name in names or (
        f.name for f in fields(JudgeConfig) if f.name not in ("model", "url")))


def _has_teacher(config: object) -> bool:
    return getattr(config.distill, "coef", 1) > 0  # --stage distill always has one


# section -> (options, condition under which they are read, what to do otherwise)
SWITCHED: dict[str, list[tuple[tuple[str, ...], Callable[[object], bool], str]]] = {
    "model": [
        (("model.vocab_size",), lambda c: c.model.preset is not None and c.model.tokenizer_name_or_path is None,
         "it is the size of the tokenizer that model.preset trains; leave it out"),
        (("model.lora.alpha", "model.lora.dropout", "model.lora.target_modules"), lambda c: bool(c.model.lora.r),
         "model.lora.r is 0, so there are no adapters; give model.lora.r 16")],
    "train": [
        (("train.adam_beta1", "train.adam_beta2", "train.adam_epsilon"), lambda c: c.train.optim != "sgd",
         "train.optim sgd has no moments; leave it out"),
        (("train.warmup_ratio",), lambda c: c.train.lr_scheduler_type != "constant" or c.train.warmup_ratio == 0,
         "train.lr_scheduler_type constant has no warm-up; choose constant_with_warmup")],
    "reward": [
        (("reward.retries", "reward.batch_size"), lambda c: getattr(c.reward, "url", None) is not None,
         "they are of a service; give reward.url"),
        (("reward.timeout",), lambda c: getattr(c.reward, "functions", None) or getattr(c.reward, "url", None),
         "it is for functions and services; give reward.functions or reward.url"),
        (_of_judge(), lambda c: c.reward.judge.is_given,
         "there is no judge; give reward.judge.model or reward.judge.url"),
        (_of_judge("api_model", "api_key_env", "api_options", "concurrency", "timeout", "http_retries", "max_cost",
                   "cost_per_1m_input", "cost_per_1m_output"), lambda c: c.reward.judge.url is not None,
         "it is for an address; give reward.judge.url in place of reward.judge.model"),
        (_of_judge("dtype", "load_in_4bit", "batch_size"), lambda c: c.reward.judge.model is not None,
         "it is for a model that is loaded here; give reward.judge.model in place of reward.judge.url"),
        (_of_judge("dtype", "load_in_4bit"), lambda c: c.reward.judge.model != BASE,
         f"reward.judge.model {BASE} is computed on the policy's weights, whose dtype it has; leave it out"),
        (_of_judge("retries", "max_new_tokens"), lambda c: c.reward.judge.score == VERDICT,
         "reward.judge.score is probability, and nothing is written; leave it out"),
        (("reward.isolate",), lambda c: getattr(c.reward, "functions", None),
         "it is for functions; give reward.functions")],
    "environment": [
        (tuple(f"environment.{name}" for name in (
            "max_turns", "max_new_tokens_per_turn", "timeout", "num_workers", "isolate", "max_answer_chars",
            "malformed_penalty")),
         lambda c: c.environment.is_given, "there is no environment; give environment.factory or environment.tools")],
    "evaluate": [
        (("evaluate.num_labels",), lambda c: c.evaluate.labels is not None, "it is for evaluate.labels; give them"),
        (("data.sources", *(f"evaluate.{name}" for name in (
            "reference", "num_prompts", "sampling", "checker", "prompt_templates", "num_examples"))),
         lambda c: c.evaluate.models or c.evaluate.labels is None,
         "there are only labels, and no models that answer; give evaluate.models, or leave it out")],
    "rejection": [(("roles.ref",), lambda c: c.rejection.measure_kl, "rejection.measure_kl is false; leave it out")],
    "distill": [
        (("roles.teacher", "distill.divergence", "distill.beta", "distill.temperature", "distill.top_k",
          "distill.teacher_prompt"), _has_teacher,
         "distill.coef is 0, so there is no teacher; give one, such as 0.1"),
        (tuple(f"roles.teacher.{name}" for name in ("kind", "dtype", "quantize", "zero_stage", "offload")),
         lambda c: getattr(c.distill, "teacher_ema", None) is None,
         "distill.teacher_ema makes the student's own weights the teacher; leave it out"),
        (("distill.beta",), lambda c: c.distill.divergence == "jsd", "it is for distill.divergence jsd"),
        (("distill.temperature", "distill.top_k"), lambda c: c.distill.divergence != "policy_gradient",
         "distill.divergence policy_gradient reads the sampled tokens alone; leave it out"),
        (("roles.ref",), lambda c: hasattr(c, "ppo") or c.roles.ref.model_name_or_path is not None,
         "there is no reference; name the one that kl is to be measured against (roles.ref.model_name_or_path)"),
        (("roles.reward",), lambda c: hasattr(c, "ppo") or c.roles.reward.model_name_or_path is not None,
         "no reward model scores the samples; name it by roles.reward.model_name_or_path"),
        (tuple(PROMPTS_ONLY), lambda c: hasattr(c, "ppo") or c.distill.lmbda < 1,
         "it is for demonstrations, and distill.lmbda is 1: all steps are on samples; leave it out "
         "(data.max_prompt_length bounds prompts)")],
    "online": [(("roles.ref",), lambda c: LOSSES[c.dpo.loss_type].needs_reference,
                "this dpo.loss_type has no reference; leave it out")],
    "ppo": [
        (("ppo.kl_horizon",), lambda c: c.ppo.kl_target is not None,
         "ppo.kl_coef is fixed; give ppo.kl_target"),
        (("ppo.kl_in", "ppo.kl_estimator"), lambda c: c.ppo.kl_coef != 0, "ppo.kl_coef is 0; give one, such as 0.05"),
        (("ppo.kl_bias_correction",), lambda c: c.ppo.kl_coef != 0 and not c.ppo.kl_in_reward,
         "there is no KL penalty in the loss; give ppo.kl_in loss, and a ppo.kl_coef such as 0.05"),
        (("ppo.importance_cap",), lambda c: c.ppo.importance != "none", "ppo.importance is none; choose token"),
        (("ppo.importance_low",), lambda c: c.ppo.importance == "masked",
         "it is the masked one's; choose ppo.importance masked"),
        (("ppo.replay_truncation",), lambda c: c.ppo.sampling.is_truncated,
         "sampling cuts nothing off; give ppo.sampling.top_p, top_k or min_p"),
        (("ppo.max_logprob_drift",), lambda c: c.ppo.old_logprobs == "auto", "ppo.old_logprobs is not auto"),
        (("ppo.overlong_buffer",), lambda c: c.ppo.overlong_penalty > 0,
         "ppo.overlong_penalty is 0; give one, such as 1"),
        (("roles.reward",), lambda c: not hasattr(c, "roles") or c.reward.has_model(
            c.roles, getattr(c, "environment", None)),
         "no reward model is among the sources; name it by roles.reward.model_name_or_path"),
        (("roles.ref",), lambda c: c.ppo.kl_coef != 0 or c.roles.ref.model_name_or_path is not None,
         "ppo.kl_coef is 0, so no reference is loaded; leave it out, or name the reference that kl is to be measured "
         "against (roles.ref.model_name_or_path)"),
        (tuple(PROMPTS_ONLY), lambda c: c.ppo.ptx_coef > 0 or hasattr(c, "stages"),  # sft reads them there
         "it is for the texts of ppo.ptx_coef, which is 0; leave it out (data.max_prompt_length bounds prompts)")],
}
