"""Settings that name code, and model folders of strangers."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fault_tries.attempt import Group, Try, expect
from fault_tries.product import SFT, command, contents, refused, take

# --- settings that name code -----------------------------------------------------------------------------------------

WORDS = [["--data.sources", "[{class_path: evilmod.A}]"], ["--data", "{class_path: evilmod.A}"],
         ["--model.lora", "evilmod.A"], ["--model.class_path", "evilmod.A"],
         ["--model", "!!python/object/apply:evilmod.A []"], ["--train.optim", "evilmod.A"], ["--stage", "evilmod"]]
FILES = ["data: {sources: [{class_path: evilmod.A}]}", "model: {lora: {class_path: evilmod.A}}",
         "seed: !!python/object/apply:evilmod.A []", "train: {<<: {class_path: evilmod.A}}", "config: other.yaml"]


def setting(words: list[str], text: str | None, place: Path) -> None:
    """Refused in one line; the module that it names is importable, and is not imported."""
    take(place, "base", "sft.jsonl")
    Path("evilmod.py").write_text("import pathlib\npathlib.Path('ran').touch()\nclass A:\n    pass\n")
    if text is not None:
        Path("a.yaml").write_text(text)
        words = ["--config", "a.yaml"]
    refused(command(*SFT, *words, prepare=lambda: os.sys.path.insert(0, os.getcwd())))
    expect(not Path("ran").exists(), "the module was imported")
    expect(not Path("run").exists(), "a folder was written")


SETTINGS = Group(
    "settings that name code", "exit code 2 and one line; the module is not imported, no folder is written",
    [Try(" ".join(words), partial(setting, words, None)) for words in WORDS]
    + [Try(text, partial(setting, [], text)) for text in FILES])


# --- model folders ---------------------------------------------------------------------------------------------------

Change = Callable[[Path], object]
WEIGHTS = "model.safetensors"


def edit(name: str, **values: object) -> Change:
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def tensors(change: Callable[[dict], dict]) -> Change:
    def act(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})

    return act


def index(name: str) -> Change:
    def act(folder: Path) -> None:
        shutil.copytree(folder, folder.parent / "other", dirs_exist_ok=True)
        (folder / WEIGHTS).rename(folder / "x.bin")
        text("model.safetensors.index.json", json.dumps({"weight_map": {"model.norm.weight": name}}))(folder)

    return act


class Evil:
    def __reduce__(self):  # noqa: ANN204
        return os.mkdir, (os.path.abspath("ran"),)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))


def with_code(folder: Path) -> None:
    names = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    edit("config.json", model_type="stranger", auto_map=names)(folder)
    (folder / "code.py").write_text("import os; os.mkdir('ran')")


FOLDERS: dict[str, Change] = {
    "0 heads": edit("config.json", num_attention_heads=0), "an unknown type": edit("config.json", model_type="none"),
    "settings empty": text("config.json", ""), "no settings": lambda f: (f / "config.json").unlink(),
    "no weights": lambda f: (f / WEIGHTS).unlink(),
    "half of the weights": lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:9999]),
    "a tensor missing": tensors(lambda t: {n: v for n, v in t.items() if "layers.1.mlp.down_proj" not in n}),
    "a tensor of another shape": tensors(lambda t: t | {"model.norm.weight": t["model.norm.weight"][:7].clone()}),
    "a pickle that runs code": pickled, "code of its own": with_code,
    "an index to ../": index("../other/model.safetensors"), "an index to a .bin": index("x.bin"),
    "no tokenizer": lambda f: (f / "tokenizer.json").unlink(), "tokenizer {}": text("tokenizer.json", "{}"),
    "a template cut off": text("chat_template.jinja", "{% for"),
    "a template that includes": text("chat_template.jinja", "{% include '/etc/passwd' %}"),
    "a template that looks for classes": text("chat_template.jinja", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "a template that refuses all": text("chat_template.jinja", "{{ raise_exception('no') }}")}
COMMANDS = {"trained": [*SFT, "--model.model_name_or_path", "model"],
            "talked": ["chat", "--model", "model", "--prompt", "hi", "--max_new_tokens", "3"]}


def broken(change: Change, words: list[str], place: Path) -> None:
    take(place, "base", "sft.jsonl")
    Path("base").rename("model")
    change(Path("model"))
    before = contents("model")
    refused(command(*words))
    expect(not Path("run/model").exists(), "a model was exported")
    expect(not Path("ran").exists(), "its code was run")
    expect(contents("model") == before, "the folder was changed")


MODELS = Group(
    "broken model folders", "training and chat: exit code 2 and one line; no code of it runs, nothing in it changes",
    [Try(f"{name}: {act}", partial(broken, change, COMMANDS[act]))
     for number, (name, change) in enumerate(FOLDERS.items()) for act in list(COMMANDS)[: 1 + number % 2]])
