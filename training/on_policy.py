"""Shared code of the on-policy recipes: parent runs, data, roles, reward sources, and the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.distributed import main_first, print_main
from hybrid_rlhf.core.errors import present
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.data import collate, datasets
from hybrid_rlhf.data.loader import Loader
from hybrid_rlhf.data.preview import Preview, Shown, look, pieces
from hybrid_rlhf.data.sources import Reads
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.idle_cache import give_back_idle
from hybrid_rlhf.environments.contract import Environments
from hybrid_rlhf.export.folder import export, try_export
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.tokenizer import Tokenizer, load_tokenizer
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.rewards.mixture import Scale
from hybrid_rlhf.rewards.model import ModelSource
from hybrid_rlhf.roles import Roles
from hybrid_rlhf.roles.sharing import TRAINED, Layout, Start
from hybrid_rlhf.roles.spans import OwnTokens
from hybrid_rlhf.roles.teacher import SELF, WHOLE_HEAD, TeacherPrompt, check_top_k
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.loop import Leaving, Trainer, fit, on_record
from hybrid_rlhf.trainers.distillation import POLICY_GRADIENT
from hybrid_rlhf.training import (
    announce,
    builders,
    defaults,
    episodes_setup,
    fixed_prompts,
    reward_sources,
)
from hybrid_rlhf.training.build_roles import Sources, build, check_roles, judge_base, layout_of
from hybrid_rlhf.training.registry import DEMONSTRATIONS, STAGES
from hybrid_rlhf.training.stage_config import OnPolicyConfig
from hybrid_rlhf.training.step2_reward import own_samples

MAX_CRITIC_WARMUP = 5  # steps


class Method(NamedTuple):
    """What a method requires of its run.

    sampling: its settings; section: the name of the method's settings, for messages. num_updates: optimizer steps of
    one trainer step; num_sequences: of one optimizer step on a process. num_together: rows that stay in one
    micro-batch. score_clip: bound of normalised scores. critic_warmup_steps: None: by what the critic starts from.
    has_entropy: whether the actor's update computes it. reads: its prompts. also_reads: further rows that it trains on.
    keeps_average: whether the actor's weights are averaged. needs_reward: whether a score is required. is_own_teacher:
    whether that average of its adapter is the teacher. takes_head: whether the actor's update applies the teacher's
    full head to its hidden states. keep_candidates: whether log-probabilities are over the candidate tokens of
    truncated sampling.
    """

    sampling: SamplingConfig
    section: str
    num_updates: int
    num_sequences: int
    num_together: int = 1
    needs_ref: bool = True
    needs_critic: bool = False
    normalise_scores: bool = True
    score_clip: float | None = None
    critic_warmup_steps: int | None = 0
    has_entropy: bool = False
    reads: Reads = STAGES["ppo"].reads
    also_reads: tuple[Reads, ...] = ()
    keeps_average: bool = False
    needs_reward: bool = True
    needs_teacher: bool = False
    is_own_teacher: bool = False
    takes_head: bool = False
    keep_candidates: bool = False


@dataclass
class RunContext:
    """A run with everything loaded. config: resolved. scale: by which the trainer normalises the source's scores, if at
    all. more: data of Method.also_reads by name. critic_warmup_steps: steps that train the critic alone. reward_line:
    a line about the stage-2 model's accuracy."""

    config: OnPolicyConfig
    tokenizer: object
    data: datasets.StageData
    loader: Loader
    held_out: Loader | None
    num_steps: int
    roles: Roles
    source: RewardSource
    scale: Scale | None
    sources: Sources
    more: dict[str, datasets.StageData]
    critic_warmup_steps: int
    reward_line: str | None


def find_actor(config: OnPolicyConfig) -> str:
    """The run or model that the policy starts from; UserError where there is none."""
    check(config.model.preset is None, f"model.preset: {config.stage} starts from a trained model; give "
                                       "model.model_name_or_path or run --stage sft and --stage reward first")
    return builders.parent_run(config.roles.actor.model_name_or_path or config.model.model_name_or_path,
                               config.output_dir, "sft", "model.model_name_or_path")


def find_sources(config: OnPolicyConfig) -> Sources:
    """Every role's parent run; UserError where one is missing or two do not fit together. Reads no weights."""
    method, roles = config.method, config.roles
    actor = find_actor(config)
    reward, tokenizer = None, config.model.tokenizer_name_or_path
    if config.reward.has_model(roles, config.environment, is_needed=method.needs_reward):
        reward = builders.parent_run(roles.reward.model_name_or_path, config.output_dir, "reward",
                                     "roles.reward.model_name_or_path (or reward.functions instead of a model)")
        builders.print_other_form(reward, config.data, method.reads)
    trusts = config.model.trust_remote_code
    reads_text = reward not in (actor, None) and builders.difference(
        actor, reward, config.data, method.reads, tokenizer, trust_remote_code=trusts)
    sources = Sources(actor, reward, (roles.ref.model_name_or_path or actor) if method.needs_ref else None,
                      (roles.critic.model_name_or_path or (actor if reads_text or not reward else reward))
                      if method.needs_critic else None, bool(reads_text), *_find_teacher(config, actor))
    for other in dict.fromkeys((sources.ref, sources.critic)):  # both of them read the actor's token ids
        if other not in (actor, reward, None):
            builders.check_pair(actor, other, config.data, method.reads, tokenizer, trust_remote_code=trusts)
    check(not (reads_text and reward in (sources.ref, sources.critic)),
          f"{actor} and {reward} do not fit together: their {reads_text} differ, and a critic or reference reads the "
          "actor's tokens")
    return sources


def _find_teacher(config: OnPolicyConfig, actor: str) -> tuple[str | None, bool]:
    """The teacher's run or model, and whether it has other tokens than the actor; UserError where there is none, or the
    method cannot compare these."""
    if not config.method.needs_teacher:
        return None, False
    path, prompt = config.roles.teacher.model_name_or_path, config.distill.teacher_prompt
    check(path != SELF or prompt is not None,
          f"roles.teacher.model_name_or_path is {SELF}, which knows what the student knows; give distill.teacher_prompt"
          ', what it reads beside the question, such as "{{ prompt }} The answer is {{ answer }}."')
    check(prompt is None or not config.environment.is_given,
          "distill.teacher_prompt takes the place of a user's message, and an environment writes the prompts; leave "
          "one of them out")
    if config.method.is_own_teacher:
        check(path == SELF, "distill.teacher_ema averages the student, and roles.teacher.model_name_or_path is "
                            f"{path}; choose {SELF}")
        # the student's update would apply its own head to the teacher's states
        check(bool(config.model.lora.r), "distill.teacher_ema averages an adapter; give model.lora.r (such as 16)")
        return None, False
    if path == SELF:
        return actor, False
    check(path is not None, f"no teacher: give roles.teacher.model_name_or_path (a model or run, or {SELF})")
    path = builders.parent_run(path, config.output_dir, "sft", "roles.teacher.model_name_or_path")
    has_own_tokens = not builders.check_vocabulary(
        actor, path, config.data, (config.method.reads, *config.method.also_reads), config.model.tokenizer_name_or_path,
        trust_remote_code=config.model.trust_remote_code, may_differ=config.distill.divergence == POLICY_GRADIENT)
    if has_own_tokens:
        what = f"roles.teacher: {path} has other tokens than the student"
        check(not config.method.sampling.is_truncated,
              f"{what}, so it cannot say what top_k, top_p or min_p of {config.method.section}.sampling leave of its "
              "own; leave these out")
        check(not config.environment.is_given, f"{what}, and an environment writes the prompts; leave one of them out")
    teacher = load.configuration(replace(config.model, preset=None, model_name_or_path=builders.model_folder(path)))
    check_top_k(config.distill.top_k, teacher.get_text_config().vocab_size)
    return path, has_own_tokens


def teacher_prompt(config: OnPolicyConfig, tokenizer, own_tokens: OwnTokens | None = None) -> TeacherPrompt | None:  # noqa: ANN001
    """What the method's teacher reads in the place of the student's prompts; None: the same."""
    template = config.distill.teacher_prompt if hasattr(config, "distill") else None
    if template is None and own_tokens is None:
        return None
    return TeacherPrompt(template, own_tokens.teacher if own_tokens else tokenizer, config.data.raw)


def actor_model(config: OnPolicyConfig, sources: Sources) -> ModelConfig:
    return replace(config.model, model_name_or_path=builders.model_folder(sources.actor))


def previews(config: OnPolicyConfig) -> Iterator[Preview]:
    """Rendered prompts; of the models only the policy has to exist, for its tokenizer."""
    config = prepared(config)
    model = replace(config.model, model_name_or_path=builders.model_folder(find_actor(config)))
    for reads in (config.method.reads, *config.method.also_reads):
        is_own = reads is config.method.reads
        tokenizer = builders.open_tokenizer(model, config.data, reads, config.seed)
        shown = look(config.data, reads, tokenizer, stage=config.stage if is_own else "")
        told = teacher_prompt(config, tokenizer) if config.roles.teacher.model_name_or_path == SELF and is_own else None
        if told is not None:  # in the student's tokens, as of no other teacher is known here
            _check_columns(told, shown.data)
            if (ids := told.known(shown.data.train[0])) is not None:
                shown.rows.append(Shown(f"the teacher reads of example 1: {len(ids)} tokens",
                                        pieces(tokenizer, ids, [False] * len(ids))))
        yield shown


def prepared(config: OnPolicyConfig) -> OnPolicyConfig:
    """The resolved settings of a run; UserError without data."""
    builders.require_data(config.data, config.stage)
    config = defaults.resolve(config)
    require_more_data(config)
    return config


def run(make_trainer: Callable[[RunContext], Trainer], config: OnPolicyConfig, command: str = "") -> dict[str, float]:
    """Train, export the actor, and return the final metrics."""
    config = prepared(config)
    done = runfile.finished(config.output_dir, config.stage, config)
    if done:
        return done.metrics
    builders.seed_everything(config.seed)
    builders.choose_kernels(config.train)
    opened = open_run(config)
    trainer, roles = make_trainer(opened), opened.roles
    with explained("while trying the export"), roles.actor.engine.active():
        try_export(roles.actor.engine.model, opened.tokenizer, roles.actor.engine.eos_ids)
    record = builders.start(config, command, opened.data, opened.more)
    engines = {role: handle.engine for role, handle in (("actor", roles.actor), ("critic", roles.critic)) if handle}

    def leave() -> None:
        _leave(roles, opened, config, builders.MODEL_FOLDER)
        average = getattr(trainer, "average", None)  # of the weights, where the method keeps one
        if average is not None:
            with average.in_model():
                _leave(roles, opened, config, f"{builders.MODEL_FOLDER}_ema")

    def facts() -> dict:
        return {"base_model": opened.sources.actor, "reward_model": opened.sources.reward, "data": opened.data.report,
                **builders.adapted_weights(actor_model(config, opened.sources)),
                **{f"{stage}_data": data.report for stage, data in opened.more.items()}}

    with on_record(record):
        announce.before(record, config, engines, opened.sources.actor, opened.num_steps, opened.loader,
                        [_teacher_line(opened), opened.reward_line])
        prompts = fixed_prompts.first_prompts(opened.data, config.train.num_fixed_prompts)
        # the user's functions and services score only what is trained on or evaluated, not these samples
        source = opened.source if isinstance(opened.source, ModelSource) else None
        answers = prompts and fixed_prompts.of_policy(roles.actor, prompts, config.method.sampling, source,
                                                      ends=[config.data.append_eos] * len(prompts))
        return fit(trainer, opened.loader, opened.held_out, config.train, record, opened.num_steps, answers,
                   builders.guesses(engines.values()),
                   Leaving(opened.tokenizer, leave, facts, lambda: roles.actor.engine.training.num_steps))


def _teacher_line(opened: RunContext) -> str | None:
    roles, quantize = opened.roles, opened.config.roles.teacher.quantize
    if opened.config.method.is_own_teacher:
        return "teacher: the average of the student's adapter (distill.teacher_ema)"
    if roles.teacher is None:
        return None
    quantize = (quantize if quantize != "none" else None) if quantize else opened.config.model.quantize
    return announce.teacher_line(opened.sources.teacher, roles.teacher.engine, roles.actor.engine, quantize)


def _leave(roles: Roles, opened: RunContext, config: OnPolicyConfig, folder: str) -> None:
    engine = roles.actor.engine
    give_back_idle()  # free the KV cache that was kept for the next rollout
    with explained("while exporting", builders.EXPORT_LATER), engine.active():
        export(engine.model, opened.tokenizer, Path(config.output_dir) / folder, engine.eos_ids)


def open_run(config: OnPolicyConfig) -> RunContext:
    """Check everything that can be checked without weights, then load data and roles."""
    method, environments = config.method, episodes_setup.open_of(config.environment, raw=config.data.raw)
    others = _open_sources(config, environments)
    check(environments is None or (config.roles.actor.tp or 1) == 1,
          f"roles.actor.tp is {config.roles.actor.tp}: episodes are sampled by each process for itself; leave it out")
    sources = find_sources(config)
    model = actor_model(config, sources)
    builders.check_tensor_parallel(config.roles.actor.tp or 1, model)
    longest, lengths_of = _check_lengths(config, sources, model)
    check_more_data(config, model, sources.teacher)
    starts, layout = check_roles(config, sources)
    _check_whole_head(config, layout)
    tokenizer = builders.open_tokenizer(model, config.data, config.method.reads, config.seed)
    for reads in method.also_reads:
        builders.give_template(tokenizer, config.data, reads)
    player = episodes_setup.player_of(config.environment, environments, tokenizer)
    reader = _open_reader(config, sources)
    with main_first():  # the others find its tables in the cache
        data = datasets.build(config.data, method.reads, tokenizer, config.seed)
        more = {reads.stage: datasets.build(config.data, reads, tokenizer, config.seed) for reads in method.also_reads}
    extra = {"environments": None} if environments and not config.environment.isolate else {}
    reward_sources.check_columns(others, {**data.train[0], **extra}, bool(environments))
    reward_sources.leave_unread(data.report, others, environments)
    own_tokens = _open_own_tokens(config, sources, tokenizer)
    told = teacher_prompt(config, tokenizer, own_tokens)
    if told is not None:
        _check_columns(told, data)
        _check_made(told, config, bool(others or sources.reward))
        asked = replace(model, model_name_or_path=builders.model_folder(sources.teacher or sources.actor))
        told.check([*data.train, *data.held_out], method.sampling.max_new_tokens, load.configured_positions(asked))
    if environments is not None:
        episodes_setup.check_rows(environments, data, tokenizer, model, longest, lengths_of)
    loader = builders.train_loader(data.train, config.train, config.seed, collate.collate_prompts)
    held_out = builders.eval_loader(data.held_out, config.train, config.seed, collate.collate_prompts)
    steps = builders.total_steps(config.train, len(loader))
    scale = _score_scale(config, sources)
    warmup = _critic_warmup_steps(method, starts, steps)
    num_updates = {"actor": (steps - warmup) * method.num_updates, "critic": steps * method.num_updates}
    with activity.slow("loading the models"):
        roles, reward = build(config, starts, layout, tokenizer, num_updates, scale, reader,
                              method.takes_head, is_mixed=bool(others or config.reward.weights),
                              judge=reward_sources.judge_on_base(others), own_tokens=own_tokens)
    if roles.teacher:
        roles.teacher.prompt = told
    roles.actor.episodes = player
    model_source = reward and ModelSource(reward, tokenizer=reader, raw=config.data.raw)
    source, scale = reward_sources.combine(config.reward, model_source, others, scale, tokenizer)
    return RunContext(config, tokenizer, data, loader, held_out, steps, roles, source, scale, sources, more, warmup,
                      _reward_line(sources.reward, bool(others)))


def _check_columns(prompt: TeacherPrompt, data: datasets.StageData) -> None:
    """UserError for a template that reads a column which the data lacks; the others count as read in the report. A line
    says which of the data's columns have the name of what the template reads instead, and which have no value."""
    columns, known = prompt.columns(), [c for c in data.train[0] if c not in ("prompt_ids", "text")]
    for name in sorted(columns):
        check(name in known, f"distill.teacher_prompt: there is no column {name}{nearest(name, known)}; there are "
                             f"{', '.join(known)}")
        if empty := sum(row.get(name) is None for row in data.train):
            print_main(f"distill.teacher_prompt: {name} is null in {empty} of {len(data.train)} rows, where the "
                       f"teacher reads None; ask for it ({{% if {name} %}}), or leave such rows out")
    for name in sorted((prompt.names() - columns - {"prompt"}) & {*known}):
        print_main(f"distill.teacher_prompt: {name} is what the run makes, and not the data's column {name}; give "
                   "the column another name to read it")
    data.report["unread"] = {c: n for c, n in data.report.get("unread", {}).items() if c not in columns}


def _check_made(prompt: TeacherPrompt, config: OnPolicyConfig, has_score: bool) -> None:
    """UserError for a template that reads nothing, or what this run never makes."""
    names, option = prompt.names(), "distill.teacher_prompt"
    check(prompt.template is None or bool(names), f"{option} reads nothing of the row or the response; give what the "
          'teacher is to know, such as "{{ prompt }} The answer is {{ answer }}."')
    check("feedback" not in names or config.reward.judge.is_given,
          f"{option} reads feedback, and there is no judge whose remark it is; give reward.judge.model")
    check(has_score or not names & {"score", "best", "best_score"},
          f"{option} reads scores, and nothing scores the responses; give reward.functions or a reward model")
    check(config.method.sampling.num_samples > 1 or not names & {"best", "best_score"},
          f"{option} reads the best other response to a prompt, and there is one response; give "
          f"{config.method.section}.sampling.num_samples")


def _open_sources(config: OnPolicyConfig, environments: Environments | None) -> list[RewardSource]:
    """The reward sources beside the stage-2 model; prints a line where a method sums rewards of steps."""
    method = config.method
    reward_sources.check_groups(config.reward, method.sampling.num_samples, f"{method.section}.sampling.num_samples")
    sources = reward_sources.open_sources(config.reward, config.roles, config.data.raw, config.environment,
                                          environments, config.seed, is_needed=method.needs_reward,
                                          judge_base=judge_base(config, find_actor(config)))
    reward_sources.print_step_rewards(sources, getattr(config, "ppo", None), environments)
    return sources


def _check_lengths(config: OnPolicyConfig, sources: Sources, model: ModelConfig) -> tuple[int, str]:
    """The longest sequence, in tokens, and its options for messages; UserError where a role has fewer positions."""
    longest = config.data.max_prompt_length + config.method.sampling.max_new_tokens
    option = f"data.max_prompt_length + {config.method.section}.sampling.max_new_tokens"
    paths = (sources.actor, sources.reward, sources.ref, sources.critic, sources.teacher)
    for path in dict.fromkeys(p for p in paths if p):
        builders.check_lengths(replace(model, model_name_or_path=builders.model_folder(path)), **{option: longest})
    return longest, option


def _check_whole_head(config: OnPolicyConfig, layout: Layout) -> None:
    """UserError where the actor's update needs the teacher's full head, and ZeRO 3 shards its weights: by its own
    settings, or those of the role that trains on the same base."""
    if any("teacher" in group for group in layout.bases) and config.method.takes_head:
        owner = next((role for role in layout.group("teacher") if role in TRAINED), "teacher")
        check(layout_of(config, owner).zero_stage != 3, WHOLE_HEAD)


def require_more_data(config: OnPolicyConfig) -> None:
    """UserError where the data of Method.also_reads is missing."""
    for reads in config.method.also_reads:
        try:
            datasets.open_sources(config.data, reads)
        except UserError as error:
            raise UserError(f"{error}, or give them a source of their own beside the prompts: data.sources "
                            f"'[PROMPTS, {{path: FILE, stages: [{reads.stage}]}}]'") from error


def check_more_data(config: OnPolicyConfig, model: ModelConfig, teacher: str | None = None) -> None:
    """UserError where the data of Method.also_reads is longer than the model or the teacher that reads it."""
    for reads in config.method.also_reads:
        readers = [model]
        if teacher and reads == DEMONSTRATIONS:
            readers.append(replace(model, model_name_or_path=builders.model_folder(teacher)))
        for reader in readers:
            builders.check_lengths(reader, **{"data.max_length": config.data.max_length})


def _open_reader(config: OnPolicyConfig, sources: Sources):  # noqa: ANN202 - a transformers class
    """The reward model's tokenizer where it reads text (a line says so); None where it reads the actor's tokens."""
    if not sources.reads_text:
        return None
    print_main(f"the reward model {sources.reward} has a tokenizer or template of its own and reads the responses as "
               "text" + (f"; the critic starts from {sources.critic}" if sources.critic else ""))
    model = replace(config.model, model_name_or_path=builders.model_folder(sources.reward), tokenizer_name_or_path=None)
    return builders.open_tokenizer(model, config.data, config.method.reads, config.seed)


def _open_own_tokens(config: OnPolicyConfig, sources: Sources, student: Tokenizer) -> OwnTokens | None:
    """The tokenizer of a teacher that has other tokens than the student (a line says so), with its own template."""
    if not sources.has_own_tokens:
        return None
    path = present(sources.teacher, "teacher")
    reader = load_tokenizer(builders.model_folder(path), config.model.trust_remote_code)
    check(bool(reader.chat_template) or not datasets.is_conversational(config.data, config.method.reads),
          f"roles.teacher: {path} has no chat template for prompts that are messages; choose another teacher, or give "
          "prompts as text")
    print_main(f"the teacher {path} has other tokens than the student: it reads prompts and responses as text, and "
               "spans of text that end with a token of both are compared")
    return OwnTokens(reader, student, config.data.raw)


def _score_scale(config: OnPolicyConfig, sources: Sources) -> Scale | None:
    """The scale that the reward model's scores are normalised by; None for none."""
    is_wanted = sources.reward and config.method.normalise_scores
    measured = builders.score_statistics_of(sources.reward) if is_wanted else {}
    if not measured:
        return None
    check(measured["std"] > 0, f"roles.reward.model_name_or_path: {sources.reward} gave all pairs' answers one score "
                               f"({measured['mean']:.3g}), so it cannot tell responses apart; train it again, for "
                               "longer or at another rate")
    return Scale(measured["mean"], measured["std"], config.method.score_clip)


def _reward_line(reward: str | None, has_check: bool) -> str | None:
    """How the stage-2 model ranked its held-out pairs; a warning where that may be chance (within two standard errors,
    1 / sqrt(n)), where nothing was held out, and where its run did not finish: its score would rise in training all the
    same. has_check: whether another source is reported beside it."""
    record = runfile.run_at(reward) if reward else None
    if record is None:
        return None
    accuracy, count = record.metrics.get("eval/accuracy"), record.facts.get("data", {}).get("held_out")
    if record.left_early:
        return f"warning: the reward run in {reward} {record.left_early}; what that ranks rightly is not known"
    if count == 0:
        return ("warning: no pair was held out when the reward model was trained, so it is not known whether it ranks "
                "new answers rightly; raise data.eval_fraction of --stage reward, or give more pairs")
    if accuracy is None or not count:
        return None
    ranked = f"the reward model ranked {accuracy:.0%} of its held-out pairs rightly ({count} were held out)"
    if own_samples.may_be_chance(accuracy, count):
        return (f"warning: {ranked}, which may be chance: its score will rise whether answers get better or not. Train "
                "it for longer or on more pairs (--stage reward), and read the samples")
    measured = record.facts.get("own_samples", {})
    if measured:
        may_be_chance = own_samples.may_be_chance(measured.get("agreement"), measured.get("pairs", 0))
        warning = "warning: " if may_be_chance else ""
        return f"{warning}{ranked}; {own_samples.line(measured)}"
    if has_check:
        return ranked
    return (f"{ranked}; how it ranks this policy's own answers is not known: reward.own_samples of --stage reward "
            "measures it, and a function of weight 0 (reward.functions, reward.weights) that checks them would show it")


def _critic_warmup_steps(method: Method, starts: dict[str, Start], num_steps: int) -> int:
    """Steps that train the critic alone. By default none for a critic that starts from a reward model; a new head's
    values are wrong at first, and the actor would be trained on them."""
    if method.critic_warmup_steps is not None or not method.needs_critic:
        return method.critic_warmup_steps or 0
    steps = 0 if starts["critic"].head else min(MAX_CRITIC_WARMUP, num_steps // 10)
    if steps:
        first = "first step trains" if steps == 1 else f"first {steps} steps train"
        print_main(f"the critic knows no scores yet: the {first} it alone (ppo.critic_warmup_steps)")
    return steps
