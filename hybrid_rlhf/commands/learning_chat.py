"""hybrid-rlhf chat: the chat of inference/chat, and with --learn a model that learns from the user's marks."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hybrid_rlhf.inference.chat import repl

if TYPE_CHECKING:
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.inference.chat.session import Command
    from hybrid_rlhf.inference.conversation import Conversation

parse = repl.parse  # the flags


def main(argv: list[str] | None = None) -> int:
    """The entry point: returns the exit code of the chat. A learner's folder is released at its end."""
    with ExitStack() as stack:

        def open_learner(model: str, output: str, sampling: SamplingConfig, seed: int,
                         system: str | None) -> tuple[Conversation, dict[str, Command]]:
            # imports torch: only after the flags are checked
            from hybrid_rlhf.inference.conversation import Conversation, check_can_chat
            from hybrid_rlhf.inference.named_models import model_folder
            from hybrid_rlhf.inference.teaching import commands_of
            from hybrid_rlhf.models.load import max_positions
            from hybrid_rlhf.training.live import LiveLearner

            check_can_chat(str(model_folder(model)))
            words = sys.argv[1:] if argv is None else ["chat", *argv]
            learner = LiveLearner(model, output, seed, shlex.join(["hybrid-rlhf", *words]))
            stack.callback(learner.close)
            if learner.marks:
                print(f"goes on after mark {len(learner.marks)} in {output} (/marks lists them)")
            conversation = Conversation(learner.engine, learner.tokenizer, sampling, seed=seed, system=system,
                                        max_positions=max_positions(learner.engine.model))
            return conversation, commands_of(learner)

        return repl.main(argv, open_learner)
