"""The stages from Python: a model, data and a few settings in; metrics, the model and its tokenizer out.

A thin layer over the recipes that `train.py --stage` runs, with the same folder, report, checkpoints and errors.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath

from hybrid_rlhf import trl_words
from hybrid_rlhf.api_inputs import Rows, dotted, environments_of, rewards_of, rows_of, words
from hybrid_rlhf.core.config import UserError, check, nearest, parse
from hybrid_rlhf.core.lasting_streams import lasting_streams
from hybrid_rlhf.core.memory import bound_product_caches, grow_segments
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.core.startup import quiet_libraries
from hybrid_rlhf.training import unread_options
from hybrid_rlhf.training.registry import STAGES
from hybrid_rlhf.trl_words import lora_options

Reward = Callable | str | PurePath | list


class Training:
    """One run of a stage. Inputs are checked here, before anything is loaded.

    model: a hub id, a folder, a run's folder, or an earlier Training. train_dataset: a path or a list of paths, a
    datasets.Dataset, or any other iterable of rows (mappings). reward_funcs: one or a list of Python functions as TRL
    calls them, path.py:name, builtin:name, or the folder of a reward model. tools: functions that the model may call;
    environment_factory: a class, or a mapping of names to classes, as TRL takes them. settings: a mapping of the
    stage's options; options: more of them by name, learning_rate=1e-5 as well as train__learning_rate=1e-5.
    eval_dataset: rows that are only evaluated, given as train_dataset is; nothing of that is held out then, unless
    eval_fraction says so. peft_config: a peft.LoraConfig.
    """

    def __init__(self, stage: str, model: object = None, train_dataset: object = None, reward_funcs: object = None,
                 output_dir: str | PurePath | None = None, settings: Mapping | None = None,
                 options: Mapping | None = None, tools: object = None, environment_factory: object = None,
                 eval_dataset: object = None, peft_config: object = None) -> None:
        quiet_libraries()
        grow_segments()  # works only before anything is on the card
        bound_product_caches()  # and before the first product
        with _one_line():
            check(int(os.environ.get("WORLD_SIZE", 1)) == 1,
                  "a run in several processes needs its functions by name in each; use train.py --stage under torchrun")
            trl_words.refuse(options or ())
            self.stage, row = stage, STAGES[stage]
            self._recipe = importlib.import_module(row.module)
            self.functions, sources = rewards_of(reward_funcs, _folder)
            callables, acting = environments_of(tools, environment_factory, self.functions)
            self.functions |= callables
            values = dotted(self._recipe.Config, {**(settings or {}), **sources, **acting, **(options or {})})
            folder = values.get("output_dir") if output_dir is None else str(output_dir)
            self.output_dir = folder or f"outputs/{stage}"
            self._rows = {"data.sources": rows_of(train_dataset),
                          "data.eval_sources": rows_of(eval_dataset, "eval_dataset")}
            if eval_dataset is not None:
                values = {"data.eval_fraction": 0.0} | values
            values = _merged(values, lora_options(peft_config), "peft_config")
            values |= {"output_dir": self.output_dir} | self._model(model) | self._data()
            self.config, _ = parse(self._recipe.Config, [*row.preset, *words(values)], prog=f"--stage {stage}",
                                   unused=unread_options.of_stage(stage))
            self.output_dir = self.config.output_dir  # ~ written out
        self.metrics: dict[str, float] = {}
        self._loaded: dict[str, object] = {}

    def train(self, resume_from_checkpoint: bool | str | PurePath | None = None) -> dict[str, float]:
        """Train, or go on with an unfinished run of this folder; returns the final metrics. A run that finished with
        these settings is left as it is.

        resume_from_checkpoint: True for a run that must have something to go on from, False to begin again, or the
        path of a checkpoint of this run.
        """
        from hybrid_rlhf.core.accelerator import keep_within_card
        from hybrid_rlhf.report.notebook import stderr_in_cell
        from hybrid_rlhf.rewards.functions import handed_over

        keep_within_card()
        with _one_line(), stderr_in_cell(), lasting_streams(), handed_over(self.functions):
            config = self.config if resume_from_checkpoint is None else dataclasses.replace(
                self.config, resume=self._resume(resume_from_checkpoint))
            for rows in self._rows.values():
                if isinstance(rows, Rows):
                    rows.write(self.output_dir)
            self.metrics = FinalMetrics(self._recipe.run(config, command=f"from Python: stage {self.stage}"))
        self._loaded = {}
        _free_memory()
        return self.metrics

    @property
    def history(self) -> list[dict]:
        """Every step's metrics as metrics.jsonl has them: {"step": 1, "loss": 2.5, ...}; an evaluation is a row of its
        own, names beginning with eval/. Empty before the first step."""
        from hybrid_rlhf.report.summary import METRICS, read_history

        path = Path(self.output_dir) / METRICS
        return read_history(path) if path.exists() else []

    def evaluate(self) -> dict[str, float]:
        """What the finished run measured on the held-out rows after its last step, names beginning with eval/."""
        from hybrid_rlhf.run import runfile

        self._model_folder()
        metrics = runfile.read_run(self.output_dir).metrics
        with _one_line():
            check(any(name.startswith("eval/") for name in metrics),
                  f"{self.output_dir} has evaluated nothing; give eval_dataset, or eval_fraction=0.05 of the rows")
        return FinalMetrics({name: value for name, value in metrics.items() if name.startswith("eval/")})

    def save_model(self, output_dir: str | PurePath | None = None) -> str:
        """The trained model and its tokenizer in a new folder, as `hybrid-rlhf export` writes it, or where they are
        already; returns the folder."""
        if output_dir is None:
            return self._model_folder()
        from hybrid_rlhf.commands import export

        self._model_folder()
        with _one_line(), lasting_streams():
            export.export(export.parse(["--model", self.output_dir, "--output_dir", str(output_dir)]))
        return str(output_dir)

    def push_to_hub(self, repo_id: str, private: bool = True) -> str:
        """Upload the trained model, its tokenizer and its card; returns the address. Needs a login."""
        from hybrid_rlhf.commands import export

        folder = self._model_folder()
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
        try:
            return chat.encode_prompt(self.tokenizer, chat.as_turn(self.tokenizer, prompt, self.config.data.raw))
        except (chat.SkipRow, KeyError) as error:
            raise UserError(f"generate: {error}; give messages with role and content") from error

    def __repr__(self) -> str:
        return f"<stage {self.stage} in {self.output_dir}: {'trained' if self.metrics else 'not trained here yet'}>"

    def _model(self, model: object) -> dict[str, str]:
        """The settings that name the model to start from."""
        if model is None:
            return {}
        from hybrid_rlhf.training.builders import model_folder

        path = _path_of(model, "model")
        return {"model.model_name_or_path": model_folder(path) if self.stage in ("sft", "conditional_sft") else path}

    def _data(self) -> dict[str, object]:
        return {name: [rows.path(self.output_dir)] if isinstance(rows, Rows) else rows
                for name, rows in self._rows.items() if rows is not None}

    def _resume(self, wanted: bool | str | PurePath) -> str:
        """The setting that TRL's resume_from_checkpoint means."""
        from hybrid_rlhf.run import resume, runfile

        if not isinstance(wanted, bool):
            return str(wanted)
        folder = Path(self.output_dir)
        record = runfile.run_at(folder) if wanted else None
        check(not wanted or (record and (record.is_finished or resume.find(folder, "auto"))),
            f"resume_from_checkpoint: {folder} holds no checkpoint to go on from; leave it out to begin there")
        return "auto" if wanted else "never"

    def _model_folder(self) -> str:
        from hybrid_rlhf.run import runfile
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
        bare = UserError(str(error))
        for note in getattr(error, "__notes__", []):
            bare.add_note(note)
        raise bare from None


def _free_memory() -> None:
    """Collect the reference cycles of training, which Python frees late: the model is loaded again beside them."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _folder(source: object) -> str:
    return source.output_dir if isinstance(source, Training) else expanded(str(source))


def _path_of(model: object, name: str) -> str:
    check(isinstance(model, (str, PurePath, Training)),
          f"{name} is a {type(model).__name__}; give a hub id, a folder or an earlier training (save_pretrained "
          "makes a folder)")
    return _folder(model)


def _is_messages(prompt: list) -> bool:
    return bool(prompt) and all(isinstance(turn, Mapping) for turn in prompt)


def SFTTrainer(model: object, train_dataset: object = None, *, eval_dataset: object = None,  # noqa: N802
               peft_config: object = None, output_dir: str | None = None, settings: Mapping | None = None,
               **options: object) -> Training:
    """Supervised fine-tuning on demonstrations: --stage sft."""
    return Training("sft", model, train_dataset, None, output_dir, settings, options, eval_dataset=eval_dataset,
                    peft_config=peft_config)


def RewardTrainer(model: object = None, train_dataset: object = None, *, eval_dataset: object = None,  # noqa: N802
                  peft_config: object = None, output_dir: str | None = None, settings: Mapping | None = None,
                  **options: object) -> Training:
    """A reward model from preference pairs: --stage reward."""
    return Training("reward", model, train_dataset, None, output_dir, settings, options, eval_dataset=eval_dataset,
                    peft_config=peft_config)


def DPOTrainer(model: object = None, train_dataset: object = None, *, loss_type: str | None = None,  # noqa: N802
               eval_dataset: object = None, peft_config: object = None, output_dir: str | None = None,
               settings: Mapping | None = None, **options: object) -> Training:
    """Direct preference optimisation on pairs: --stage dpo; loss_type: ipo, hinge, kto, orpo or simpo."""
    return Training(_variant(loss_type, "dpo", "loss_type", ("sigmoid",)), model, train_dataset, None, output_dir,
                    settings, options, eval_dataset=eval_dataset, peft_config=peft_config)


def KTOTrainer(model: object = None, train_dataset: object = None, **options: object) -> Training:  # noqa: N802
    """KTO, on answers labelled good or bad: DPOTrainer with loss_type kto."""
    return DPOTrainer(model, train_dataset, loss_type="kto", **options)  # type: ignore[arg-type]


def GRPOTrainer(model: object = None, train_dataset: object = None, reward_funcs: Reward | None = None,  # noqa: N802
                *, method: str | None = None, eval_dataset: object = None, peft_config: object = None,
                tools: object = None, environment_factory: object = None, output_dir: str | None = None,
                settings: Mapping | None = None, **options: object) -> Training:
    """On-policy training without a critic: --stage grpo; method: dr_grpo, batch_grpo, gdpo, process_grpo, rloo,
    reinforce_pp, reinforce_pp_baseline, gspo or cispo."""
    return Training(_variant(method, "grpo", "method", ()), model, train_dataset, reward_funcs, output_dir, settings,
                    options, tools, environment_factory, eval_dataset, peft_config)


def RLOOTrainer(model: object = None, train_dataset: object = None, reward_funcs: Reward | None = None,  # noqa: N802
                **options: object) -> Training:
    """REINFORCE leave-one-out: GRPOTrainer with method rloo."""
    return GRPOTrainer(model, train_dataset, reward_funcs, method="rloo", **options)  # type: ignore[arg-type]


def PPOTrainer(model: object = None, train_dataset: object = None, reward_funcs: Reward | None = None,  # noqa: N802
               *, eval_dataset: object = None, peft_config: object = None, tools: object = None,
               environment_factory: object = None, output_dir: str | None = None,
               settings: Mapping | None = None, **options: object) -> Training:
    """PPO with a critic, against a reward model, functions, or both: --stage ppo."""
    return Training("ppo", model, train_dataset, reward_funcs, output_dir, settings, options, tools,
                    environment_factory, eval_dataset, peft_config)


def DistillTrainer(model: object = None, teacher_model: object = None, train_dataset: object = None,  # noqa: N802
                   reward_funcs: Reward | None = None, *, eval_dataset: object = None, peft_config: object = None,
                   tools: object = None, environment_factory: object = None, output_dir: str | None = None,
                   settings: Mapping | None = None, **options: object) -> Training:
    """On-policy distillation (TRL's DistillationTrainer): --stage distill. teacher_model: given as `model` is, and of
    the same tokens. reward_funcs score the samples, for the report alone."""
    named = {}
    if teacher_model is not None:
        with _one_line():
            named["roles.teacher.model_name_or_path"] = _path_of(teacher_model, "teacher_model")
    return Training("distill", model, train_dataset, reward_funcs, output_dir, {**(settings or {}), **named}, options,
                    tools, environment_factory, eval_dataset, peft_config)


def _variant(wanted: str | None, usual: str, name: str, same: tuple[str, ...]) -> str:
    """The stage of a variant's name."""
    if wanted in (None, usual, *same):
        return usual
    module = STAGES[usual].module
    known = [stage for stage, row in STAGES.items() if row.module == module and stage not in ("ppo", usual)]
    with _one_line():
        check(wanted in known, f"{name} is {wanted!r}; choose {', '.join([usual, *known])}")
    return wanted
