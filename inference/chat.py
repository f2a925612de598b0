"""Chat with a trained model at the terminal: python inference/chat.py --model DIR, or hybrid-rlhf chat --model DIR.

Answers stream to stdout and everything else goes to stderr, so that a pipe carries the answers alone.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if not __package__:  # run as a file: Python put inference/ on the path, but the library lies beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from hybrid_rlhf.config import UserError, check, nearest

if TYPE_CHECKING:
    from hybrid_rlhf.inference.conversation import Conversation

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens", "seed")


def parser() -> argparse.ArgumentParser:
    """The flags. argparse's own way to refuse prints a usage text; here a refusal is a UserError of one line."""
    flags = argparse.ArgumentParser("hybrid-rlhf chat", description=__doc__.splitlines()[0], allow_abbrev=False)
    flags.add_argument("--model", metavar="DIR", help="model folder, such as outputs/demo/ppo/model (or a hub id)")
    flags.add_argument("--prompt", help="answer this once, print the answer and nothing else, and end")
    flags.add_argument("--system", help="system message")
    flags.add_argument("--max_new_tokens", type=int, default=256, help="longest answer in tokens (%(default)s)")
    flags.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (%(default)s)")
    flags.add_argument("--top_p", type=float, default=1.0, help="nucleus of tokens to draw from (%(default)s)")
    flags.add_argument("--top_k", type=int, default=0, help="draw from the k likeliest, 0 from all (%(default)s)")
    flags.add_argument("--seed", type=int, default=0, help="the same seed and questions give the same answers")

    def refuse(message: str) -> NoReturn:
        raise UserError(f"chat: {message}")

    flags.error = refuse
    return flags


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = parser()
    options, unknown = flags.parse_known_args(argv)
    if unknown:
        close = nearest(unknown[0].split("=")[0], re.findall(r"--\w+", flags.format_usage()))
        raise UserError(f"chat: unknown argument {unknown[0]}{close}")
    check(options.model is not None, "chat: no model; give --model DIR, such as --model outputs/demo/ppo/model")
    return options


def set_values(conversation: Conversation, rest: str) -> str:
    """name=value pairs into the sampling settings; the old ones stay if one of them is wrong."""
    values = {name: getattr(conversation if name == "seed" else conversation.sampling, name) for name in SETTINGS}
    changed = {}
    for pair in rest.split():
        name, equals, text = pair.partition("=")
        check(name in values, f"/set knows no {name}{nearest(name, values)}; there are {', '.join(values)}")
        check(bool(equals), f"/set takes {name}=VALUE")
        try:
            changed[name] = type(values[name])(text)
        except ValueError as error:
            kind = "a whole number" if isinstance(values[name], int) else "a number"
            raise UserError(f"/set {name}={text}: it takes {kind}") from error
    conversation.sampling = replace(conversation.sampling, **{k: v for k, v in changed.items() if k != "seed"})
    conversation.seed = changed.get("seed", conversation.seed)
    return "  ".join(f"{name}={value}" for name, value in (values | changed).items())


def reset(conversation: Conversation, _rest: str) -> str:
    conversation.reset()
    return "the conversation starts anew"


def save(conversation: Conversation, rest: str) -> str:
    check(bool(rest), "/save takes a file name")
    conversation.save(rest)
    return f"saved to {rest}"


def show_help(_conversation: Conversation, _rest: str) -> str:
    return ("/reset  forget what was said\n/set temperature=0.7 top_p=0.9  change settings; /set alone shows them\n"
            "/save FILE  write the conversation as a jsonl row\n/exit  leave (so does Ctrl-D)\n"
            "Ctrl-C stops an answer. A message that begins with a slash: put a space before it.")


COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/reset": reset, "/set": set_values, "/save": save, "/help": show_help, "/exit": lambda *_: ""}


def notice(text: str) -> None:
    from hybrid_rlhf.inference.terminal import neutralise

    print(neutralise(text), file=sys.stderr, flush=True)


def command(conversation: Conversation, line: str) -> str:
    """Do what a line that begins with a slash says; returns what to tell the user."""
    word, _, rest = line.strip().partition(" ")
    check(word in COMMANDS, f"no command {word}{nearest(word, COMMANDS)}; /help lists them")
    return COMMANDS[word](conversation, rest.strip())


def say(conversation: Conversation, text: str) -> None:
    """Stream the answer to stdout. An interrupt goes through, after the line is ended."""
    from hybrid_rlhf.inference.terminal import neutralise

    try:
        with closing(conversation.answer(text)) as answer:
            for piece in answer:
                sys.stdout.write(neutralise(piece))
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(flush=True)
        raise
    print(flush=True)


def lines() -> Iterator[str]:
    """What the user types or pipes in, without line ends, until the end of input."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        import readline  # noqa: F401 - gives input() its line editing and history
    while True:
        try:
            line = input("you: ") if is_terminal else sys.stdin.readline()
        except EOFError:
            return notice("")
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            notice("\n/exit or Ctrl-D leaves")
            continue
        if not is_terminal and not line:
            return None
        yield line.rstrip("\n")


def talk(conversation: Conversation) -> int:
    """Turn after turn until /exit or the end of input. Piped input with a faulty line ends with code 2."""
    num_faults = 0
    for line in lines():
        try:
            if line.startswith("/"):
                if line.split()[0] == "/exit":
                    break
                notice(command(conversation, line))
            elif line.strip():
                say(conversation, line.strip())
                if conversation.was_cut:
                    notice("(cut: the answer reached its longest length)")
        except UserError as error:
            num_faults += 1
            notice(f"error: {error}")
        except KeyboardInterrupt:
            notice("(stopped)")
    return 2 if num_faults and not sys.stdin.isatty() else 0


def run(argv: list[str] | None) -> int:
    options = parse(argv)
    if Path(options.model).is_dir():  # bars are for downloads, and read once, when the libraries are imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from hybrid_rlhf.engine.sampling import SamplingConfig  # torch: not before the flags are right
    from hybrid_rlhf.inference.conversation import open_conversation

    sampling = SamplingConfig(max_new_tokens=options.max_new_tokens, temperature=options.temperature,
                              top_p=options.top_p, top_k=options.top_k)
    conversation = open_conversation(options.model, sampling, options.seed, options.system)
    if options.prompt is not None:
        say(conversation, options.prompt)
        return 0
    if sys.stdin.isatty():
        notice(f"{options.model}: /help lists the commands, /exit leaves")
    return talk(conversation)


def main(argv: list[str] | None = None) -> int:
    """The door: returns the exit code (0 done, 2 the user's input is wrong, 130 interrupted)."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # bytes that are no text end no conversation
    try:
        return run(argv)
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the pipe has left; keep Python from complaining about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
