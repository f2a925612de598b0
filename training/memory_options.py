"""The options --plan and --memory: a recipe's roles as the planner takes them, and the time of its steps."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import PurePath
from typing import TextIO

import torch

from hybrid_rlhf.algorithms.preference import LOSSES
from hybrid_rlhf.core.accelerator import WSL_SHARE
from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.core.memory import is_wsl
from hybrid_rlhf.core.options import with_value
from hybrid_rlhf.data import datasets
from hybrid_rlhf.engine.decode.kv_cache import free_bytes
from hybrid_rlhf.engine.decode.pages import NUM_WHOLE
from hybrid_rlhf.memory_plan import machine_rates, rates, table
from hybrid_rlhf.memory_plan.amounts import Cards, size_text
from hybrid_rlhf.memory_plan.plan import DOES_NOT_FIT, Generation, Plan, Role, make_plan
from hybrid_rlhf.memory_plan.presets import card as preset_of
from hybrid_rlhf.memory_plan.presets import closest
from hybrid_rlhf.memory_plan.rates import CARDS, Calibration, Rates, read_calibration, read_rates
from hybrid_rlhf.memory_plan.search import SearchResult, choose
from hybrid_rlhf.memory_plan.step_time import StepTime, step_time
from hybrid_rlhf.memory_plan.table import show_times
from hybrid_rlhf.models import load, shapes
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig
from hybrid_rlhf.rewards.judge.judge_config import BASE, PAIRWISE, RANKING, VERDICT
from hybrid_rlhf.rewards.judge.judge_prompts import open_prompts
from hybrid_rlhf.rewards.judge.local_backend import MAX_TOKENS
from hybrid_rlhf.rewards.model import BATCH_SIZE
from hybrid_rlhf.roles.sharing import TRAINED, Start, resolve
from hybrid_rlhf.training import (
    all_stages,
    builders,
    defaults,
    distill,
    on_policy,
    online_dpo,
    preferences,
    rejection,
    step1_sft,
    step2_reward,
    step3_ppo,
    supervised,
)
from hybrid_rlhf.training.build_roles import find_starts, judge_base, layout_of, load_config_for
from hybrid_rlhf.training.registry import DEMONSTRATIONS, STAGES
from hybrid_rlhf.training.stage_config import OnPolicyConfig

NUM_MEASURED = 256  # rows whose lengths stand for all
NUM_SKIPPED = 8  # as OldLogprobs has it
PUBLISHED = "from published figures and assumed shares of them"


def carry_out(config: object, *, memory: int | None, only_plan: bool, cards: Cards | None = None,
              stream: TextIO | None = None) -> tuple[object, int]:
    """Carry out --plan and --memory: print the plan and, for --memory, choose settings that fit.

    cards: what to plan for in place of this machine. Returns the settings to go on with, and the exit code (0: go on,
    or done with --plan).
    """
    place = Place.of(cards) if cards else Place.here(memory)
    if (cards or memory) and config.model.lora.r is None and not defaults.of_run(config):
        config = with_value(config, "model.lora.r", 0)  # the default depends on this machine's free memory
    config, plans, chosen = look_ahead(config, place)
    lengths = mean_lengths(config) if only_plan and not isinstance(config, all_stages.Config) else None
    stream = stream or (sys.stdout if only_plan else sys.stderr)
    if memory is None:
        for i, plan in enumerate(plans):
            table.show(plan, chosen.flags if chosen.fits else (), stream)
            others = [("as advised", chosen.config, chosen.plans[i])] if chosen.fits and chosen.flags else []
            print_times(
                [(name, with_lengths(settings, each, lengths)) for name, settings, each in (
                    ("as given", config, plan), *others, *_by_preset(config, place))], place.device, place.card, stream)
        return config, 0 if all(p.short <= 0 for p in plans) else DOES_NOT_FIT
    for plan in chosen.plans:
        table.show(plan, (), stream)
    if not chosen.fits:
        return config, DOES_NOT_FIT
    asked = f"for {size_text(memory)}"
    print(f"chosen {asked}: {' '.join(chosen.flags)}" if chosen.flags else f"nothing to change {asked}", file=stream)
    table.show_changes(chosen.changes, stream)
    return chosen.config, 0


def look_ahead(config: object, place: Place) -> tuple[object, list[Plan], SearchResult]:
    """The resolved settings, a plan of each stage that they run, and settings that fit: the same ones if they do, else
    others (or the smallest that were tried)."""
    config = config if isinstance(config, all_stages.Config) else defaults.resolve(config)
    plans = plans_of(config, place)
    chosen = SearchResult(config, plans)
    if not chosen.fits:
        chosen = choose(config, partial(plans_of, place=place), has_host=place.device.type != "cpu")
    return config, plans, chosen


def _by_preset(config: object, place: Place) -> list[tuple[str, object, Plan]]:
    """Settings and plan with the preset for this place's memory, where it differs. Only for runs with adapters, as
    presets have them: a full model more would be traced otherwise, for a row that few need."""
    if isinstance(config, all_stages.Config) or not config.model.lora.r:
        return []
    memory = place.card.memory if place.card else place.available
    name = closest(None if place.device.type == "cpu" else (memory or 0) / 2**30)
    changed = reduce(lambda c, option: with_value(c, *option), preset_of(name).settings.items(), config)
    return [(f"--preset {name}", changed, plans_of(changed, place)[0])] if changed != config else []


def mean_lengths(config: object, start: ModelConfig | None = None) -> tuple[int, int] | None:
    """Mean tokens of a row of the data (of a prompt, of one side of a pair), and the number of rows to train on; None,
    with a line that says why, where that is not known before the run. start: the model whose tokenizer the stage has,
    where an earlier stage of the same command has not written it yet."""
    stage = importlib.import_module(STAGES[config.stage].module)
    is_online = hasattr(config, "method")
    reads = config.method.reads if is_online else supervised.reads_of(config)
    try:
        builders.require_data(config.data, config.stage)
        model = start or (on_policy.actor_model(config, on_policy.find_sources(config)) if is_online
                          else stage.start_model(config)[1])
        tokenizer = builders.open_tokenizer(model, config.data, reads, config.seed)
        rows = datasets.build(config.data, reads, tokenizer, config.seed).train
    except UserError as error:
        print(f"the data's lengths are not known ({error}): the time is of the longest", file=sys.stderr)
        return None
    count = min(len(rows), NUM_MEASURED)
    sides = [side for row in (rows[i * len(rows) // count] for i in range(count))
             for side in (row.get(name) for name in ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids")) if side]
    return -(-sum(map(len, sides)) // len(sides)), len(rows)


def timed_by_data(config: object, plans: Sequence[Plan]) -> list[Plan]:
    """The plans of `plans_of`, each timed for rows of the mean length of its stage's data, where that is known."""
    is_whole = isinstance(config, all_stages.Config)
    stages = all_stages.stage_configs(config).values() if is_whole else [config]
    start = config.model if is_whole else None
    settings = [defaults.resolve(stage, start) for stage in stages]
    return [with_lengths(stage, plan, mean_lengths(stage, start), start)
            for stage, plan in zip(settings, plans, strict=True)]


def with_lengths(config: object, plan: Plan, lengths: tuple[int, int] | None, start: ModelConfig | None = None) -> Plan:
    """`plan`, timed for rows of the length that `mean_lengths` returns."""
    if lengths is None:
        return plan
    mean, count = lengths
    option = "max_prompt_length" if hasattr(config, "method") else "max_length"
    shorter = replace(config, data=replace(config.data, **{option: mean}))
    size = config.train.rows_per_step  # offline stages keep the last, smaller batch
    batches = max(1, count // size if hasattr(config, "method") else -(-count // size))
    steps = plan.steps or builders.total_steps(config.train, batches)
    return replace(plan, timed=tuple(_ROLES[type(config)](shorter, start)), steps=steps)


@dataclass(frozen=True)
class Place:
    """Where a run is planned: device and number of its processes, and the bytes that each may use (None: unknown).
    calibration: the card's (None: the published one)."""

    device: torch.device
    world: int
    available: int | None
    calibration: Calibration | None = None
    card: Cards | None = None  # None: this machine

    @classmethod
    def of(cls, cards: Cards) -> Place:
        return cls(torch.device("cuda"), cards.world, cards.usable, card=cards)

    @classmethod
    def here(cls, memory: int | None) -> Place:
        """This machine; `memory` bytes of it, or what is free."""
        free = free_bytes(device()) if memory is None else memory
        if memory is None and free is not None and device().type == "cuda" and is_wsl():
            free = int(WSL_SHARE * free)
        return cls(device(), int(os.environ.get("WORLD_SIZE", "1")), free, read_calibration())


def plans_of(config: object, place: Place, *, is_exact: bool = True) -> list[Plan]:
    """One plan for each stage that `config` runs."""
    check(config.stage != "evaluate", "--plan and --memory are for stages that train; leave them out of evaluate")
    if isinstance(config, all_stages.Config):
        stages = all_stages.stage_configs(config)
        return [_plan(defaults.resolve(stage, config.model), place, config.model, is_exact)
                for stage in stages.values()]
    return [_plan(defaults.resolve(config), place, None, is_exact)]


def _plan(config: object, place: Place, start: ModelConfig | None, is_exact: bool) -> Plan:
    """start: the model that an earlier stage of the same command will leave, before it exists."""
    where, world = place.device, place.world
    roles = _ROLES[type(config)](config, start)
    for role in roles:
        check(not (role.trains and role.model.quantize and not role.model.lora.r),
              f"the {role.name}: a quantised base cannot be fully fine-tuned; set model.lora.r (such as 16), or leave "
              f"model.load_in_{role.model.quantize} out")
    zero = roles[0].zero_stage
    dtype = str(load.resolve_dtype(roles[0].model.dtype, where)).removeprefix("torch.")
    title = (f"{config.stage}: {world} process{'es' if world > 1 else ''} on {where.type}, {dtype}, "
             f"ZeRO {'by dtype' if zero is None else zero}, micro-batches of {config.engine.micro_batch_tokens} tokens"
             + (f", offloaded: {', '.join(config.engine.offload)}" if config.engine.offload else ""))
    plan = make_plan(title, roles, where, place.available, world, is_exact=is_exact, calibration=place.calibration)
    return replace(plan, steps=config.train.max_steps if config.train.max_steps > 0 else None)


# -- roles of the recipes ---------------------------------------------------------------------------------------------


def _laid_out(config: object) -> dict:
    """ZeRO stage, offload and optimizer of a stage with one engine, as fields of its roles."""
    return {"zero_stage": config.engine.zero_stage, "offload": tuple(config.engine.offload),
            "optim": config.train.optim}


def _sft(config: step1_sft.Config, start: ModelConfig | None) -> list[Role]:
    length, batch = config.data.max_length, config.train.rows_per_step
    model = start or step1_sft.start_model(config)[1]
    return [Role("policy", model, length, _rows(config, length, batch), predicted=length - 1, trains=True,
                 scores=False, dropout=True, trained=batch, **_laid_out(config))]


def _reward(config: step2_reward.Config, start: ModelConfig | None) -> list[Role]:
    model = start or step2_reward.start_model(config)[1]
    length = config.data.max_length
    rows = 2 * _rows(config, 2 * length, config.train.rows_per_step)  # a pair costs two rows
    return [Role("reward", model, length, rows, trains=True, scores=False, trained=2 * config.train.rows_per_step,
                 **_laid_out(config))]


def _preferences(config: preferences.Config, start: ModelConfig | None) -> list[Role]:
    """The policy, and a reference on the same base (with adapters) or on a copy. A pair costs two rows."""
    model = start or preferences.start_model(config)[1]
    row, length = LOSSES[config.dpo.loss_type], config.data.max_length
    per_group = 2 if row.needs_pairs else 1
    rows = per_group * _rows(config, per_group * length, config.train.rows_per_step)
    read = per_group * config.train.rows_per_step
    policy = Role("policy", model, length, rows, predicted=length - 1, trains=True, scores=not row.needs_pairs,
                  scored=0 if row.needs_pairs else read, trained=read,
                  is_shared=row.needs_reference and bool(model.lora.r), **_laid_out(config))
    if not row.needs_reference:
        return [policy]
    base = "policy" if model.lora.r else None
    return [policy, Role("reference", preferences.reference_model(model), length, rows, predicted=length - 1,
                         base=base, is_shared=base is not None, scored=read, **_laid_out(config))]


def _on_policy(config: OnPolicyConfig, start: ModelConfig | None) -> list[Role]:
    """Actor, reference, critic, reward model and teacher (those that the method has), at their longest sequences, on
    the bases that they share."""
    starts = on_policy_starts(config, start)
    layout, _ = resolve(config.roles, starts, bool(config.model.lora.r))
    method = config.method
    sampling, together = method.sampling, method.num_together
    sampled = config.data.max_prompt_length + sampling.max_new_tokens
    sequences, tp = config.train.rows_per_step * sampling.num_samples, config.roles.actor.tp or 1
    generation = Generation(min(NUM_WHOLE, tp * sequences), config.data.max_prompt_length, sampling.max_new_tokens, tp,
                            tp * sequences, keeps=method.keep_candidates and sampling.is_truncated)

    def role(name: str, **more: object) -> Role:
        trains, group = name in TRAINED, layout.group(name)
        has_adapter = (name == "actor" or (name == "critic" and layout.kind != "head")
                       or starts[name].adapter is not None)
        model = load_config_for(config, starts[name])
        if start is not None and start.preset:
            model = replace(model, preset=start.preset, model_name_or_path=None)
        model = replace(model, lora=model.lora if has_adapter else LoraConfig(),
                        freeze=model.freeze if trains else [],
                        gradient_checkpointing=model.gradient_checkpointing and trains)
        at_once = layout_of(config, name).micro_batch_tokens // sampled
        rows = max(together, min(method.num_sequences, at_once)) if trains else max(1, min(sequences, at_once))
        return Role(name, model, sampled, rows, trains=trains, base=group[0] if name != group[0] else None,
                    is_shared=len(group) > 1, waits=config.roles[name].offload, optim=config.train.optim,
                    scored=_scored(config, name, sequences), group=sampling.num_samples,
                    trained=trains * method.num_updates * method.num_sequences, updates=method.num_updates,
                    **_where(config, group, name), **more)

    teachers = [role(name, predicted=sampling.max_new_tokens, keeps_head=method.takes_head,
                     only_states=method.takes_head and not isinstance(config, distill.Config),
                     top_k=config.distill.top_k,
                     texts=_texts(config, name) if DEMONSTRATIONS in method.also_reads else None)
                for name in ("teacher",) if name in starts]
    policies = [role("actor", predicted=sampling.max_new_tokens, entropy=method.has_entropy, generation=generation,
                     has_average=method.keeps_average, texts=_texts(config),
                     teacher=teachers[0] if teachers and method.takes_head else None)]
    policies += [role("ref", predicted=sampling.max_new_tokens)] if "ref" in starts else []
    return [*policies, *teachers, *(role(r) for r in ("critic", "reward") if r in starts),
            *_classifiers(config), *_judge(config, policies[0])]


def _texts(config: OnPolicyConfig, name: str = "actor") -> tuple[int, int] | None:
    """(rows, length) of a role's largest micro-batch of Method.also_reads."""
    method, most = config.method, config.data.max_length
    tokens = layout_of(config, name).micro_batch_tokens
    return (max(1, min(method.num_sequences, tokens // most)), most) if method.also_reads else None


def _scored(config: OnPolicyConfig, name: str, sequences: int) -> int:
    """Rows that a role scores in a step; the actor only every eighth where the sampler's log-probabilities serve as the
    old ones (rollout/old_logprobs.py)."""
    ppo = getattr(config, "ppo", None)
    is_sample = name == "actor" and ppo is not None and ppo.old_logprobs_from != "recompute"
    return -(-sequences // NUM_SKIPPED) if is_sample else sequences


def _where(config: OnPolicyConfig, group: tuple[str, ...], name: str) -> dict:
    """A role's ZeRO stage and offload; a frozen role has those of the role trained on its base, else 0, or 3 if set."""
    owner = next((r for r in group if r in TRAINED), name)
    zero = layout_of(config, owner)
    if owner in TRAINED:
        return {"zero_stage": zero.zero_stage, "offload": tuple(zero.offload)}
    is_cut = zero.zero_stage == 3
    return {"zero_stage": 3 * is_cut, "offload": tuple(o for o in zero.offload if is_cut and o == "parameters")}


def _classifiers(config: OnPolicyConfig) -> list[Role]:
    """The models among the reward sources, beside the stage-2 model; they read texts as long as rollouts."""
    sampling = config.method.sampling
    length = config.data.max_prompt_length + sampling.max_new_tokens
    rows = min(BATCH_SIZE, config.train.rows_per_step * sampling.num_samples)
    models = [ModelConfig(builders.model_folder(path)) for path in config.reward.model_list]
    return [Role(f"reward {PurePath(path).name}", model, length, rows, labels=shapes.read_config(model).num_labels)
            for path, model in zip(config.reward.model_list, models, strict=True)]


def _judge(config: OnPolicyConfig, actor: Role) -> list[Role]:
    """A judge that is loaded here, or computed on the actor's base. The length of a question in its tokens is
    estimated: the texts count as long as in the policy's tokens, the rubric and the template a token for every three
    characters."""
    judge, sampling = config.reward.judge, config.method.sampling
    if not judge.model:
        return []
    shared = judge_base(config, actor.model.model_name_or_path or actor.model.preset) is not None
    model = replace(actor.model, lora=LoraConfig() if judge.model == BASE else actor.model.lora) if shared else (
        ModelConfig(builders.model_folder(judge.model), dtype=judge.dtype, load_in_4bit=judge.load_in_4bit))
    shown = {PAIRWISE: 2, RANKING: sampling.num_samples}.get(judge.mode, 1)
    prompt = (config.data.max_prompt_length + shown * sampling.max_new_tokens
              + sum(len(part["content"]) for part in open_prompts(judge).chat("", [""] * shown)) // 3)
    asked, writes = judge.num_questions(config.train.rows_per_step, sampling.num_samples), judge.score == VERDICT
    limit = load.configured_positions(model) or prompt + judge.max_new_tokens
    length = min(limit, prompt + judge.max_new_tokens * writes)
    generation = Generation(min(judge.batch_size, asked), max(1, length - judge.max_new_tokens), judge.max_new_tokens,
                            sequences=asked, phase="score") if writes else None
    rows = max(1, min(asked, MAX_TOKENS // length))
    return [Role("judge", model, length, rows, predicted=1, scores=not writes, scored=0 if writes else asked,
                 generation=generation, base=actor.base or actor.name if shared else None, is_shared=shared)]


_ROLES: dict[type, Callable[[object, ModelConfig | None], list[Role]]] = {
    step1_sft.Config: _sft, step2_reward.Config: _reward, preferences.Config: _preferences,
    **dict.fromkeys((step3_ppo.Config, online_dpo.Config, rejection.Config, distill.Config), _on_policy)}


def on_policy_starts(config: OnPolicyConfig, start: ModelConfig | None) -> dict[str, Start]:
    """Where each role starts; before its parent runs exist, from the one model that they will start from."""
    if start is not None:
        path = start.model_name_or_path or start.preset
        adapter = "to be trained" if config.model.lora.r else None
        first = Start(path, dtype=start.dtype, quantize=start.quantize or "none")
        later = replace(first, adapter=adapter, head=path)
        return {"actor": first, "reward": later} | ({"ref": first} if config.method.needs_ref else {}) | (
            {"critic": later} if config.method.needs_critic else {})
    return find_starts(on_policy.find_sources(config), config.model, config.roles)


def _rows(config: object, length: int, at_most: int) -> int:
    """Rows of `length` in the largest micro-batch, as token_budget_groups makes them: at least one."""
    return max(1, min(at_most, config.engine.micro_batch_tokens // length))


# -- time --------------------------------------------------------------------------------------------------------------


def print_times(plans: Sequence[tuple[str, Plan]], device: torch.device, cards: Cards | None, stream: TextIO) -> None:
    """Print the time of a step of each plan on each device, by settings; or one line with the reason why not."""
    rows, source = predicted(plans, device, cards)
    if not rows:
        print(f"time is not predicted: {source}", file=stream)
        return
    show_times(rows, source, stream)
    if missing := left_out(plans[0][1]):
        print(f"not counted: {', '.join(missing)}", file=stream)


def predicted(plans: Sequence[tuple[str, Plan]], device: torch.device, cards: Cards | None
              ) -> tuple[list[tuple[str, StepTime]], str]:
    """(settings, time of a step) for each device and plan, and the source of the rates; [] and why there are none."""
    device_rates, source = rates_for(device, cards, load.resolve_dtype(plans[0][1].roles[0].model.dtype, device))
    return [(settings, times_of(plan, device, each)) for each in device_rates for settings, plan in plans], source


def times_of(plan: Plan, device: torch.device, device_rates: Rates) -> StepTime:
    samples = any(role.generation for role in plan.roles)
    by = ("as long as the data's on the average" + ", responses as the settings allow" * samples if plan.timed
          else "as long as the settings allow")
    return replace(step_time(plan.timed or plan.roles, device, device_rates), steps=plan.steps, lengths=by)


def rates_for(device: torch.device, cards: Cards | None, dtype: torch.dtype) -> tuple[list[Rates], str]:
    """The rates to predict by, and their source; [] and why there are none."""
    if cards is not None:
        named = [CARDS[cards.name]] if cards.name else rates.cards_with(cards.memory)
        return [rates.rates_of_card(c) for c in named], PUBLISHED if named else (
            f"no card of {size_text(cards.memory)} is in the table; name one of {', '.join(CARDS)}, as in --cards 4090")
    if device.type == "cpu":
        if not machine_rates.can_measure():
            return [], "our kernels are not compiled yet; hybrid-rlhf doctor does it, or the first run"
        return [machine_rates.machine_rates(dtype)], "from rates measured just now"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if measured := read_rates(name):
        return [measured], "from rates that hybrid-rlhf qualify measured on this card"
    known = rates.figures_of(name)
    return [rates.rates_of_card(known)] if known else [], PUBLISHED if known else (
        f"{name} is not in the table; hybrid-rlhf qualify measures it, or --cards names one of {', '.join(CARDS)}")


def left_out(plan: Plan) -> list[str]:
    """Work of this run that the prediction does not count."""
    roles = plan.roles
    return [*(["models among the reward sources"] if any(r.labels for r in roles) else []),
            *(["moving what is offloaded"] if any(r.offload or r.waits for r in roles) else []),
            *(["what processes send each other"] if plan.title.split(": ")[1].split()[0] != "1" else []),
            *(["texts mixed into the actor's steps"] if any(r.texts for r in roles) else [])]
