"""The stages from Python: a model, data and a few settings in; metrics, the model and its tokenizer out.

A thin layer over the recipes that `train.py --stage` runs, with the same folder, report, checkpoints and errors.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import importlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePath
from typing import ClassVar

from hybrid_rlhf import trl_words
from hybrid_rlhf.api_inputs import Rows, dotted, environments_of, formatted, rewards_of, rows_of, words
from hybrid_rlhf.core.config import UserError, check, nearest, parse
from hybrid_rlhf.core.distributed import print_main, rank
from hybrid_rlhf.core.memory import bound_product_caches, grow_segments
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.core.startup import lasting_streams, quiet_libraries
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.report.trackers import check_trackers
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.checkpointing import SMALL_IS_GOOD
from hybrid_rlhf.run.reporter import watched_by
from hybrid_rlhf.training import unread_options
from hybrid_rlhf.training.registry import STAGES
from hybrid_rlhf.trl_callbacks import Callbacks
from hybrid_rlhf.trl_configs import TrlConfig, is_config, settings_of

Reward = Callable | str | PurePath | list


_ARGUMENTS = ("model", "args", "train_dataset", "reward_funcs", "eval_dataset", "processing_class", "callbacks",
              "peft_config", "formatting_func", "tools", "environment_factory")


class Training:
    """One run of a stage. Inputs are checked here, before anything is loaded.

    model: a hub id, a folder, a run's folder, an earlier Training, or a transformers model, which is copied into the
    run's folder and stays as it is. args: an SFTConfig or the like, by which everything has TRL's meaning and TRL's
    defaults. train_dataset: a path or a list of paths, a datasets.Dataset, or any other iterable of rows (mappings).
    reward_funcs, of stages that sample: one or a list of Python functions as TRL calls them, path.py:name,
    builtin:name, a reward model or its folder. eval_dataset: rows that are only evaluated, given as train_dataset is;
    nothing of that is held out then, unless eval_fraction says so. processing_class: a tokenizer or a processor, in
    place of the model's. callbacks: transformers.TrainerCallback objects. peft_config: a peft.LoraConfig.
    formatting_func: row -> its text. tools: functions that the model may call; environment_factory: a class, or a
    mapping of names to classes, as TRL takes them. settings: a mapping of the stage's options; options: more of them by
    name, learning_rate=1e-5 as well as train__learning_rate=1e-5, and the trainer's further models (ref_model, ...),
    given as `model` is.

    By position come model, data and rewards (`_OURS`), or TRL's arguments in their order (`_ORDER`), where a
    configuration, None or a reward function is among them, or the data are given by name.

    Raises UserError with a line for each argument that is not taken.
    """

    _STAGE: ClassVar[str]
    _ORDER: ClassVar[str]
    _OURS: ClassVar[str] = "model train_dataset"
    _MODELS: ClassVar[Mapping[str, str]] = {}  # argument: the option that names this model
    _VARIANT: ClassVar[str] = ""  # the argument that chooses among stages

    def __init__(self, model: object = None, *positional: object, args: object = None, train_dataset: object = None,
                 reward_funcs: object = None, eval_dataset: object = None, processing_class: object = None,
                 callbacks: Sequence | None = None, peft_config: object = None,
                 formatting_func: Callable | None = None, tools: object = None, environment_factory: object = None,
                 output_dir: str | PurePath | None = None, settings: Mapping | None = None, **options: object) -> None:
        quiet_libraries()
        grow_segments()  # works only before anything is on the card
        bound_product_caches()  # and before the first product
        with _one_line():
            named = self._placed((model, *positional), options | {
                "args": args, "train_dataset": train_dataset, "reward_funcs": reward_funcs,
                "eval_dataset": eval_dataset, "processing_class": processing_class, "callbacks": callbacks,
                "peft_config": peft_config, "formatting_func": formatting_func, "tools": tools,
                "environment_factory": environment_factory})
            (model, args, train_dataset, reward_funcs, eval_dataset, processing_class, callbacks, peft_config,
             formatting_func, tools, environment_factory) = map(named.pop, _ARGUMENTS)
            variant = self._variant(named)
            self.stage = variant if args is None else trl_words.checked_stage(self._STAGE, variant, args)
            row = STAGES[self.stage]
            self._recipe = importlib.import_module(row.module)
            self.args, self.callbacks = args or TrlConfig(output_dir), list(callbacks or ())
            rows, eval_rows = (formatted(data, formatting_func, self.args) for data in (train_dataset, eval_dataset))
            self._saved = {}  # folder -> the object that is saved there before training
            check(formatting_func is None or "formatting_func" in self._ORDER,
                  f"formatting_func: {type(self).__name__} has none; give rows with the columns of the stage")
            models = {name: named.pop(name) for name in self._MODELS if name in named}
            faults = trl_words.faults(named, model)
            options = {name: value for name, value in named.items() if name not in trl_words.ARGUMENTS}
            meant = {}
            if args is not None:
                meant, refused = settings_of(args, rows, lambda: _positions(model))
                faults += refused
            values, tied = trl_words.lora_options(
                peft_config, args and (lambda: getattr(_configuration(model), "model_type", None)))
            trl_words.raise_all(faults + tied)
            folder = meant.pop("output_dir", None) or (settings or {}).get("output_dir")
            self.output_dir = str(output_dir or folder or f"outputs/{self.stage}")
            self._rows = {"data.sources": rows_of(rows), "data.eval_sources": rows_of(eval_rows, "eval_dataset")}
            self.functions, sources = rewards_of(reward_funcs, self._folder)
            acting = environments_of(tools, environment_factory, self.functions)
            if acting:  # what tools say is written by the chat template
                meant.pop("data.raw", None)
            chosen = dotted(self._recipe.Config, {**(settings or {}), **sources, **acting, **options})
            chosen = _merged(chosen, values, "peft_config") | self._inputs(models, model, processing_class, meant)
            if eval_dataset is not None or args is not None:
                chosen = {"data.eval_fraction": 0.0} | chosen
            self.config, _ = parse(self._recipe.Config, [*row.preset, *words(meant | chosen)],
                                   prog=f"--stage {self.stage}", unused=unread_options.of_stage(self.stage))
            self.output_dir = self.config.output_dir  # ~ written out
            trl_words.check_ending(self.args)
            check_trackers(self.config.report_to)
            self._processing_class = processing_class
            self._watcher = Callbacks(self.callbacks, self.args, processing_class, lambda: self.history)
        if args is not None:
            print_main(*trl_words.told(args, self.stage, self.config))
        self._tell_of_refusal()
        _tell_of_one_process()
        self.metrics: dict[str, float] = {}
        self._loaded: dict[str, object] = {}

    def _tell_of_refusal(self) -> None:
        """A line now about a run that train() will refuse; train(resume_from_checkpoint=False) may still follow."""
        try:
            with _one_line():
                runfile.finished(self.output_dir, self.stage, self.config, lambda _: None)
        except UserError as error:
            print_main(f"train() will be refused: {error}")

    def _inputs(self, models: Mapping, model: object, tokenizer: object, meant: Mapping) -> dict[str, object]:
        """The settings that name the folder, the models, the tokenizer and the rows."""
        further = {self._MODELS[name]: self._folder(each, name) for name, each in models.items() if each is not None}
        rows = {name: [rows.path(self.output_dir)] if isinstance(rows, Rows) else rows
                for name, rows in self._rows.items() if rows is not None}
        return {"output_dir": self.output_dir} | further | self._model(model, meant) | self._tokenizer(tokenizer) | rows

    def _placed(self, arguments: tuple, named: dict) -> dict:
        """Arguments by their names, also those given by position."""
        is_theirs = any(map(is_config, arguments)) or (len(arguments) > 1 and self._ORDER.startswith("model") and (
            arguments[1] is None or named["train_dataset"] is not None
            or (callable(arguments[1]) and "reward_funcs" in self._ORDER)))
        order = (self._ORDER if is_theirs else self._OURS).split()
        check(len(arguments) <= len(order), f"{type(self).__name__} takes {len(order)} arguments by position: "
                                            f"{', '.join(order)}; write the others by name")
        for name, value in zip(order, arguments, strict=False):
            check(value is None or named.get(name) is None, f"{name} is given by position and by name; leave one out")
            named[name] = named.get(name) if value is None else value
        return {"model": None} | named

    def _variant(self, named: dict) -> str:
        """The stage, or the variant of it that `_VARIANT` names."""
        wanted = named.pop(self._VARIANT, None) or self._STAGE
        if wanted in (self._STAGE, "sigmoid"):
            return self._STAGE
        module = STAGES[self._STAGE].module
        known = [stage for stage, row in STAGES.items() if row.module == module and stage not in ("ppo", self._STAGE)]
        check(wanted in known, f"{self._VARIANT} is {wanted!r}; choose {', '.join([self._STAGE, *known])}")
        return wanted

    def __init_subclass__(cls, **named: object) -> None:
        super().__init_subclass__(**named)
        if cls.__module__ != __name__:
            trl_words.check_overridden(cls, Training)

    def train(self, resume_from_checkpoint: bool | str | PurePath | None = None) -> dict[str, float]:
        """Train, or go on with an unfinished run of this folder; returns the final metrics. A run that finished with
        these settings is left as it is.

        resume_from_checkpoint: True for a run that must have something to go on from, False to begin again, or the
        path of a checkpoint of this run.
        """
        from hybrid_rlhf.core import failure
        from hybrid_rlhf.core.accelerator import keep_within_card
        from hybrid_rlhf.core.distributed import is_main, main_first, shutdown
        from hybrid_rlhf.report.notebook import stderr_in_cell
        from hybrid_rlhf.rewards.functions import handed_over

        failure.join()  # of several processes, those of torchrun or accelerate launch
        keep_within_card()
        with (_one_line(), stderr_in_cell(), lasting_streams(), handed_over(self.functions),
              watched_by(self._watcher)):
            config = self.config if resume_from_checkpoint is None else dataclasses.replace(
                self.config, resume=self._resume(resume_from_checkpoint))
            with main_first():
                self._write_inputs()
            self.metrics = FinalMetrics(self._recipe.run(config, command=f"from Python: stage {self.stage}"))
            if getattr(self.args, "push_to_hub", False) and is_main():
                self.push_to_hub()
        atexit.unregister(shutdown)
        atexit.register(shutdown)  # at exit: a second run in this process needs the group
        self._loaded = {}
        _free_memory()
        return self.metrics

    def _write_inputs(self) -> None:
        """Rows and models from memory, as files in the run's folder."""
        if int(os.environ.get("LOCAL_RANK", 0)):
            return
        for rows in self._rows.values():
            if isinstance(rows, Rows):
                rows.write(self.output_dir)
        for folder, item in self._saved.items():
            item.save_pretrained(folder)

    @property
    def processing_class(self) -> object:
        """The trained model's tokenizer, or before training the one that was given."""
        return self.tokenizer if self.metrics else self._processing_class

    def is_world_process_zero(self) -> bool:
        return rank() == 0

    def log_metrics(self, split: str, metrics: Mapping) -> None:
        """Print metrics, as transformers' trainer does."""
        print_main(f"***** {split} metrics *****", *(f"  {name} = {value}" for name, value in sorted(metrics.items())))

    def save_metrics(self, split: str, metrics: Mapping) -> None:
        """Write metrics to SPLIT_results.json in the run's folder."""
        if rank() == 0:
            write_file(Path(self.output_dir) / f"{split}_results.json", to_json(dict(metrics), indent=1) + "\n")

    def save_state(self) -> None:
        """The run's folder has its state already: metrics.jsonl, run.json and the checkpoints."""

    def create_model_card(self, *_: object, **__: object) -> None:
        """The model's folder has its card already."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"{type(self).__name__} has no {name}; there are train, evaluate, generate, save_model, "
                             "push_to_hub, model, tokenizer, state, history, metrics and args")

    def add_callback(self, callback: object) -> None:
        """One more transformers.TrainerCallback."""
        with _one_line():
            self.callbacks.append(callback)
            self._watcher = Callbacks(self.callbacks, self.args, self._processing_class, lambda: self.history)

    @property
    def state(self) -> object:
        """transformers' TrainerState, as far as it is known: global_step and log_history."""
        if not self._watcher.state.log_history:  # of a run that was finished before
            self._watcher.take(self.history)
        return self._watcher.state

    @property
    def accelerator(self) -> object:
        """accelerate's PartialState: is_main_process, print, wait_for_everyone."""
        from accelerate import PartialState

        from hybrid_rlhf.core.distributed import device

        return PartialState(cpu=device().type == "cpu")

    @property
    def history(self) -> list[dict]:
        """Every step's metrics as metrics.jsonl has them: {"step": 1, "loss": 2.5, ...}; an evaluation is a row of its
        own, names beginning with eval/. Empty before the first step."""
        from hybrid_rlhf.report.summary import METRICS, read_history

        path = Path(self.output_dir) / METRICS
        return read_history(path) if path.exists() else []

    def evaluate(self) -> dict[str, float]:
        """What the finished run measured on the held-out rows after its last step (with load_best_model_at_end, at the
        best one), names beginning with eval/; with args, as in TRL, eval_."""
        self._model_folder()
        metrics = runfile.read_run(self.output_dir).metrics
        with _one_line():
            check(any(name.startswith("eval/") for name in metrics),
                  f"{self.output_dir} has evaluated nothing; give eval_dataset, or eval_fraction=0.05 of the rows")
        name = self.config.train.save_best
        rows = [row for row in self.history if name in row]
        if getattr(self.args, "load_best_model_at_end", False) and rows:
            metrics = (min if name.endswith(SMALL_IS_GOOD) else max)(rows, key=lambda row: row[name])
        mark = "eval/" if type(self.args) is TrlConfig else "eval_"
        return FinalMetrics({name.replace("eval/", mark): value for name, value in metrics.items()
                             if name.startswith("eval/")})

    def save_model(self, output_dir: str | PurePath | None = None) -> str:
        """The trained model and its tokenizer in a new folder, as `hybrid-rlhf export` writes it, or where they are
        already; returns the folder. The run's own folder gets a copy of its model/, as TRL's scripts expect."""
        if output_dir is None:
            return self._model_folder()
        if Path(output_dir).absolute() == Path(self.output_dir).absolute():
            for file in Path(self._model_folder()).iterdir() if rank() == 0 else ():
                shutil.copy2(file, Path(output_dir) / file.name)
            return str(output_dir)
        from hybrid_rlhf.commands import export

        self._model_folder()
        with _one_line(), lasting_streams():
            export.export(export.parse(["--model", self.output_dir, "--output_dir", str(output_dir)]))
        return str(output_dir)

    def push_to_hub(self, repo_id: str | None = None, private: bool | None = None, dataset_name: object = None) -> str:
        """Upload the trained model, its tokenizer and its card; returns the address. Needs a login. repo_id: by default
        hub_model_id of args, else the name of the run's folder; private: by default so, unless args say otherwise.
        dataset_name is not used: the card names the data."""
        from hybrid_rlhf.commands import export

        folder = self._model_folder()
        repo_id = repo_id or getattr(self.args, "hub_model_id", None) or Path(self.output_dir).name
        private = getattr(self.args, "hub_private_repo", None) is not False if private is None else private
        with _one_line():
            return export.push(Path(folder), repo_id, is_public=not private)

    @property
    def model(self):  # noqa: ANN201 - a transformers class
        """The trained model, in evaluation mode: a plain transformers model, of one score for a reward model."""
        from hybrid_rlhf.core.distributed import device
        from hybrid_rlhf.models import load

        def read():  # noqa: ANN202
            opened = load.load_scalar_model if self.stage == "reward" else load.load_causal_lm
            config = self.config.model
            return opened(load.ModelConfig(self._model_folder(), dtype=config.dtype,
                                           trust_remote_code=config.trust_remote_code), device()).eval()

        return self._once("model", read)

    @property
    def tokenizer(self):  # noqa: ANN201 - a transformers class
        """The trained model's tokenizer, with the chat template that it was trained with."""
        from hybrid_rlhf.models.tokenizer import load_tokenizer

        return self._once("tokenizer", lambda: load_tokenizer(self._model_folder()))

    def generate(self, prompt: str | list, max_new_tokens: int = 256, temperature: float = 0.0, seed: int = 0,
                 **sampling: object) -> str | list[str]:
        """The trained model's answer to a prompt: text or a list of messages; a list of prompts has a list of answers.

        Text is asked as the data was rendered: as a user's turn where the tokenizer has a chat template, unless
        data.raw. temperature 0 is greedy; sampling: top_p, top_k and what else SamplingConfig has.
        """
        from hybrid_rlhf.engine import HybridEngine, SamplingConfig
        from hybrid_rlhf.models.load import max_positions
        from hybrid_rlhf.models.tokenizer import completion_text

        with _one_line():
            check(self.stage != "reward", "a reward model scores and answers nothing; use .model and .tokenizer")
            prompts = prompt if isinstance(prompt, list) and not _is_messages(prompt) else [prompt]
            known = [f.name for f in dataclasses.fields(SamplingConfig) if f.name != "num_samples"]
            for name in sampling:
                check(name in known, f"generate: unknown option {name}{nearest(name, known)}; there are "
                                     f"{', '.join(known)}")
            ids = [self._ids(each) for each in prompts]
            room = max_positions(self.model)
            limits = [max_new_tokens if room is None else min(max_new_tokens, max(1, room - len(i))) for i in ids]
            engine = self._once("engine", lambda: HybridEngine.for_inference(self.model, self.tokenizer))
            with engine.inference():
                drawn = engine.generate(ids, SamplingConfig(max_new_tokens, temperature=temperature, **sampling), seed,
                                        limits=limits)
            texts = [completion_text(self.tokenizer, row, reason == "eos")
                     for row, reason in zip(drawn.tokens, drawn.finish_reasons, strict=True)]
        return texts if prompts is prompt else texts[0]

    def _ids(self, prompt: str | list) -> list[int]:
        from hybrid_rlhf.data import chat

        check(isinstance(prompt, str) or (isinstance(prompt, list) and _is_messages(prompt)),
              f"generate: {prompt!r:.60} is not a prompt; give text, or a list of messages with role and content")
        check(isinstance(prompt, str) or all(isinstance(turn.get("content") or "", str) for turn in prompt),
              "generate: the content of a message is text here; a picture is shown to the model by chat or server")
        try:
            return chat.encode_prompt(self.tokenizer, chat.as_turn(self.tokenizer, prompt, self.config.data.raw))
        except (chat.SkipRow, KeyError) as error:
            raise UserError(f"generate: {error}; give messages with role and content") from error

    def __repr__(self) -> str:
        return f"<stage {self.stage} in {self.output_dir}: {'trained' if self.metrics else 'not trained here yet'}>"

    def _model(self, model: object, meant: Mapping) -> dict[str, str]:
        """The settings that name the model to start from. One from memory keeps its dtype, unless args say another."""
        if model is None:
            return {}
        from hybrid_rlhf.training.builders import model_folder

        path = self._folder(model, "model")
        named = {"model.model_name_or_path": model_folder(path) if self.stage in ("sft", "conditional_sft") else path}
        if path in self._saved and "model.dtype" not in meant:
            named["model.dtype"] = str(model.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
        return named

    def _tokenizer(self, tokenizer: object) -> dict[str, str]:
        if tokenizer is None:
            return {}
        check(hasattr(tokenizer, "save_pretrained"),
              f"processing_class is a {type(tokenizer).__name__}; give a tokenizer")
        for item in self._saved.values() if hasattr(tokenizer, "image_processor") else ():
            item.processor = tokenizer  # of models from memory, whose folder says how they read images
        folder = self._kept("tokenizer")
        self._saved[folder] = tokenizer
        return {"model.tokenizer_name_or_path": folder}

    def _folder(self, source: object, name: str = "reward_funcs") -> str:
        """The path of a model: given as such, an earlier training's, or where a model from memory will be saved."""
        if isinstance(source, Training):
            return source.output_dir
        if isinstance(source, (str, PurePath)):
            return expanded(str(source))
        check(hasattr(source, "save_pretrained") and hasattr(source, "config"),
              f"{name} is a {type(source).__name__}; give a hub id, a folder, an earlier training or a transformers "
              "model")
        check(not hasattr(source, "peft_config"), f"{name} has an adapter of peft; give the model below it, and "
                                                  "peft_config, or merge it first (merge_and_unload)")
        folder = self._kept(name if name == "model" else f"{name}-{len(self._saved)}")
        self._saved[folder] = _WithTokenizer(source)
        return folder

    def _kept(self, name: str) -> str:
        """The folder of an input from memory."""
        return str(Path(self.output_dir) / runfile.ROWS_FOLDER / name)

    def _resume(self, wanted: bool | str | PurePath) -> str:
        """The setting that TRL's resume_from_checkpoint means."""
        from hybrid_rlhf.run import resume

        if not isinstance(wanted, bool):
            return str(wanted)
        folder = Path(self.output_dir)
        record = runfile.run_at(folder) if wanted else None
        check(not wanted or (record and (record.is_finished or resume.find(folder, "auto"))),
            f"resume_from_checkpoint: {folder} holds no checkpoint to go on from; leave it out to begin there")
        return "auto" if wanted else "never"

    def _model_folder(self) -> str:
        from hybrid_rlhf.training.builders import model_folder

        with _one_line():
            check(runfile.is_run(self.output_dir),
                  f"{self.output_dir} holds no model yet; call train() first")
            runfile.require_finished(self.output_dir, self.config.stage)
            return model_folder(self.output_dir)

    def _once(self, name: str, read: Callable[[], object]) -> object:
        if name not in self._loaded:
            with _one_line():
                self._loaded[name] = read()
        return self._loaded[name]


class FinalMetrics(dict):
    """The metrics of a finished run by name. IPython, which shows what a cell ends with, shows a line of them."""

    _FIRST = ("reward", "loss", "accuracy", "mean_token_accuracy", "rewards/accuracies", "kl")

    @property
    def metrics(self) -> dict:
        return self

    @property
    def training_loss(self) -> float | None:
        return self.get("loss")

    def _repr_pretty_(self, printer, _is_circle: bool) -> None:  # noqa: ANN001 - IPython's
        names = [name for first in self._FIRST for name in (first, f"eval/{first}") if name in self]
        shown = [f"{name} {self[name]:.4g}" for name in names if self[name] is not None]
        printer.text(f"{len(self)} metrics" + (f", of which {', '.join(shown)}" if shown else ""))


def _merged(options: dict, more: dict, name: str) -> dict:
    """`options` and those that the argument `name` stands for; UserError where both set the same."""
    both = sorted(options.keys() & more.keys())
    check(not both, f"{name} and {', '.join(both)} are both given; leave one of them out")
    return options | more


@contextmanager
def _one_line():  # noqa: ANN202
    """Re-raise a UserError without the frames inside: its message is what the user needs."""
    try:
        yield
    except UserError as error:
        bare = UserError(str(error).replace("give --resume never", "call train(resume_from_checkpoint=False)"))
        for note in getattr(error, "__notes__", []):
            bare.add_note(note)
        raise bare from None


def _free_memory() -> None:
    """Collect the reference cycles of training, which Python frees late: the model is loaded again beside them."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _WithTokenizer:
    """A model from memory, saved with its processor, or the tokenizer of the place that it was loaded from."""

    def __init__(self, model: object) -> None:
        self._model, self.processor = model, None

    def save_pretrained(self, folder: str) -> None:
        from transformers import AutoTokenizer

        from hybrid_rlhf.models.processor_compat import load_processor

        self._model.save_pretrained(folder)  # type: ignore[attr-defined]
        if self.processor is not None:
            self.processor.save_pretrained(folder)
        elif name := getattr(self._model.config, "_name_or_path", ""):  # type: ignore[attr-defined]
            beside = None
            with suppress(UserError):  # without it rows with images are dropped, which is said
                beside = load_processor(name)
            with suppress(OSError, ValueError):  # it has none: processing_class, or the error that none is there
                (beside or AutoTokenizer.from_pretrained(name)).save_pretrained(folder)


@cache
def _tell_of_one_process() -> None:
    if "ACCELERATE_MIXED_PRECISION" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        print_main("accelerate launch made one process; --num_processes 2 makes two")


def _positions(model: object) -> int | None:
    from hybrid_rlhf.models.load import positions_of

    settings = _configuration(model)
    return None if settings is None else positions_of(settings)


def _configuration(model: object):  # noqa: ANN202 - a transformers class
    """The model's configuration; None where it cannot be read, which is told where it is opened."""
    from hybrid_rlhf.models.load import ModelConfig, configuration
    from hybrid_rlhf.training.builders import model_folder

    if hasattr(model, "config") and hasattr(model, "save_pretrained"):
        return model.config
    path = model.output_dir if isinstance(model, Training) else str(model)
    try:
        return configuration(ModelConfig(model_folder(path)))
    except UserError:
        return None


def _is_messages(prompt: list) -> bool:
    return bool(prompt) and all(isinstance(turn, Mapping) for turn in prompt)


_DATA = "data_collator train_dataset eval_dataset processing_class"
_METRICS = "compute_metrics callbacks optimizers"
_PAIRED = f"model ref_model args {_DATA} {_METRICS} quantization_config peft_config"
_SAMPLED = ("model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks "
            "optimizers quantization_config peft_config")
_LATE = "optimizer_cls_and_kwargs preprocess_logits_for_metrics quantization_config peft_config"


class SFTTrainer(Training):
    """Supervised fine-tuning on demonstrations: --stage sft."""

    _STAGE, _ORDER = "sft", f"model args {_DATA} compute_loss_func {_METRICS} {_LATE} formatting_func"


class RewardTrainer(Training):
    """A reward model from preference pairs: --stage reward."""

    _STAGE, _ORDER = "reward", f"model args {_DATA} {_METRICS} {_LATE}"


class DPOTrainer(Training):
    """Direct preference optimisation on pairs: --stage dpo; loss_type: ipo, hinge, kto, orpo or simpo."""

    _STAGE, _ORDER, _VARIANT = "dpo", _PAIRED, "loss_type"


class KTOTrainer(Training):
    """KTO, on answers labelled good or bad: --stage kto."""

    _STAGE, _ORDER = "kto", _PAIRED


class GRPOTrainer(Training):
    """On-policy training without a critic: --stage grpo; method: dr_grpo, batch_grpo, gdpo, process_grpo, rloo,
    reinforce_pp, reinforce_pp_baseline, gspo or cispo."""

    _STAGE, _ORDER, _VARIANT = "grpo", f"{_SAMPLED} tools rollout_func environment_factory", "method"
    _OURS = "model train_dataset reward_funcs"


class RLOOTrainer(Training):
    """REINFORCE leave-one-out: --stage rloo."""

    _STAGE, _ORDER, _OURS = "rloo", _SAMPLED, GRPOTrainer._OURS


class PPOTrainer(Training):
    """PPO with a critic, against a reward model, functions, or both: --stage ppo. reward_model, value_model, ref_model:
    as TRL's trainer has them."""

    _STAGE, _OURS = "ppo", GRPOTrainer._OURS
    _ORDER = ("args processing_class model ref_model reward_model train_dataset value_model data_collator eval_dataset "
             "optimizers callbacks peft_config")  # TRL 0.24
    _MODELS: ClassVar = {"reward_model": "roles.reward.model_name_or_path",
                        "value_model": "roles.critic.model_name_or_path", "ref_model": "roles.ref.model_name_or_path"}


class DistillTrainer(Training):
    """On-policy distillation (TRL's GKDTrainer and DistillationTrainer): --stage distill. teacher_model: of the same
    tokens. reward_funcs score the samples, for the report alone."""

    _STAGE, _OURS = "distill", "model teacher_model train_dataset reward_funcs"
    _ORDER = f"model teacher_model args {_DATA} {_METRICS} preprocess_logits_for_metrics peft_config formatting_func"
    _MODELS: ClassVar = {"teacher_model": "roles.teacher.model_name_or_path"}


GKDTrainer = DistillTrainer
