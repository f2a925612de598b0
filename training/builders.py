"""Shared code of the recipes: open tokenizers and models, build engines, loaders and schedules, check settings."""

from __future__ import annotations

import dataclasses
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import torch
from torch import nn

from hybrid_rlhf.algorithms.schedule import learning_rate_factor
from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import consecutive_ranks, device, init_process_group, print_main, rank, world_size
from hybrid_rlhf.core.memory import SMALLER, explained
from hybrid_rlhf.data import chat, datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.loader import Loader
from hybrid_rlhf.data.sources import Reads
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.decode.admission import stop_ids
from hybrid_rlhf.engine.decode.tensor_parallel import check_configured
from hybrid_rlhf.engine.train.parameters import count_parameters
from hybrid_rlhf.export.folder import has_quantized_values
from hybrid_rlhf.models import images, load
from hybrid_rlhf.models.backbone import check_head, towers
from hybrid_rlhf.models.dropout import without_dropout
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import adapter_dtype, add_lora
from hybrid_rlhf.models.tokenizer import added_ids, load_tokenizer, train_tokenizer, turn_ends
from hybrid_rlhf.models.weights import identity
from hybrid_rlhf.report.pace import EXPORT, REPORT, SAVE
from hybrid_rlhf.roles import PolicyModule
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.training.registry import PTX, STAGES

MODEL_FOLDER = "model"
# Assumed until measured: bytes per second of writing weights, seconds of a report with its plots, and seconds per
# trained weight of the optimizer on a CPU.
DISK, REPORT_SECONDS, UPDATE_SECONDS = 5e8, 1.3, 4e-9
# Advice for running out of memory at the export, after the training.
EXPORT_LATER = ("the training is kept in the last checkpoint: close what else uses the memory, and the same command "
                f"goes on with the export. For the next run, {SMALLER}")


def parent_run(named: str | None, output_dir: str, stage: str, option: str) -> str:
    """The run folder or model of an earlier stage: the `named` one, else the folder `stage` beside this run's
    output_dir.

    In place of sft the named run may be of any stage that leaves a policy. Raises UserError when there is neither, or
    when the run is of another stage or not finished. option: the option that names it, for messages.
    """
    path = named or str(Path(output_dir).parent / stage)
    if runfile.is_run(path):
        actual = runfile.read_run(path).stage if named and stage == "sft" else stage
        is_policy = actual not in STAGES or STAGES[actual].leaves == "policy"  # a stage of the user's own leaves one
        runfile.require_finished(path, actual if is_policy else stage)
        return path
    check(named is not None, f"no finished {stage} run: {path} does not exist or holds none; run --stage {stage} "
                             f"--output_dir {path} first, or give {option}")
    return path


def model_folder(path: str) -> str:
    """The model inside a run folder; any other path as it is."""
    return str(Path(path) / MODEL_FOLDER) if runfile.is_run(path) else path


def open_tokenizer(model: ModelConfig, data: DataConfig, reads: Reads, seed: int):  # noqa: ANN201
    """The tokenizer of a run, with a chat template. A preset trains one on the run's own texts."""
    if model.preset and not model.tokenizer_name_or_path:
        tokenizer = train_tokenizer(datasets.raw_texts(data, reads, seed), model.vocab_size)
    else:
        path = model.tokenizer_name_or_path or model.model_name_or_path
        check(path is not None, "no model: give model.model_name_or_path (hub id or folder) or model.preset")
        tokenizer = load_tokenizer(path, model.trust_remote_code)
        if model.tokenizer_name_or_path and model.model_name_or_path:
            images.read_as(tokenizer, model.model_name_or_path)
        print_other_form(path, data, reads)
    had_none = not tokenizer.chat_template and not model.preset
    give_template(tokenizer, data, reads)
    if had_none and tokenizer.chat_template and not data.chat_template:
        print_main("chat template: the tokenizer has none and gets ChatML (data.chat_template gives another)")
    return tokenizer


def give_template(tokenizer, data: DataConfig, reads: Reads) -> None:  # noqa: ANN001
    """Set a chat template where messages are to be rendered, and where SFT trains on questions and answers in plain
    text (not data.raw). Plain continuation of text needs none and gets no new tokens."""
    is_sft = reads.kind == "demonstration" and reads != PTX
    is_dialogue = is_sft and not data.raw and datasets.has_plain_prompts(data, reads)
    if data.chat_template or data.chat_template_kwargs or is_dialogue or datasets.is_conversational(data, reads):
        chat.ensure_template(tokenizer, data.chat_template, kwargs=data.chat_template_kwargs)


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch (new heads, new adapters, dropout), numpy and Python (functions of the
    user's)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def choose_kernels(train: TrainConfig) -> None:
    """On a card, take kernels that add in one order if `train.deterministic`, with a line on what it costs."""
    if not train.deterministic or device().type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
    torch.use_deterministic_algorithms(True, warn_only=True)
    print_main("train.deterministic: sums in one order, where torch has such kernels (it warns where not), and decode "
               "steps of all rows, idle ones too: slower, most of all where few responses are left")


def seed_dropout(seed: int) -> None:
    """Give each process its own dropout masks from here on; new weights, drawn before, are the same on all."""
    if rank():
        torch.manual_seed(seed + 1_000_003 * rank())


def check_lengths(model: ModelConfig, **lengths: int) -> None:
    """UserError if a length (keyword: its option, `__` for a dot) exceeds the model's positions. Reads no weights."""
    limit = load.configured_positions(model)
    which = model.preset or model.model_name_or_path
    for option, length in lengths.items():
        name = option.replace("__", ".")
        if limit is not None and length > limit:
            named = f"{limit} positions" if model.preset else load.describe_positions(load.configuration(model))
            raise UserError(f"{name} is {length}, but {which} has {named}; lower {name} to {limit} or less")


def check_model(model: ModelConfig, engine: ZeroConfig, optim: str = "adamw") -> None:
    """UserError for weights that cannot be trained here, and for adapters that match no module. Reads no weights."""
    check_dtype(model)
    if not model.lora.r:  # adapters may have another dtype than their base
        engine.stage(load.resolve_dtype(model.dtype, device()), optim)
    load.check_lora(model)
    check_quantized_once(model)


def check_quantized_once(model: ModelConfig) -> None:
    """UserError for quantising again a model whose adapter was merged into dequantised weights, as the originals were
    missing: those weights lie on the quantisation grid, and an adapter much smaller than its steps is rounded away (an
    update of 1% of the weight keeps 2%; merged into the original weights it keeps 99%)."""
    run = Path(model.model_name_or_path or "").parent
    if not model.quantize or not runfile.is_run(run):
        return
    before = runfile.read_run(run).config.get("model", {})
    check(not ((before.get("load_in_4bit") or before.get("load_in_8bit")) and has_quantized_values(run)),
          f"{run} was trained over a quantised base whose original weights were gone at its end: quantising its model "
          f"again would round away what it learned; do not load it in {model.quantize}")


def check_dtype(model: ModelConfig) -> None:
    """UserError for a dtype that DeepSpeed does not train on this device, or an attention that does not run on it."""
    check(model.dtype != "float16" or device().type != "cpu",
          "model.dtype is float16, which needs an accelerator; choose float32 or bfloat16 on a CPU")
    if model.attn_implementation == "flash_attention_2":
        check(device().type == "cuda" and model.dtype != "float32" and find_spec("flash_attn") is not None,
              "model.attn_implementation is flash_attention_2, which needs an accelerator, 16-bit weights and the "
              "package flash_attn; choose sdpa")


def prepare(model: nn.Module, config: ModelConfig, tokenizer) -> list[int]:  # noqa: ANN001
    """Fit the model's embeddings to the tokenizer; returns the ids of new tokens (markers of a new chat template),
    whose rows are trained with adapters, and prints a line about them."""
    size = model.get_input_embeddings().num_embeddings
    load.prepare(model, config, len(tokenizer))
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # a composite model's is its text part's
    if kept := towers(model):
        names, how = ", ".join(kept), "is trained; frozen:" if config.freeze_vision else "is trained, and so is"
        print_main(f"{type(model).__name__}: the text part {how} {names}")
    new_ids = sorted({*added_ids(tokenizer), *range(size, len(tokenizer))} - {tokenizer.pad_token_id})
    if new_ids and config.lora.r:
        few = ", ".join(tokenizer.convert_ids_to_tokens(new_ids[:3])) + (", ..." if len(new_ids) > 3 else "")
        print_main(f"LoRA: the embedding rows of {len(new_ids)} new token(s) ({few}) are trained too")
    return new_ids


@explained("while loading the model")
def open_policy(model: ModelConfig, tokenizer, seed: int, *, dropout: bool,  # noqa: ANN001
                in_parts: bool = False) -> nn.Module:
    """The causal model of a stage, with adapters if set, ready for an engine. in_parts: for an engine that shards it by
    ZeRO 3 (load_causal_lm)."""
    check_dtype(model)
    causal = load.random_causal_lm(model, tokenizer, seed).to(device()) if model.preset else load.load_causal_lm(
        model, device(), in_parts=in_parts)
    new_ids = prepare(causal, model, tokenizer)
    check_head(causal)
    if model.lora.r:
        add_lora(causal, model.lora, new_ids=new_ids)
    if dropout:
        seed_dropout(seed)
        return causal
    return without_dropout(causal)


@explained("while loading the model")
def open_scalar(model: ModelConfig, tokenizer, *, new_head_std: float | None = None,  # noqa: ANN001
                in_parts: bool = False) -> nn.Module:
    """A model with a scalar head from `model.model_name_or_path`; with LoRA the head is trained in full. in_parts: as
    open_policy has it."""
    check_dtype(model)
    scalar = load.load_scalar_model(model, device(), new_head_std, tokenizer.pad_token_id, in_parts=in_parts)
    new_ids = prepare(scalar, model, tokenizer)
    without_dropout(scalar)
    if model.lora.r:
        add_lora(scalar, model.lora, new_ids=new_ids)
        scalar.score.to(adapter_dtype(scalar)).weight.requires_grad_(True)  # trained with the adapters, in their dtype
    return scalar


def check_tensor_parallel(degree: int, model: ModelConfig) -> None:
    """UserError where `degree` processes cannot share the actor's generation. Reads no weights."""
    option, world = f"roles.actor.tp is {degree}", world_size()
    check(world % degree == 0, f"{option}, but there {'is 1 process' if world == 1 else f'are {world} processes'}; "
                               f"start a multiple of {degree}, as by torchrun --nproc_per_node {degree}")
    check(degree == 1 or model.quantize is None, f"{option}: quantised weights cannot be cut; leave out "
                                                 f"model.load_in_{model.quantize} or take tp 1")
    if degree > 1:
        check_configured(load.configuration(model), degree, "roles.actor.tp")


def policy_engine(model: nn.Module, tokenizer, tp: int = 1,  # noqa: ANN001
                  adapter: Callable = nullcontext) -> HybridEngine:
    """An engine that samples and gives log-probabilities. tp: how many processes generate together (every process of
    the run calls this). adapter: as HybridEngine takes it."""
    if tp > 1:
        init_process_group()
    return HybridEngine(PolicyModule(model), model, eos_ids=stop_ids(model, tokenizer),
                        pad_id=tokenizer.pad_token_id, tp=consecutive_ranks(tp) if tp > 1 else None, adapter=adapter)


def scalar_engine(model: nn.Module, tokenizer, mean: float = 0.0, std: float = 1.0, *,  # noqa: ANN001
                  adapter: Callable = nullcontext) -> HybridEngine:
    """An engine that gives (score - mean) / std at every position. adapter: as HybridEngine takes it."""
    return HybridEngine(ScalarModel(model, mean, std), pad_id=tokenizer.pad_token_id, adapter=adapter)


def optimizer_of(train: TrainConfig, learning_rate: float) -> OptimizerConfig:
    """The optimizer settings of `train`, with the learning rate of the role that it trains."""
    names = [f.name for f in dataclasses.fields(OptimizerConfig) if f.name != "learning_rate"]
    return OptimizerConfig(learning_rate, **{name: getattr(train, name) for name in names})


def schedule_of(train: TrainConfig, num_updates: int) -> Callable[[int], float]:
    """Optimizer step -> factor of the learning rate, over `num_updates` steps."""
    warmup = round(train.warmup_ratio * num_updates)
    return lambda step: learning_rate_factor(step, total_steps=num_updates, warmup_steps=warmup,
                                             kind=train.lr_scheduler_type)


def total_steps(train: TrainConfig, batches_per_epoch: int) -> int:
    """Trainer steps of a run: max_steps, or num_train_epochs passes over the data; a step begun counts, as in
    transformers' Trainer (2.5 epochs of 5 batches are 13 steps)."""
    if train.max_steps > 0:
        return train.max_steps
    return max(1, math.ceil(train.num_train_epochs * batches_per_epoch - 1e-9))  # 0.1 * 30 is 3.0000000000000004


def require_data(data: DataConfig, stage: str) -> None:
    """UserError if the run has no data."""
    if not data.sources:
        raise UserError(f"no data for stage {stage}: give data.sources, a path or a list of them "
                        "(file, folder, hub id, or demo/demonstrations)")


def train_loader(rows: Sequence[dict], train: TrainConfig, seed: int, collate: Callable,
                 drop_last: bool | None = None) -> Loader:
    """Endless shuffled batches, one for each trainer step. drop_last: as in Loader."""
    return Loader(rows, train.rows_per_step, collate, seed, rank=rank(), world=world_size(), drop_last=drop_last)


def guesses(engines: Iterable[HybridEngine]) -> dict[str, float]:
    """Estimated seconds of a run's work beside its steps (report/pace.py), used until measured, and of a step's
    updates: from the numbers that are written, four bytes each, and updated."""
    trained, total = (sum(column) for column in zip(*map(count_parameters, engines), strict=True))
    update = trained * UPDATE_SECONDS if device().type == "cpu" else 0.0
    return {SAVE: 12 * trained / DISK, EXPORT: 4 * total / DISK, REPORT: REPORT_SECONDS, "update": update}


def eval_loader(rows: Sequence[dict], train: TrainConfig, seed: int, collate: Callable) -> Loader | None:
    """The held-out rows in order, or None where there are none."""
    if not len(rows):
        return None
    return Loader(rows, train.per_device_eval_batch_size, collate, seed, rank=rank(), world=world_size(),
                  shuffle=False, drop_last=False)


def start(config, command: str, data: datasets.StageData,  # noqa: ANN001
          more: Mapping[str, datasets.StageData] = MappingProxyType({})) -> runfile.RunRecord:
    """Claim the run's folder, after all checks of its input, and print what happened to the rows; for the data in
    `more`, by name, only the lines that differ."""
    record = runfile.start(config.output_dir, config.stage, config, command)
    summary = datasets.summary(data.report)
    record.facts["header"] = summary + [
        named for name, each in more.items()
        for line, named in zip(datasets.summary(each.report), datasets.summary(each.report, name), strict=True)
        if line not in summary]
    print_main(*record.facts["header"])
    return record


def difference(actor: str, other: str, data: DataConfig, reads: Reads, tokenizer: str | None = None, *,
               trust_remote_code: bool = False) -> str | None:
    """What keeps `other` from reading the actor's token ids ("tokenizers" or "chat templates"), or None.

    tokenizer: the actor's, where it is not its model's own. Two runs are compared by their records. trust_remote_code:
    whether tokenizers may be code of their folders.
    """
    if tokenizer is None and runfile.is_run(actor) and runfile.is_run(other):
        return runfile.difference(runfile.read_run(actor), runfile.read_run(other))
    tokenizers = [load_tokenizer(p, trust_remote_code) for p in (tokenizer or model_folder(actor), model_folder(other))]
    for each in tokenizers:
        give_template(each, data, reads)
    hashes = [runfile.tokenizer_hash(t) for t in tokenizers]
    if hashes[0] != hashes[1]:
        return "tokenizers"
    return "chat templates" if tokenizers[0].chat_template != tokenizers[1].chat_template else None


def check_pair(actor: str, other: str, data: DataConfig, reads: Reads, tokenizer: str | None = None, *,
               trust_remote_code: bool = False) -> None:
    """UserError if the other model reads the actor's token ids differently."""
    what = difference(actor, other, data, reads, tokenizer, trust_remote_code=trust_remote_code)
    check(what is None,
          f"{actor} and {other} do not fit together: their {what} differ; train both from the same SFT run")


def adapted_weights(model: ModelConfig) -> dict[str, str]:
    """For the record of a run with adapters: the identity of their base, by which a later run loads them on it."""
    path = model.model_name_or_path
    return {"base_weights": identity(path)} if model.lora.r and path else {}


def check_vocabulary(student: str, teacher: str, data: DataConfig, all_reads: Sequence[Reads],
                     tokenizer: str | None = None, *, trust_remote_code: bool = False,
                     may_differ: bool = False) -> bool:
    """Whether each of the student's tokens is the same for the teacher; UserError if not, unless it may_differ. Merges,
    padding of the vocabulary and tokens that only the teacher has do not matter; a line is printed for another chat
    template, and for another end of an answer.

    tokenizer: the student's, where it is not its model's own.
    """
    ours = load_tokenizer(tokenizer or model_folder(student), trust_remote_code)
    other = load_tokenizer(model_folder(teacher), trust_remote_code, "give another roles.teacher.model_name_or_path")
    for reads in all_reads:
        give_template(ours, data, reads)
    known = {number: text for text, number in other.get_vocab().items()}
    unlike = sorted((number, text) for text, number in ours.get_vocab().items() if known.get(number) != text)
    if unlike:
        number, text = unlike[0]
        check(may_differ, f"{student} and the teacher {teacher} have different tokenizers: token {number} is {text!r} "
                          f"to the student and {known.get(number, 'nothing')!r} to the teacher ({len(unlike)} such); "
                          "take a teacher with the student's tokens, or --stage distill with --distill.divergence "
                          "policy_gradient, which compares spans of text")
        return False
    if ours.chat_template != other.chat_template and ours.chat_template:
        print_main(f"the teacher {teacher} has another chat template; it reads what the student's template writes")
    stops = stop_ids(SimpleNamespace(generation_config=load.read_generation(model_folder(student))), ours)
    ends = [i for i in turn_ends(other) or [other.eos_token_id] if i not in (None, *stops)]
    if ends:
        named = " or ".join(map(repr, map(known.get, ends)))
        print_main(f"the teacher {teacher} ends its answers with {named}, which ends none of the student's: it would "
                   "learn to write that and go on; name it too in eos_token_id of the student's generation_config.json "
                   f"({student})")
    return True


def score_statistics_of(reward: str) -> dict[str, float]:
    """mean and std that the reward run measured on held-out pairs; empty for a reward model without a run's record."""
    record = runfile.run_at(reward)
    return record.facts.get("score_statistics", {}) if record else {}


def print_other_form(path: str, data: DataConfig, reads: Reads) -> None:
    """Print a line on stderr where the run at `path`, or of the model at `path`, had another data.raw than `data`."""
    run = next((p for p in (Path(path), Path(path).parent) if runfile.is_run(p)), None)
    other = None if run is None else (runfile.read_run(run).config.get("data") or {}).get("raw")
    if other not in (None, data.raw) and datasets.has_plain_prompts(data, reads):
        before, now = str(other).lower(), str(data.raw).lower()
        print_main(f"note: {run} was trained with data.raw {before} and this run has {now}: its model reads prompts of "
                   f"plain text in another form than it learned them; give --data.raw {before}")
