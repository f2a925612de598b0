"""Chat with a trained model at the terminal: python inference/chat --model DIR, or hybrid-rlhf chat --model DIR.

Answers stream to stdout and everything else goes to stderr, so that a pipe carries the answers alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.config import UserError, check, command_flags, parse_command
from hybrid_rlhf.core.errors import error_line, escape_control, exit_code, shortened
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.core.startup import relaxed_gc
from hybrid_rlhf.inference.named_models import learns_on, model_folder, named_models

if TYPE_CHECKING:
    from rich.table import Table

    from hybrid_rlhf.core.image_files import ImageRef
    from hybrid_rlhf.inference.chat.session import Session
    from hybrid_rlhf.inference.conversation import Conversation
    from hybrid_rlhf.inference.teaching import Learning

    OpenLearner = Callable[..., tuple[Conversation, Learning]]

BLOCK = '"""'


def parser() -> argparse.ArgumentParser:
    """The flags; errors are a UserError of one line."""
    flags = command_flags("chat", __doc__)
    flags.add_argument("--model", type=expanded, nargs="+", action="extend", default=[], metavar="[NAME=]DIR",
                       help="a run's or a model's folder, such as outputs/demo/ppo (or a hub id); several to compare")
    flags.add_argument("--reward_model", type=expanded, metavar="DIR",
                       help="a reward model for /score, such as outputs/demo/reward")
    flags.add_argument("--learn", type=expanded, metavar="OUTPUT",
                       help="learn from your marks on the answers, in the folder of a run, such as outputs/taught")
    flags.add_argument("--prompt", help="answer this once, print the answer and nothing else, and end")
    flags.add_argument("--image", type=expanded, nargs="+", action="extend", default=[], metavar="PATH",
                       help="pictures that go with --prompt, or with the first question")
    flags.add_argument("--system", help="system message")
    flags.add_argument("--tools", type=expanded, metavar="FILE",
                       help="a JSON list of functions that the model may call (OpenAI's schemas); /tool answers a call")
    flags.add_argument("--chat_template_kwargs", metavar="JSON",
                       help="""values of the chat template's variables, such as '{"enable_thinking": false}'""")
    flags.add_argument("--max_new_tokens", type=int, help="longest answer in tokens (the model's own setting, or 256)")
    flags.add_argument("--temperature", type=float, help="0 is greedy (the model's own setting, or 0.7)")
    flags.add_argument("--top_p", type=float, help="nucleus of tokens to draw from (the model's own setting, or 1)")
    flags.add_argument("--top_k", type=int, help="draw from the k likeliest, 0: all (the model's own setting, or 0)")
    flags.add_argument("--seed", type=int, default=0, help="the same seed and questions give the same answers")
    return flags


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = parser()
    options = parse_command(flags, argv)
    check(bool(options.model), "chat: no model; give --model DIR, such as --model outputs/demo/ppo/model")
    if options.learn is not None:
        check(len(options.model) == 1, "--learn: one model learns; give one --model")
        check(options.prompt is None and not options.tools,
              "--learn: a conversation without --prompt and --tools; leave them out")
    return options


def notice(text: str) -> None:
    print(escape_control(text), file=sys.stderr, flush=True)


def say(session: Session, text: str | None) -> None:
    """Stream the answers to `text` to stdout, or (None) those of the models whose tool calls were answered; an
    interrupt is raised after the answers so far are shown.

    Several answers are shown in columns on a terminal, else one after the other, each under its model's name.
    """
    names = session.answered() if text is None else session.speakers()
    images: list[ImageRef] = []
    if text is not None:
        images, session.images = session.images, []
    try:
        if len(names) > 1 and sys.stdout.isatty():
            _side_by_side(session, names, text, images)
            return
        for name in names:
            if len(names) > 1:
                print(f"{escape_control(name)}:", flush=True)
            _stream(session, name, text, images)
            for remark in _remarks(session, name):
                notice(f"({remark})")
    except UserError:
        if images:
            notice("the pictures are taken back with the question; /image gives them again")
        raise


def _stream(session: Session, name: str, text: str | None, images: Sequence[ImageRef] = ()) -> None:
    try:
        with closing(session.chat_models[name].answer(text, images)) as answer:
            for piece in answer:
                sys.stdout.write(escape_control(piece))
                sys.stdout.flush()
    finally:
        print(flush=True)


def _remarks(session: Session, name: str) -> list[str]:
    """Remarks to show beside an answer, with control characters as escapes."""
    model, score = session.chat_models[name], session.score(name)
    remarks = ["cut: the answer reached its longest length"] if model.was_cut else []
    remarks += [f"a tool call that cannot be read: {error}" for error in model.call_errors]
    remarks += [f"/tool TEXT answers {call['function']['name']}" for call in model.open_calls()[:1]]
    if session.is_scoring and any(message.get("images") for message in model.messages):
        remarks.append("no score: the reward model reads no images")
    return [*map(escape_control, remarks), *([f"score {score:.3f}"] if score is not None else [])]


def _side_by_side(session: Session, names: list[str], text: str | None, images: Sequence[ImageRef]) -> None:
    """Ask all of `names`, one after the other, and show their answers in columns as they stream. An interrupt ends the
    current answer and the remaining ones."""
    from rich.console import Console
    from rich.live import Live

    answers, remarks = dict.fromkeys(names, ""), dict.fromkeys(names, "")
    console = Console(highlight=False, markup=False, emoji=False)
    # transient: a live region taller than the terminal is cut; the full table is printed at the end
    with Live(console=console, refresh_per_second=12, transient=True) as live:
        try:
            for name in names:
                with closing(session.chat_models[name].answer(text, images)) as answer:
                    for piece in answer:
                        answers[name] += escape_control(piece)
                        live.update(columns(answers, remarks))
                remarks[name] = "; ".join(_remarks(session, name))
        finally:
            live.update("")
            live.stop()
            console.print(columns(answers, remarks))


def columns(answers: dict[str, str], remarks: dict[str, str]) -> Table:
    """One column per model, as wide as the terminal allows, with the remark below the answer."""
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True, box=None, padding=(0, 3, 0, 0))
    for name in answers:
        table.add_column(Text(name), ratio=1, overflow="fold")
    table.add_row(*(Text(text) for text in answers.values()))
    if any(remarks.values()):
        table.add_row(*(Text(remark, style="dim") for remark in remarks.values()))
    return table


def lines() -> Iterator[str]:
    """The lines that the user types or pipes in, until the end of input. Three double quotes begin and end a message of
    several lines; a backslash at the end of a line joins the next one."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        import readline  # noqa: F401 - gives input() its line editing and history
    kept: list[str] = []
    is_block = False
    while True:
        try:
            line = input("...  " if kept or is_block else "you: ") if is_terminal else sys.stdin.readline()
        except EOFError:
            return notice("")
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            notice("\n/exit or Ctrl-D leaves")
            kept, is_block = [], False
            continue
        if not is_terminal and not line:
            if kept:
                yield "\n".join(kept)
            return None
        line = line.rstrip("\n")
        if is_block or line.strip().startswith(BLOCK):
            text = line if is_block else line.strip().removeprefix(BLOCK)
            is_end = text.rstrip().endswith(BLOCK)
            kept.append(text.rstrip().removesuffix(BLOCK) if is_end else text)
            is_block = not is_end
        else:
            kept.append(line.removesuffix("\\"))
        if not is_block and not line.endswith("\\"):
            yield "\n".join(kept)
            kept = []


def talk(session: Session) -> int:
    """Turn after turn until /exit or the end of input. Piped input with a faulty line ends with code 2."""
    from hybrid_rlhf.inference.chat.session import obey
    from hybrid_rlhf.inference.teaching import hint, is_mark

    num_faults = 0
    for line in lines():
        try:
            question: str | None = line.strip()
            goes_on = False
            if line.startswith("/") or is_mark(session, line):
                if line.split()[0] in ("/exit", "/quit"):
                    break
                effect = obey(session, line)
                question, goes_on = effect.question, effect.goes_on
                if effect.text:
                    notice(effect.text)
            if question or goes_on:
                say(session, question)
                if line := hint(session):
                    notice(line)
        except UserError as error:
            num_faults += 1
            notice(shortened(error_line(error)))
        except KeyboardInterrupt:
            notice("(stopped)")
    return 2 if num_faults and not sys.stdin.isatty() else 0


def open_session(options: argparse.Namespace, open_learner: OpenLearner | None = None) -> Session:
    """Load the models of the flags. Raises UserError for one that cannot chat or score."""
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig  # imports torch: only after the flags are checked
    from hybrid_rlhf.inference.chat.session import Session, read_tools
    from hybrid_rlhf.inference.chat_models import announced, open_chat_models, published_sampling

    named = named_models(options.model)
    asked = {name: value for name in ("max_new_tokens", "temperature", "top_p", "top_k")
             if (value := getattr(options, name)) is not None}
    sampling = SamplingConfig(**{"temperature": 0.7} | asked)
    tools = read_tools(options.tools) if options.tools else []
    if options.learn is not None:
        check(open_learner is not None, "--learn trains, and this chat does not; start it by hybrid-rlhf "
              "chat, or python -m hybrid_rlhf chat")
        from hybrid_rlhf.inference.teaching import commands_of

        (name, path), = named.items()
        named[name] = path = learns_on(path, options.learn)
        conversation, learner = open_learner(path, options.learn, sampling, options.seed, options.system)
        session = Session({name: conversation}, more=commands_of(learner))
    else:
        session = Session(open_chat_models(named, sampling, options.seed, options.system))
    session.set_tools(tools)
    for name, model in session.chat_models.items():
        if published := published_sampling(str(model_folder(named[name])), but=asked):
            model.sampling = replace(model.sampling, **published)
            notice(announced(name, published, "a flag or /set says otherwise"))
    for name, names in session.set_template(options.chat_template_kwargs).items():
        notice(f"{name}: its chat template does not read {', '.join(names)}")
    if options.reward_model:
        from hybrid_rlhf.inference.scorer import Scorer

        session.scorer = Scorer(str(model_folder(options.reward_model)))
        session.scorer.open()
        session.is_scoring = True
    return session


def run(argv: list[str] | None, open_learner: OpenLearner | None = None) -> int:
    options = parse(argv)
    if all(Path(path.rpartition("=")[2]).is_dir() for path in options.model):
        # only downloads need bars; read once, at import
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with relaxed_gc(), activity.slow("loading the model"):
        session = open_session(options, open_learner)
    is_piped = not (sys.stdin.isatty() and sys.stdout.isatty())
    session.is_comparing = len(session.chat_models) > 1 and (is_piped or options.prompt is not None)
    note = session.add_images(options.image) if options.image else ""
    if options.prompt is not None:
        if session.is_comparing or session.scorer:
            say(session, options.prompt)
        else:  # only the answer
            _stream(session, session.current, options.prompt, session.images)
        return 0
    if sys.stdin.isatty():
        notice(f"{', '.join(session.chat_models)}: /help lists the commands, /exit leaves")
    if note:
        notice(note)
    if session.more:
        from hybrid_rlhf.inference.teaching import FIRST

        notice(FIRST)
    return talk(session)


def main(argv: list[str] | None = None, open_learner: OpenLearner | None = None) -> int:
    """The entry point: returns the exit code (0 done, 2 the user's input is wrong, 130 interrupted). open_learner: for
    --learn, (model, folder, sampling, seed, system message) -> conversation with the model that learns, and the
    learner."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # invalid bytes must not end the conversation
    try:
        return exit_code(lambda: run(argv, open_learner))
    except BrokenPipeError:  # the pipe was closed; avoids Python's error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
