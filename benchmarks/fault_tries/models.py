"""Model folders of strangers: broken settings, indexes, weights, tokenizers, templates."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fault_tries.attempt import Group, Try, expect
from fault_tries.prepared import SFT
from fault_tries.product import command, contents, finished, refused, take

Change = Callable[[Path], object]
WEIGHTS, DEEP = "model.safetensors", '{"a": ' * 5000 + "1" + "}" * 5000


def edit(name: str, **values: object) -> Change:
    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(found | values))

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content, errors="surrogateescape")


def tensors(change: Callable[[dict], dict]) -> Change:
    def act(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})

    return act


def index(name: object) -> Change:
    def act(folder: Path) -> None:
        shutil.copytree(folder, folder.parent / "other", dirs_exist_ok=True)
        (folder / WEIGHTS).rename(folder / "x.bin")
        text("model.safetensors.index.json", json.dumps({"weight_map": {"model.norm.weight": name}}))(folder)

    return act


def raw(change: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


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


def outwards(name: str, kind: str = "link") -> Change:
    def act(folder: Path) -> None:
        outside = folder.parent / "outside"
        (folder / name).rename(outside)
        os.mkfifo(folder / name) if kind == "pipe" else (folder / name).symlink_to(outside.absolute())

    return act


def tokenizer(change: Callable[[dict], object]) -> Change:
    def act(folder: Path) -> None:
        found = json.loads((folder / "tokenizer.json").read_text())
        change(found)
        (folder / "tokenizer.json").write_text(json.dumps(found))

    return act


SETTINGS: dict[str, dict] = {  # of config.json
    "0 heads": {"num_attention_heads": 0}, "heads as text": {"num_attention_heads": "4"},
    "3 heads for 2 of keys": {"num_attention_heads": 3}, "hidden size -32": {"hidden_size": -32},
    "hidden size null": {"hidden_size": None}, "hidden size 32.0": {"hidden_size": 32.0},
    "hidden size 3*10^11": {"hidden_size": 32 * 10**10}, "10^8 layers": {"num_hidden_layers": 10**8},
    "-1 layers": {"num_hidden_layers": -1}, "layers true": {"num_hidden_layers": True},
    "vocabulary of 10^12": {"vocab_size": 10**12}, "vocabulary of 0": {"vocab_size": 0},
    "pad id 300 of 300": {"pad_token_id": 300}, "pad id as text": {"pad_token_id": "0"},
    "eos id as a mapping": {"eos_token_id": {}}, "dtype float99": {"dtype": "float99"}, "dtype 7": {"dtype": 7},
    "activation 3": {"hidden_act": 3}, "activation nope": {"hidden_act": "nope"},
    "rope as text": {"rope_parameters": "x"}, "rope yarn alone": {"rope_parameters": {"rope_type": "yarn"}},
    "architectures 3": {"architectures": 3}, "an unknown type": {"model_type": "no_such"},
    "quantization as text": {"quantization_config": "x"}, "text_config 3": {"text_config": 3},
    "weights elsewhere": {"transformers_weights": "../other/model.safetensors"},
}
OTHERS: dict[str, Change] = {
    "settings empty": text("config.json", ""), "settings a list": text("config.json", "[]"),
    "settings nested 5,000 deep": text("config.json", DEEP),
    "settings no UTF-8": text("config.json", '{"a": "\udce9"}'),
    "settings of a number of 5,000 digits": text("config.json", '{"a": ' + "9" * 5000 + "}"),
    "no settings": lambda f: (f / "config.json").unlink(), "settings are a pipe": outwards("config.json", "pipe"),
    "settings are a link outwards": outwards("config.json"),
    "weights are a link outwards": outwards(WEIGHTS),
    "no weights": lambda f: (f / WEIGHTS).unlink(), "half of the weights": raw(lambda b: b[: len(b) // 2]),
    "weights less a byte": raw(lambda b: b[:-1]), "weights and a byte": raw(lambda b: b + b"x"),
    "weights empty": raw(lambda b: b""), "a header of 2^60 bytes": raw(lambda b: (2**60).to_bytes(8, "little") + b[8:]),
    "a header nested 5,000 deep": raw(lambda b: (5000).to_bytes(8, "little") + b"[" * 5000),
    "a tensor missing": tensors(lambda t: {n: v for n, v in t.items() if "layers.1.mlp.down_proj" not in n}),
    "tensors renamed": tensors(lambda t: {n.replace("mlp.up_proj", "mlp.upward"): v for n, v in t.items()}),
    "a tensor of another shape": tensors(lambda t: t | {"model.norm.weight": t["model.norm.weight"][:7].clone()}),
    "a tensor that a layer ignores": tensors(
        lambda t: t | {"model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"].clone()}),
    "weights that are not finite": tensors(lambda t: t | {"model.norm.weight": t["model.norm.weight"] * float("nan")}),
    "a pickle that runs code": pickled, "code of its own": with_code,
    "an index to ../": index("../other/model.safetensors"), "an index to /etc/passwd": index("/etc/passwd"),
    "an index to a .bin": index("x.bin"), "an index of 3": index(3), "an index to nothing": index("none.safetensors"),
    "an index nested 5,000 deep": lambda f: (index("x")(f), text("model.safetensors.index.json", DEEP)(f)),
    "no tokenizer": lambda f: (f / "tokenizer.json").unlink(),
    "tokenizer empty": text("tokenizer.json", ""), "tokenizer {}": text("tokenizer.json", "{}"),
    "an id of -1": tokenizer(lambda t: t["model"]["vocab"].update(zz=-1)),
    "an id of 10^6": tokenizer(lambda t: t["model"]["vocab"].update(zz=10**6)),
    "50 ids too many": tokenizer(lambda t: t["model"]["vocab"].update({f"zz{i}": 300 + i for i in range(50)})),
    "merges of nothing": tokenizer(lambda t: t["model"].update(merges=[["q", "no such"]])),
    "added tokens 3": tokenizer(lambda t: t.update(added_tokens=3)),
    "tokenizer's eos 3": edit("tokenizer_config.json", eos_token=3),
    "its length as text": edit("tokenizer_config.json", model_max_length="x"),
    "its class a path": edit("tokenizer_config.json", tokenizer_class="os.path"),
    "its settings nested": text("tokenizer_config.json", DEEP),
}
TEMPLATES = {
    "a template without end": "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3,
    "a template of 10^9 zeros": "{% set x = [0] * 10**9 %}{{ x | length }}",
    "a template of a huge power": "{{ 10 ** (10 ** 9) }}", "a template that writes 10 MB": "{{ 'a' * 10**7 }}",
    "a template of 1/0": "{{ 1 / 0 }}",
    "a template that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "a template cut off": "{% for",
    "a template that includes": "{% include '/etc/passwd' %}",
    "a template that looks for classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a template without words": "", "a template that refuses all": "{{ raise_exception('no') }}",
    "a template of a list of 10^9": "{{ range(10**9) | list }}",
}
FOLDERS: dict[str, Change] = (
    {name: edit("config.json", **values) for name, values in SETTINGS.items()} | OTHERS
    | {name: text("chat_template.jinja", content) for name, content in TEMPLATES.items()})
# May be taken: tokenizer.json says all of a tokenizer, and an empty template is none (ChatML takes its place).
ANY = {"weights that are not finite", "its class a path", "a template without words"}


COMMANDS = {"trained": [*SFT, "--model.model_name_or_path", "model"],
            "talked": ["chat", "--model", "model", "--prompt", "hi", "--max_new_tokens", "3"]}


def broken(change: Change, words: list[str], is_refused: bool, place: Path) -> None:
    take(place, "base", "sft.jsonl")
    Path("base").rename("model")
    change(Path("model"))
    before = contents("model") if not any(p.is_fifo() for p in Path("model").iterdir()) else None
    done = command(*words, seconds=80)  # a template may take ten seconds of processor time
    if is_refused:
        refused(done)
        expect(not Path("run/model").exists(), "a model was exported")
    expect(not Path("ran").exists(), "its code was run")
    expect(before is None or contents("model") == before, "the folder was changed")


def whole(place: Path) -> None:
    """What must not be refused."""
    take(place, "base", "sft.jsonl")
    Path("base").rename("model")
    for words in COMMANDS.values():
        finished(command(*words))


MODELS = Group(
    "broken model folders",
    "training and chat: exit code 2 and one line; no code of it runs, nothing in it changes, no model is exported",
    [Try("the folder before it was broken", whole)]
    + [Try(f"{name}: {act}", partial(broken, change, COMMANDS[act], name not in ANY), 90.0)
       for number, (name, change) in enumerate(FOLDERS.items()) for act in list(COMMANDS)[: 1 + number % 2]])
