"""transformers' TrainerCallback objects as a watcher of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import rank
from hybrid_rlhf.run.checkpointing import SMALL_IS_GOOD
from hybrid_rlhf.run.reporter import Asked

_NEVER = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_prediction_step", "on_predict",
          "on_push_begin")


class Callbacks:
    """Calls each callback as transformers does: on_train_begin and _end, on_epoch_begin and _end, on_step_begin and
    _end, on_log, on_evaluate, on_save, with args, state, control, model and processing_class. A control of
    should_training_stop, should_save or should_evaluate is followed after the step, or the evaluation. Metrics are
    those of metrics.jsonl by TRL's names, eval/loss as eval_loss; steps are the run's, of which each may be several
    updates.

    history: gives the rows of metrics.jsonl of an earlier part of the run. Raises UserError for what is not a callback,
    and for one that waits for an event that does not come.
    """

    def __init__(self, callbacks: Sequence, args: object, tokenizer: object, history: Callable[[], list[dict]]) -> None:
        from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

        made = [each() if isinstance(each, type) else each for each in callbacks]
        for each in made:
            check(isinstance(each, TrainerCallback),
                  f"callbacks: {each!r:.60} is not a transformers.TrainerCallback; give one, or its class")
            for name in _NEVER:
                check(getattr(type(each), name) is getattr(TrainerCallback, name),
                      f"callbacks: {type(each).__name__}.{name} would never be called; use on_step_end")
        if getattr(args, "load_best_model_at_end", False) and args.metric_for_best_model is None:
            vars(args)["metric_for_best_model"] = "loss"  # as transformers does
        self._callbacks, self._args, self._tokenizer, self._model = made, args, tokenizer, None
        self._history = history
        self.state, self.control, self._epochs = TrainerState(), TrainerControl(), 0
        self.state.is_world_process_zero = self.state.is_local_process_zero = rank() == 0

    def __call__(self, event: str, facts: dict) -> Asked:
        state = self.state
        state.global_step = facts["step"] - (event == "step_begin")
        state.epoch = facts.get("values", {}).get("epoch", state.epoch)
        values = _named(facts.get("values", {}), state.epoch)
        if event == "begin":
            state.max_steps, self._model = facts["total_steps"], _model_of(facts["trainer"])
            state.num_train_epochs = getattr(self._args, "num_train_epochs", 0)
            self.take([row for row in self._history() if row["step"] <= facts["step"]])
            self._call("on_train_begin")
            self._call("on_epoch_begin")
        elif event == "end":
            self._call("on_epoch_end")
            self._call("on_train_end")
            self._model = None
        elif event == "log":
            state.log_history.append({**values, "step": facts["step"]})
            self._call("on_log", logs=values)
        elif event == "evaluate":
            self._call("on_evaluate", metrics={name: value for name, value in values.items() if name[:5] == "eval_"})
            self._note_best(values)
        else:
            self._call(f"on_{event}")
            if event == "step_end" and int(state.epoch or 0) > self._epochs and state.global_step < state.max_steps:
                self._epochs = int(state.epoch)
                self._call("on_epoch_end")
                self._call("on_epoch_begin")
        control = self.control
        asked = Asked(control.should_training_stop, control.should_save, control.should_evaluate,
                      getattr(self._args, "load_best_model_at_end", False))
        if event in ("step_end", "evaluate"):  # after others nothing reads what they ask for
            control.should_save = control.should_evaluate = False
        return asked

    def take(self, rows: list[dict]) -> None:
        """The state of a run with this history."""
        self.state.log_history = []
        for row in rows:
            self.state.global_step, self.state.epoch = row["step"], row.get("epoch", self.state.epoch)
            self.state.log_history.append(_named(row, self.state.epoch))
            self._note_best(self.state.log_history[-1])
        self._epochs = int(self.state.epoch or 0)

    def _call(self, name: str, **facts: object) -> None:
        for each in self._callbacks:
            self.control = getattr(each, name)(self._args, self.state, self.control, model=self._model,
                                               processing_class=self._tokenizer, **facts) or self.control

    def _note_best(self, values: dict) -> None:
        """Keep the best value of metric_for_best_model, by which EarlyStoppingCallback goes."""
        metric = getattr(self._args, "metric_for_best_model", None) or "loss"
        value, best = values.get(f"eval_{metric.removeprefix('eval_')}"), self.state.best_metric
        is_better = value is not None and (best is None or (
            value < best if metric.endswith(SMALL_IS_GOOD) else value > best))
        if is_better:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step


def _named(values: dict, epoch: float | None) -> dict:
    """Metrics by TRL's names."""
    named = {name.replace("eval/", "eval_"): value for name, value in values.items()} | {"epoch": epoch}
    return named | {"step_time": values["time/step"]} if "reward" in values else named


def _model_of(trainer: object) -> object:
    """The module that a stage's trainer trains."""
    role = getattr(trainer, "policy", None) or getattr(trainer, "reward", None)
    role = role or trainer.roles.actor  # type: ignore[attr-defined]
    return role.engine.module
