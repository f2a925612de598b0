"""hybrid-rlhf chat: the chat of inference/chat, and with --learn a model that learns from the user's marks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hybrid_rlhf.inference.chat import repl

if TYPE_CHECKING:
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.inference.conversation import Conversation
    from hybrid_rlhf.inference.teaching import Learning

parse = repl.parse  # the flags


def main(argv: list[str] | None = None) -> int:
    """The entry point: returns the exit code of the chat."""
    return with_learner("chat", repl.main, argv)


def with_learner(command: str, run: Callable[..., int], argv: list[str] | None) -> int:
    """The exit code of run(argv, open_learner), the command `command`. A learner's folder is released at its end."""
    with ExitStack() as stack:

        def open_learner(model: str, output: str, sampling: SamplingConfig | None = None, seed: int = 0,
                         system: str | None = None) -> tuple[Conversation, Learning]:
            # imports torch: only after the flags are checked
            from hybrid_rlhf.engine.decode.sampling import SamplingConfig
            from hybrid_rlhf.inference.conversation import Conversation, check_can_chat
            from hybrid_rlhf.inference.named_models import model_folder
            from hybrid_rlhf.models.load import max_positions
            from hybrid_rlhf.training.live import LiveLearner

            check_can_chat(str(model_folder(model)))
            words = sys.argv[1:] if argv is None else [command, *argv]
            key = "--api_key"  # run.json keeps the line, and this not
            words = [f"{key}=..." if word.startswith(f"{key}=") else "..." if before == key else word
                     for before, word in zip(["", *words], words, strict=False)]
            learner = LiveLearner(model, output, seed, shlex.join(["hybrid-rlhf", *words]))
            stack.callback(learner.close)
            if learner.marks:
                way = " (/marks lists them)" if command == "chat" else ""
                print(f"goes on after mark {len(learner.marks)} in {output}{way}", file=sys.stderr)
            return Conversation(learner.engine, learner.tokenizer, sampling or SamplingConfig(), seed=seed,
                                system=system, max_positions=max_positions(learner.engine.model)), learner

        return run(argv, open_learner)
