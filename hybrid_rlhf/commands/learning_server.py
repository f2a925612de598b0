"""hybrid-rlhf serve: the server of inference/server, and with --learn a model that learns from marks on its answers."""

from __future__ import annotations

from hybrid_rlhf.commands.learning_chat import with_learner
from hybrid_rlhf.inference.server import serve

parse = serve.parse  # the flags


def main(argv: list[str] | None = None) -> int:
    """The entry point: returns the exit code of the server."""
    return with_learner("serve", serve.main, argv)
