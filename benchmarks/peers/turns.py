"""A Hugging Face Trainer whose optimizer steps are taken one at a time, in turns with ours."""

from __future__ import annotations

import atexit
import os
import threading

import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


class Turns:
    """step() lets `trainer` do its next optimizer step and waits for its end.

    Its own loop runs, unchanged, in a thread that waits between steps. Raises SystemExit where a process group exists:
    the trainer would wrap its model for several processes.
    """

    def __init__(self, trainer) -> None:  # noqa: ANN001
        if trainer.accelerator.num_processes != 1 or torch.distributed.is_initialized():
            raise SystemExit("TRL must be set up before a process group exists: it would wrap the model for it")
        self.trainer = trainer
        trainer.add_callback(self._waiting())
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._is_ready = threading.Event()
        self._error: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self._is_ready.wait()  # its setting up reads accelerate's state, which ours changes
        atexit.register(self.stop)  # a thread that is inside torch when the interpreter ends aborts the process

    def step(self) -> None:
        self._go.release()
        self._done.acquire()
        if self._error:
            raise self._error

    def stop(self) -> None:
        """End the trainer's loop before its next step."""
        self._is_over = True
        self._go.release()
        self._thread.join()

    def _train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:
            self._error = error
        self._is_ready.set()
        self._done.release()

    def _waiting(self):  # noqa: ANN202
        from transformers import TrainerCallback

        turns = self

        class Waiting(TrainerCallback):
            def on_step_begin(self, *_given: object, **_named: object) -> None:
                turns._is_ready.set()
                turns._go.acquire()
                if turns._is_over:
                    raise SystemExit

            def on_step_end(self, *_given: object, **_named: object) -> None:
                turns._done.release()

        return Waiting()
