"""Serve trained models: python inference/server --model DIR, or hybrid-rlhf serve --model DIR.

OpenAI's chat completions and completions for one model or several, and a reward model's scores for PPO runs elsewhere.
It listens on this machine only, unless an API key is given.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybrid_rlhf.core.config import UserError, check, command_flags, parse_command
from hybrid_rlhf.core.errors import exit_code
from hybrid_rlhf.core.hub import is_loopback
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.inference.named_models import learns_on, model_folder, named_models

if TYPE_CHECKING:
    from types import FrameType

    from hybrid_rlhf.inference.chat.repl import OpenLearner
    from hybrid_rlhf.inference.conversation import Conversation
    from hybrid_rlhf.inference.server.app import Served
    from hybrid_rlhf.inference.teaching import Learning

KEY_VARIABLE = "HYBRID_RLHF_API_KEY"
STOP_SECONDS = 3  # in which open answers may end after Ctrl-C, when someone waits
DRAIN_SECONDS = 25  # after SIGTERM, which a service manager sends: Kubernetes kills after 30 seconds, systemd after 90


def parser() -> argparse.ArgumentParser:
    """The flags; errors are a UserError of one line."""
    flags = command_flags("serve", __doc__)
    flags.add_argument("--model", type=expanded, nargs="+", action="extend", metavar="[NAME=]DIR", default=[],
                       help="model folders, such as sft=outputs/demo/sft/model ppo=outputs/demo/ppo/model")
    flags.add_argument("--reward_model", type=expanded, metavar="DIR",
                       help="a reward model, whose scores POST /score gives")
    flags.add_argument("--reward_label", help="which label of a reward model with several is the score")
    flags.add_argument("--learn", type=expanded, metavar="OUTPUT", help="the model learns from marks on its answers "
                       "(POST /v1/marks), in the folder of a run, such as outputs/taught")
    flags.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    flags.add_argument("--port", type=int, default=8000, help="port, 0 for any that is free (%(default)s)")
    flags.add_argument("--api_key", default=os.environ.get(KEY_VARIABLE),
                       help=f"what clients must send as Authorization: Bearer KEY; better in {KEY_VARIABLE}, for "
                            "others on this machine can read command lines")
    flags.add_argument("--max_batch", type=int, default=16, help="answers drawn at once, by model (%(default)s)")
    flags.add_argument("--max_queue", type=int, default=64, help="answers that may wait, by model (%(default)s)")
    flags.add_argument("--max_context", type=int, default=4096, help="most tokens of prompt and answer (%(default)s)")
    flags.add_argument("--max_prompt_tokens", type=int, help="most tokens of a prompt (max_context - 1)")
    flags.add_argument("--max_new_tokens", type=int, default=1024, help="longest answer in tokens (%(default)s)")
    flags.add_argument("--max_body_bytes", type=int,
                       help="largest request (1 MiB; 20 MiB where a model reads images)")
    flags.add_argument("--request_timeout", type=float, default=300.0, help="seconds for an answer (%(default)s)")
    return flags


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = parser()
    options = parse_command(flags, argv)
    check(bool(options.model or options.reward_model), "serve: no model; give --model DIR, such as --model "
                                                       "outputs/demo/ppo/model, or --reward_model DIR")
    check(options.learn is None or len(options.model) == 1, "serve: --learn: one model learns; give one --model")
    for name in ("max_batch", "max_context", "max_prompt_tokens", "max_new_tokens", "max_body_bytes",
                 "request_timeout"):
        value = getattr(options, name)
        check(value is None or value > 0, f"serve: --{name} is {value}; it must be positive")
    check(options.max_queue >= 0, f"serve: --max_queue is {options.max_queue}; it must be 0 or more")
    check(0 <= options.port < 2**16, f"serve: --port {options.port} is not a port; give one below 65536")
    check(options.api_key is None or len(options.api_key) >= 8,
          f"serve: the API key has {len(options.api_key or '')} characters; give 8 at least")
    check(is_loopback(options.host) or options.api_key is not None,
          f"serve: --host {options.host} lets other machines in; give --api_key (or {KEY_VARIABLE}), or stay on "
          "127.0.0.1")
    return options


def bound_socket(command: str, host: str, port: int) -> socket.socket:
    """A socket for `command` that does not listen yet. UserError for an address that cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{command}: cannot listen on {host} port {port}: {error}; "
                        "give another --port or --host") from error
    return bound


def open_model(name: str, path: str, options: argparse.Namespace, opened: Conversation | None = None) -> Served:
    """Load one model (opened: is loaded). UserError for a folder without a causal language model; a note for one that
    cannot chat."""
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.inference.chat_models import announced, published_sampling
    from hybrid_rlhf.inference.conversation import open_conversation
    from hybrid_rlhf.inference.server.app import Served
    from hybrid_rlhf.inference.server.worker import ModelQueue
    from hybrid_rlhf.models.backbone import towers

    path = str(model_folder(path))
    opened = opened or open_conversation(path, SamplingConfig(), needs_template=False)
    if not opened.tokenizer.chat_template:
        print(f"note: {name} has no chat template: it serves /v1/completions, and no chat", file=sys.stderr)
    capacity = min(options.max_context, opened.max_positions or options.max_context)
    if published := published_sampling(path, but=["max_new_tokens"]):
        print(announced(name, published, "a request says otherwise"), file=sys.stderr)
    served = Served(name, ModelQueue(opened.engine, options.max_batch, capacity), opened.tokenizer, published)
    if served.no_images and towers(served.lane.engine.model):
        print(f"note: {served.no_images}", file=sys.stderr)
    return served


def open_models(named: dict[str, str], options: argparse.Namespace,
                open_learner: OpenLearner | None) -> tuple[list[Served], Learning | None]:
    """Load the models, and for --learn the learner of the one that there is."""
    if options.learn is None:
        return [open_model(name, path, options) for name, path in named.items()], None
    check(open_learner is not None, "--learn trains, and this server does not; start it by hybrid-rlhf serve, or "
                                    "python -m hybrid_rlhf serve")
    named = {name: learns_on(path, options.learn) for name, path in named.items()}
    opened, learner = open_learner(*named.values(), options.learn)
    return [open_model(name, path, options, opened) for name, path in named.items()], learner


def default_body_bytes(models: Sequence[Served]) -> int:
    """The largest request where no option says so: with room for images where a model reads them."""
    return 20 * 2**20 if any(model.no_images is None for model in models) else 2**20


def run(argv: list[str] | None, open_learner: OpenLearner | None = None) -> int:
    options = parse(argv)
    named = named_models(options.model)
    bound = bound_socket("serve", options.host, options.port)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from uvicorn import Config
        from uvicorn import Server as UvicornServer

        from hybrid_rlhf.inference.server.app import Limits, make_app
    except ImportError as error:
        raise UserError(f"serve: {error.name} is not installed; pip install 'hybrid-rlhf[serve]'") from error
    from hybrid_rlhf.inference.scorer import Scorer
    from hybrid_rlhf.inference.server.guard import MAX_CONNECTIONS
    from hybrid_rlhf.inference.server.worker import Worker

    scorer = Scorer(str(model_folder(options.reward_model)), options.reward_label) if options.reward_model else None
    models, learner = open_models(named, options, open_learner)
    if scorer:
        scorer.open()
    worker = Worker([m.lane for m in models])
    began = time.perf_counter()
    worker.start()
    worker.draw_first()
    took = time.perf_counter() - began
    limits = Limits(options.max_queue, options.max_new_tokens, options.max_prompt_tokens,
                    options.max_body_bytes or default_body_bytes(models), options.request_timeout)
    app = make_app(models, worker, limits, scorer=scorer, api_key=options.api_key, is_local=is_loopback(options.host),
                   learner=learner)

    class OrderlyServer(UvicornServer):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if sig == signal.SIGTERM:
                self.config.timeout_graceful_shutdown = DRAIN_SECONDS
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if self.server_state.tasks:
                seconds = self.config.timeout_graceful_shutdown
                print(f"the server stops: open answers have {seconds} seconds to end", file=sys.stderr, flush=True)
            await super().shutdown(sockets)
            if self.force_exit:  # after a second signal uvicorn skips this, and the worker would stay
                await self.lifespan.shutdown()

    server = OrderlyServer(Config(
        app, http="h11", ws="none", lifespan="on", log_level="error", access_log=False, server_header=False,
        limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=5, timeout_graceful_shutdown=STOP_SECONDS))
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn stops, then raises the signal again, which changes nothing
        signal.signal(number, server.handle_exit)  # and one that comes before uvicorn listens to signals is not lost
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # the terminal has closed; ignored under nohup
        signal.signal(signal.SIGHUP, server.handle_exit)
    bound.listen(1024)  # before the next line is printed, so that clients can connect
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"serving {', '.join([m.name for m in models] + ['/score'] * bool(scorer))} at "
          f"http://{host}:{bound.getsockname()[1]}", file=sys.stderr, flush=True)
    if models:
        print(f"each model was tried, and its cache for {options.max_batch} answers at once made, in {took:.1f} s: the "
              "first request waits for neither", file=sys.stderr, flush=True)
    server.run(sockets=[bound])
    return 0


def main(argv: list[str] | None = None, open_learner: OpenLearner | None = None) -> int:
    """The entry point: returns the exit code (0 stopped by a signal, 2 the input is wrong, 130 interrupted early).
    open_learner: for --learn, as in the chat."""
    return exit_code(lambda: run(argv, open_learner))
