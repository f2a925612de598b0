"""Inputs from Python in the form of a stage's settings: rows as a file, options by dotted name."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.image_files import png_of
from hybrid_rlhf.core.own_files import check_inside, write_file
from hybrid_rlhf.data.sources import Source, undecoded
from hybrid_rlhf.run.runfile import ROWS_FOLDER, TRACKERS
from hybrid_rlhf.trl_configs import TrlConfig
from hybrid_rlhf.trl_fields import CONFIGS


@dataclasses.dataclass
class Rows:
    """Rows from memory as the text of a jsonl file, which is named by a hash of its text: other rows are another file,
    so that a run knows whether it has these."""

    text: str

    def path(self, output_dir: str) -> str:
        return str(Path(output_dir) / ROWS_FOLDER / f"{hashlib.sha256(self.text.encode()).hexdigest()[:12]}.jsonl")

    def write(self, output_dir: str) -> None:
        """Write the file into the run's folder, where its settings look for it."""
        path = Path(self.path(output_dir))
        check_inside(Path(output_dir), (TRACKERS,))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, self.text)


def rows_of(data: object, name: str = "train_dataset") -> Rows | str | list | dict | None:
    """Paths and sources as they are; rows from memory as Rows. Raises UserError for anything else, which names the
    argument."""
    if data is None or isinstance(data, (str, PurePath)) or _is_source(data):
        return str(data) if isinstance(data, PurePath) else data
    if isinstance(data, Mapping):  # splits of a data set, or columns
        raise UserError(f"{name} is a mapping of {', '.join(map(str, list(data)[:5]))}; give one of its parts, "
                        "or a list of rows")
    check(isinstance(data, Iterable), f"{name} is a {type(data).__name__}; give a path, a datasets.Dataset or a "
                                      f"list of rows{_by_name(data)}")
    items = list(undecoded(data))
    if items and all(isinstance(item, (str, PurePath)) or _is_source(item) for item in items):
        return [str(item) if isinstance(item, PurePath) else item for item in items]
    check(bool(items), f"{name} is empty: no row in it; give rows")
    return Rows("".join(_line(row, f"{name}: row {number}") for number, row in enumerate(items, 1)))


def _by_name(data: object) -> str:
    """A hint for arguments that stand second in TRL's trainers and are given by name here."""
    if callable(data):
        return "; functions are written by name, reward_funcs=..."
    return f"; import {type(data).__name__} from hybrid_rlhf" if type(data).__name__ in CONFIGS else ""


def formatted(data: object, formatting_func: Callable | None, config: TrlConfig) -> object:
    """The rows, in a list where they can be read only once, with the column `text`, which formatting_func makes of a
    row, or which has another name there (dataset_text_field)."""
    data = list(data) if isinstance(data, Iterator) else data
    name = getattr(config, "dataset_text_field", "text")
    if data is None or (formatting_func is None and name == "text"):
        return data
    check(isinstance(data, Iterable) and not isinstance(data, (str, Mapping)),
          "formatting_func and dataset_text_field need rows in memory, not a path")
    if formatting_func is not None:
        return [{"text": formatting_func(row)} for row in data]
    return [{column: value for column, value in row.items() if column not in ("text", name)} | (
        {"text": row[name]} if name in row else {}) for row in data]


def _is_source(item: object) -> bool:
    """Whether a mapping is a data source, not a row."""
    return isinstance(item, Mapping) and "path" in item and set(item) <= {f.name for f in dataclasses.fields(Source)}


def _line(row: object, where: str) -> str:
    check(isinstance(row, Mapping), f"{where} is a {type(row).__name__}; a row is a mapping of columns, such as "
                                    "{'prompt': ..., 'completion': ...}")

    def plain(value: object) -> object:
        if hasattr(value, "tolist"):  # numpy, torch
            return value.tolist()
        data = value if isinstance(value, bytes) else png_of(value)
        if data is not None:
            return f"data:image;base64,{base64.b64encode(data).decode()}"
        raise UserError(f"{where} holds a {type(value).__name__}; give text, numbers, images, lists and mappings")

    return json.dumps(dict(row), ensure_ascii=False, default=plain) + "\n"


def rewards_of(rewards: object, folder: Callable[[object], str]) -> tuple[dict[str, Callable], dict[str, object]]:
    """Functions by their names in the settings, and these settings; folder: gives the path of a reward model."""
    items = rewards if isinstance(rewards, (list, tuple)) else [] if rewards is None else [rewards]
    functions: dict[str, Callable] = {}
    names, models = [], []
    for item in items:
        if isinstance(item, str) and ":" in item:
            names.append(item)
        elif callable(item) and not hasattr(item, "save_pretrained"):  # a model can be called too
            name = _free_name(item, functions)
            functions[name] = item
            names.append(f"python:{name}{_version(item)}")
        else:
            models.append(folder(item))
    check(len(models) <= 1, f"reward_funcs: {' and '.join(models)} are two reward models; give one, and others by "
                            "reward__models")
    return functions, ({"reward.functions": names} if names else {}) | (
        {"roles.reward.model_name_or_path": models[0]} if models else {})


def environments_of(tools: object, factory: object, taken: Mapping[str, Callable]
                    ) -> tuple[dict[str, Callable], dict[str, object]]:
    """Tools and environments by their names in the settings, beside those that are `taken`, and these settings. What is
    a name already (path.py:name, builtin:name) stays one."""
    functions: dict[str, Callable] = {}

    def named(item: object, option: str) -> str:
        if isinstance(item, str):
            return item
        check(callable(item), f"{option}: {item!r:.60} cannot be called; give a function, a class, path.py:name or "
                              "builtin:name")
        name = _free_name(item, {**taken, **functions})  # type: ignore[arg-type]  # it can be called
        functions[name] = item  # type: ignore[assignment]
        return f"python:{name}{_version(item)}"  # type: ignore[arg-type]

    options: dict[str, object] = {}
    if tools:
        options["environment.tools"] = [named(t, "tools") for t in (tools if isinstance(tools, (list, tuple)) else
                                                                    [tools])]
    if factory is not None:
        options["environment.factory"] = {str(name): named(each, "environment_factory") for name, each in
                                          factory.items()} if isinstance(factory, Mapping) else named(
                                              factory, "environment_factory")
    return functions, options


def _version(function: Callable) -> str:
    """A hash of the function's source, where Python knows it: other rewards make another run."""
    text = _text_of(function if hasattr(function, "__name__") else type(function))
    return f"@{hashlib.sha256(text.encode()).hexdigest()[:8]}" if text else ""


def _text_of(item: Callable) -> str:
    """The source of a function or a class; for a class that a notebook's cell defines, Python before 3.13 knows that of
    its methods only. "" where it is unknown."""
    try:
        return inspect.getsource(item)
    except (OSError, TypeError):
        methods = vars(item).values() if inspect.isclass(item) else ()
        functions = (getattr(method, "__func__", method) for method in methods)  # of a static or class method
        return "".join(_text_of(each) for each in functions if inspect.isfunction(each))


def _free_name(function: Callable, taken: Mapping) -> str:
    name = re.sub(r"\W+", "_", getattr(function, "__name__", type(function).__name__)).strip("_") or "function"
    numbered = (f"{name}_{i}" for i in range(2, len(taken) + 3))
    return name if name not in taken else next(n for n in numbered if n not in taken)


def dotted(config_class: type, options: Mapping, prefix: str = "") -> dict[str, object]:
    """Options by their dotted names. A section may be a mapping; __ stands for a dot; a name alone is the least deep
    option of that name, if there is only one (learning_rate: the actor's, where there is one)."""
    known = dict(_options(config_class))
    sections = {name.rpartition(".")[0] for name in known}
    values: dict[str, object] = {}
    for key, value in options.items():
        name = f"{prefix}{str(key).replace('__', '.')}"
        if name in sections and isinstance(value, Mapping):
            values |= dotted(config_class, value, f"{name}.")
        else:
            values[name if name in known else _meant(name, known, is_alone=not prefix)] = value
    return values


# Names alone that do not mean the least deep option, and TRL's names; for stages that have these options.
SHORT = {"learning_rate": "roles.actor.learning_rate", "tp": "roles.actor.tp", "kind": "roles.critic.kind",
         "temperature": "ppo.sampling.temperature", "top_k": "ppo.sampling.top_k",
         "num_generations": "ppo.sampling.num_samples", "beta": "ppo.kl_coef", "epsilon": "ppo.cliprange",
         "num_iterations": "ppo.num_ppo_epochs", "reward_weights": "reward.weights",
         "max_completion_length": "ppo.sampling.max_new_tokens"}


def _options(config_class: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    for name, kind in typing.get_type_hints(config_class).items():
        if dataclasses.is_dataclass(kind):
            yield from _options(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def _meant(name: str, known: Mapping, is_alone: bool) -> str:
    """The option that `name` is short for; UserError where there is none, or several that fit equally."""
    if is_alone and SHORT.get(name) in known:
        return SHORT[name]
    close = [option for option in known if is_alone and option.endswith(f".{name}")]
    close = [option for option in close if not option.startswith("reward.judge.")] or close  # the judge's own, last
    least = min((option.count(".") for option in close), default=0)
    best = [option for option in close if option.count(".") == least]
    theirs = next((kind for kind, fields in CONFIGS.items() if name in fields), None) if is_alone and not best else None
    check(theirs is None, f"{name} is not an option here; args={theirs}({name}=...) takes it as TRL does")
    short = nearest(name, [*known, *(option.rpartition(".")[2] for option in known)])
    check(bool(best), f"unknown option {name}{short}; train.py --stage NAME --help lists them")
    check(len(best) == 1, f"{name} may be {' or '.join(best)}; write {best[0].replace('.', '__') if best else ''}")
    return best[0]


def words(options: Mapping[str, object]) -> list[str]:
    """The options as words of a command line."""
    return [f"--{name}={_text(name, value)}" for name, value in options.items()]


def _text(name: str, value: object) -> str:
    if isinstance(value, (str, PurePath)):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is {value!r:.60}; give text, a number, a list or a mapping") from error
