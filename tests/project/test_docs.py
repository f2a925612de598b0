"""README and docs: every command is one that the program takes, every link leads somewhere, every named option exists.

What the commands do is tried by test_docs_run.py.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

from hybrid_rlhf import cli
from tests.factories.tiny import own_cache, tiny_causal_lm, tiny_tokenizer
from tests.project.docs_blocks import PAGES, ROOT, blocks, fill, shell_blocks

SHELL = shell_blocks()
LAUNCHERS = ("torchrun", "deepspeed")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = fill(tmp_path_factory.mktemp("docs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        own_cache(patch, folder / "cache")
        assert cli.main(["init", "--goal", "sft", "--data", "conversations.jsonl", "--model", "my-model",
                         "--card", "cpu", "--output_dir", "outputs/mine", "--file", "mine.yaml"]) == 0
        yield folder


def parse_stage(argv: list[str]) -> object:
    """The settings of a stage's command line, checked as a run would check them before it begins."""
    from hybrid_rlhf.core.config import parse

    name, rest = cli._take_stage(argv, "train.py")
    card, rest = cli._take_preset(rest)
    stage, row = importlib.import_module(cli.STAGES[name].module), cli.STAGES[name]
    rest = [word for word in rest if word not in ("--help", "--print_config")]
    config, _ = parse(stage.Config, [*row.preset, *cli._flags(card), *rest], prog="x",
                      extra=cli.SWITCHES)
    cli._check_variant(name, config)
    return config


def parse_command(words: list[str]) -> None:
    program, rest = words[0], words[1:]
    if program in LAUNCHERS:
        words = words[words.index("train.py"):]
        program, rest = words[0], words[1:]
    if program.endswith("python"):
        program, rest = rest[0], rest[1:]
    if program in ("inference/chat", "inference/server"):
        rest = ["chat" if "chat" in program else "serve", *rest]
    if program == "make":
        assert all(re.search(rf"^{w}:", (ROOT / "Makefile").read_text(), re.M) for w in rest if "=" not in w)
    elif program == "pip":
        parse_pip(rest)
    elif program == "docker":
        services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
        assert rest[0] == "compose" and {word for word in rest if word.startswith("studio")} <= set(services)
    elif program == "curl":
        from hybrid_rlhf.inference.server.protocol import read_chat, read_completion

        read = read_completion if rest[0].endswith("/v1/completions") else read_chat
        read(json.loads(rest[rest.index("-d") + 1]))
    elif program == "lm_eval":  # somebody else's, which test_lm_eval.py runs where it is installed
        given = dict(each.split("=") for each in rest[rest.index("--model_args") + 1].split(","))
        assert rest[rest.index("--model") + 1] == "local-completions" and given["base_url"].endswith("/v1/completions")
    elif rest and rest[0] in cli.COMMANDS:
        parse_of(rest[0])(rest[1:])
    else:
        assert program in ("train.py", "hybrid-rlhf"), f"nobody here runs {program}"
        config = parse_stage(rest)
        for source in getattr(config.data, "sources", []):
            assert Path(source.path).exists() or source.path.startswith("demo/"), source.path


def parse_pip(rest: list[str]) -> None:
    extras = re.findall(r"\[([\w,]+)\]", " ".join(rest))
    text = (ROOT / "setup.py").read_text()
    assert rest[0] == "install" and all(f'"{name}"' in text for group in extras for name in group.split(","))


def parse_of(command: str):
    """The function that reads a command's flags; doctor's are within its main, and there are two."""
    if command == "doctor":
        return lambda argv: set(argv) <= {"--json", "--no_compile"} or pytest.fail(f"doctor {argv}")
    return importlib.import_module(cli.COMMANDS[command]).parse


@pytest.mark.parametrize("block", SHELL, ids=lambda b: b.name)
def test_every_command_of_the_documents_is_one_that_the_program_takes(block, place) -> None:
    assert block.commands
    for words in block.commands:
        parse_command(words)


def test_a_command_with_a_misspelt_option_would_be_noticed(place) -> None:
    from hybrid_rlhf.core.config import UserError

    with pytest.raises(UserError, match=r"did you mean data\.sources"):
        parse_command(["python", "train.py", "--stage", "sft", "--data.source", "[]"])


def test_what_a_block_needs_is_known_and_there_are_blocks_that_need_nothing() -> None:
    assert {b.needs for b in SHELL} <= {"", "gpu", "hub", "hosts", "docker"}
    assert sum(not b.needs for b in SHELL) > 15


def test_no_command_hides_in_a_block_that_is_not_tried() -> None:
    programs = ("python ", "hybrid-rlhf ", "make ", "torchrun ", "pip ", "deepspeed ", "curl ")
    hidden = [b.name for b in blocks() if b.language != "sh" and any(
        line.startswith(programs) for line in b.text.splitlines())]
    assert hidden == []


def test_rows_shown_as_data_are_of_formats_that_are_read() -> None:
    from hybrid_rlhf.data.schema import detect

    rows = [json.loads(line) for b in blocks() if b.language == "jsonl" for line in b.text.splitlines()]
    assert {detect(row, "docs").kind for row in rows} >= {"preference", "prompt"} and len(rows) >= 3


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", h).lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "examples" / "README.md"],
                         ids=lambda p: p.name)
def test_every_link_leads_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def leaves(config: object, prefix: str = "") -> set[str]:
    import dataclasses

    names = set()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        names.add(prefix + field.name)
        names |= leaves(value, f"{prefix}{field.name}.") if dataclasses.is_dataclass(value) else set()
    return names


def options_of_all_stages() -> set[str]:
    """Dotted names of every stage's options and of their sections."""
    return set().union(*(leaves(importlib.import_module(row.module).Config()) for row in cli.STAGES.values()))


DOORS = {"--" + name for name in ("stage", "config", *cli.SWITCHES, "preset", "help",
                                "print_config")}


def test_every_option_in_the_guides_tables_and_text_exists() -> None:
    """Whatever stands in code as section.name is an option of some stage, a metric, or a file."""
    known = options_of_all_stages()
    name = re.compile(r"(?<![\w./])(?:--)?((?:model|data|train|engine|roles|ppo|dpo|reward|stages|online|rejection"
                      r"|distill|evaluate|compare)(?:\.\w+)+)(?![\w/(])")
    ours = {"roles.critic.values", "roles.ref.logprobs", "roles.actor.generate"}  # functions of the roles
    unknown = set()
    for page in (ROOT / "docs" / "guide").glob("*.md"):
        for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
            for word in name.findall(code):
                if word not in known | ours and not word.endswith((".py", ".json", ".jsonl", ".md", ".html", ".yaml")):
                    unknown.add((page.name, word))
    assert unknown == set()


def rows_of(page: str) -> list[list[str]]:
    """The rows of every table of a page, header and rule left out."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for i, line in enumerate(lines)
            if line.startswith("|") and not set(line) <= set("|- ") and not
            (i + 1 < len(lines) and set(lines[i + 1]) <= set("|- ") and lines[i + 1].startswith("|"))]


def test_every_option_of_ours_in_coming_from_exists() -> None:
    known, seen = options_of_all_stages(), 0
    for row in rows_of("coming-from.md"):
        for code in re.findall(r"`([^`]+)`", row[1]):
            word = code.split()[0].split("=")[0]
            if word == "--stage":
                assert code.split()[1] in cli.STAGES, code
            elif word.startswith("--"):
                assert word in DOORS, code
            elif re.fullmatch(r"[a-z_]+(\.[a-z_<>]+)*", word) and ("." in word or word in known):
                assert word.replace("<role>", "actor") in known, code
            else:
                continue
            seen += 1
    assert seen > 60


def test_serve_takes_a_run_s_folder_as_chat_does(tmp_path, monkeypatch) -> None:
    from types import SimpleNamespace

    # chat_models is imported before the patch, for it keeps the function that it finds
    from hybrid_rlhf.inference import chat_models, conversation  # noqa: F401
    from hybrid_rlhf.inference.server import serve

    (tmp_path / "sft" / "model").mkdir(parents=True)
    (tmp_path / "sft" / "run.json").write_text("{}")
    opened = []

    def note(path, *_, **_more):
        opened.append(path)
        return SimpleNamespace(engine=None, max_positions=None, tokenizer=tiny_tokenizer())

    monkeypatch.setattr(conversation, "open_conversation", note)
    monkeypatch.setattr("hybrid_rlhf.inference.server.worker.ModelQueue",
                        lambda *_: SimpleNamespace(engine=SimpleNamespace(model=tiny_causal_lm())))
    for path in (tmp_path / "sft", tmp_path / "sft" / "model"):
        serve.open_model("sft", str(path), SimpleNamespace(max_context=8, max_batch=1))
    assert opened == [str(tmp_path / "sft" / "model")] * 2
