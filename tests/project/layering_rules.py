"""The architecture as rules: layers, circles, dependencies, sizes and names, read from the source by ast.

Every rule is one function from the root of a checkout to a list of faults, one sentence each.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

H = "hybrid_rlhf"

# package: (layer, its modules). A package imports from itself and from lower layers. The first row that fits counts.
PACKAGES = {
    "studio": (9, (f"{H}.studio",)),  # beside the command line, whose stages and commands it starts as processes
    "entry points": (8, ("train", f"{H}.__main__", f"{H}.api", f"{H}.api_inputs", f"{H}.trl_words", f"{H}.trl_fields",
                         f"{H}.trl_configs", f"{H}.trl_callbacks", f"{H}.cli",
                         f"{H}.commands")),
    "training": (7, (f"{H}.training",)),
    "trainers": (6, (f"{H}.trainers",)),
    "inference": (5, (f"{H}.inference",)),
    "rollout": (5, tuple(
        f"{H}.rollout.{name}" for name in (
            "collect", "old_logprobs", "dynamic_sampling", "best_of_n", "episodes"))),
    "run": (5, (f"{H}.run",)),
    "environments": (4.5, (f"{H}.environments",)),
    "rewards": (4, (f"{H}.rewards",)),
    "report": (4, (f"{H}.report",)),
    "export": (4, (f"{H}.export",)),
    "memory_plan": (4, (f"{H}.memory_plan",)),
    "roles": (3, (f"{H}.roles",)),
    "engine": (2, (f"{H}.engine",)),
    "algorithms": (2, (f"{H}.algorithms",)),
    "data": (2, (f"{H}.data",)),
    "record": (1.5, (f"{H}.rollout",)),  # below data, whose loader yields its Prompts, and below roles, which fill it
    "models": (1, (f"{H}.models",)),
    "kernels": (1, (f"{H}.kernels",)),
    "core": (0, (f"{H}.core",)),
}
# package: (what it never imports, except). Where the layers alone would allow it.
NEVERS = {
    "algorithms": ((H,), (f"{H}.algorithms", f"{H}.core.tensors")),
    "inference": (tuple(f"{H}.{name}" for name in ("trainers", "run", "report", "export", "memory_plan")), ()),
    # The settings of the sampler are a frozen record that trainers hand on; the machinery behind them stays out.
    "trainers": ((f"{H}.engine", f"{H}.models", f"{H}.trainers"),
                 (f"{H}.engine.decode.sampling", f"{H}.trainers.ppo_config")),
}
# dependency: the modules (or packages) that may import it.
DEPENDENCIES = {
    "accelerate": (f"{H}.api", f"{H}.report.trackers", f"{H}.engine.device_memory", f"{H}.run"),
    "bitsandbytes": (f"{H}.models.quantize",),
    "datasets": (f"{H}.data.sources",),
    "deepspeed": (f"{H}.engine.train.zero", f"{H}.engine.train.deepspeed_compat"),
    "fastapi": (f"{H}.inference.server",),
    "gguf": (f"{H}.export.gguf",),
    "httpx": (f"{H}.studio.talk",),
    "huggingface_hub": (f"{H}.commands.export", f"{H}.models.saving", f"{H}.trl_words"),
    "math_verify": (f"{H}.rewards.builtin",),
    "matplotlib": (f"{H}.report.plots",),
    "PIL": (f"{H}.core.image_files",),
    "packaging": (f"{H}.commands.doctor",),
    "peft": (f"{H}.models.lora", f"{H}.models.peft_compat"),
    "psutil": (f"{H}.studio",),
    "pyarrow": (f"{H}.data.sources",),  # datasets brings it
    # fastapi brings it and starlette
    "pydantic": (f"{H}.inference.server.protocol",),
    "reasoning_gym": (f"{H}.rewards.reasoning_task",),
    "starlette": (f"{H}.inference.server", f"{H}.studio"),
    "tokenizers": (f"{H}.models",),
    "transformers": (f"{H}.api", f"{H}.trl_callbacks", f"{H}.models.hf_attention", f"{H}.models.load",
                     f"{H}.models.backbone",
                     f"{H}.models.processor_compat", f"{H}.models.saving", f"{H}.models.shapes",
                     f"{H}.models.tokenizer",
                     f"{H}.models.tool_schema", f"{H}.models.transformers_compat"),
    "triton": (f"{H}.kernels",),
    "uvicorn": (f"{H}.inference.server", f"{H}.studio.command"),
    "websocket": (f"{H}.environments.builtin.openenv",),
}
ANYWHERE = {"torch", "numpy", "safetensors", "rich", "yaml", "jinja2"}  # and the standard library
LAZY = {"PIL", "accelerate", "bitsandbytes", "datasets", "deepspeed", "gguf", "huggingface_hub",
        "math_verify", "matplotlib", "peft", "pyarrow", "reasoning_gym", "tokenizers", "transformers", "websocket"}
# Folders of tests beside those that have a package's name.
TEST_FOLDERS = {"benchmarks", "crash", "distributed", "factories", "fuzz", "journeys", "mutation", "project",
                "simulated_card"}
MAX_FUNCTION = 60  # lines: a screen
# Words that say nothing, or that mean two things elsewhere; the glossary has the ones to use.
NOT_A_NAME = {"args", "ans", "experience", "helper", "helpers", "manager", "seq", "strategy", "util", "utils"}


OF_TRL = {f"{H}.{name}" for name in ("api", "api_inputs", "trl_callbacks", "trl_configs", "trl_words")}  # its names
SUBCLASSED = {"Training"}  # by users too, as TRL's trainers are


class Arrow(NamedTuple):
    source: str  # importing module
    target: str  # imported module, ours or another's
    line: int
    is_lazy: bool  # inside a function, or for type checkers only


def modules_of(root: Path) -> dict[str, Path]:
    """Module name -> file: the library, training/ and inference/ as they are installed, and train.py."""
    found = {"train": root / "train.py"} if (root / "train.py").exists() else {}
    for folder, prefix in ((H, H), ("training", f"{H}.training"), ("inference", f"{H}.inference")):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((prefix, *parts))] = path
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def targets(node: ast.AST, package: str, known: dict[str, Path]) -> list[str]:
    """The modules that an import statement (or import_module("...")) names; `from a import b` is a.b if that is one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([base] if base else [])])
        return [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
        return [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
    return []


def arrows(known: dict[str, Path]) -> list[Arrow]:
    """Every import of ours, wherever it stands."""

    def visit(node: ast.AST, name: str, package: str, is_lazy: bool) -> Iterator[Arrow]:
        for child in ast.iter_child_nodes(node):
            for target in targets(child, package, known):
                own = target.split(".")[0] in ("training", "inference")
                yield Arrow(name, f"{H}.{target}" if own else target, child.lineno, is_lazy)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            yield from visit(child, name, package, is_lazy or inside)

    return [arrow for name, path in known.items()
            for arrow in visit(parse(path), name, name if path.stem == "__init__" else name.rpartition(".")[0], False)]


def package_of(module: str) -> str | None:
    return next((package for package, (_, owned) in PACKAGES.items() if within(module, owned)), None)


def is_ours(module: str) -> bool:
    return within(module, (H, "train"))


def upward(root: Path) -> list[str]:
    """Imports that do not go down, and modules of no package. The package root imports nothing of ours
    but, on first use, the trainers."""
    known, faults = modules_of(root), []
    for name in known:
        if name not in (H, *PACKAGES) and package_of(name) is None:
            faults.append(f"{name} belongs to no package: give it a layer in PACKAGES")
    for source, target, line, _ in arrows(known):
        if not is_ours(target) or target == H:
            continue
        here, there = package_of(source), package_of(target)
        if here != there and (here is None or there is None or PACKAGES[there][0] >= PACKAGES[here][0]):
            faults.append(f"{source}:{line} imports {target}, which is not on a lower layer")
    return faults


def circles(root: Path) -> list[str]:
    """Modules that import each other, over any number of steps."""
    known = modules_of(root)
    graph: dict[str, set[str]] = {name: set() for name in known}
    for arrow in arrows(known):
        graph[arrow.source] |= {arrow.target} & set(known)
    faults, done = [], set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            faults.append("circle: " + " -> ".join((*trail[trail.index(name):], name)))
        elif name not in done:
            for target in sorted(graph[name]):
                walk(target, (*trail, name))
            done.add(name)

    for name in graph:
        walk(name, ())
    return faults


def nevers(root: Path) -> list[str]:
    def is_wrong(arrow: Arrow) -> bool:
        never, allowed = NEVERS.get(package_of(arrow.source) or "", ((), ()))
        return within(arrow.target, never) and not within(arrow.target, allowed)

    return [f"{a.source}:{a.line} imports {a.target}: {package_of(a.source)} never does"
            for a in arrows(modules_of(root)) if is_wrong(a)]


def dependencies(root: Path) -> list[str]:
    """Other people's packages imported elsewhere, at the top of a file where they must wait, or undeclared."""
    faults = []
    for source, target, line, is_lazy in arrows(modules_of(root)):
        package = target.split(".")[0]
        if is_ours(target) or package in sys.stdlib_module_names or package in ANYWHERE:
            continue
        if not within(source, DEPENDENCIES.get(package, ())):
            where = " or ".join(DEPENDENCIES.get(package, ("nowhere: it is no dependency of the library",)))
            faults.append(f"{source}:{line} imports {package}, whose place is {where}")
        elif package in LAZY and not is_lazy:
            faults.append(f"{source}:{line} imports {package} at the top of the file; do it inside the function")
    return faults


def sizes(root: Path) -> list[str]:
    """Functions that have outgrown a screen, tests and examples included."""
    faults, hidden = [], {"build", "outputs", "dist"}
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if any(part.startswith(".") or part in hidden for part in inner.parts):
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION:
                    faults.append(f"{inner}:{node.lineno} {node.name} has {length} lines, more than {MAX_FUNCTION}")
    return faults


def names_in(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that a file gives: functions, parameters, variables, attributes whole, class names word by word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from ((word.lower(), node.lineno) for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", node.name))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.lineno
            given = node.args
            yield from ((a.arg, a.lineno) for a in (*given.posonlyargs, *given.args, *given.kwonlyargs))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def twins(root: Path) -> list[str]:
    """Modules of one name in different packages: nobody knows which one is meant."""
    places: dict[str, list[str]] = {}
    for module, path in modules_of(root).items():
        if not path.stem.startswith("__"):
            places.setdefault(path.stem, []).append(module)
    return [f"{' and '.join(found)} have one name" for found in places.values() if len(found) > 1]


def names(root: Path) -> list[str]:
    faults = []
    for module, path in modules_of(root).items():
        faults += [f"{module} is called {part}" for part in module.split(".") if part in NOT_A_NAME]
        faults += [f"{module}:{line} names something {name}" for name, line in names_in(parse(path))
                   if name in NOT_A_NAME and not (module in OF_TRL and name == "args")]
    return faults


def has_only_fields(node: ast.ClassDef) -> bool:
    """Whether a class is a record of fields (a dataclass, or pydantic's), with nothing that runs."""
    return any("dataclass" in ast.unparse(each) or ast.unparse(each) == "BaseModel"
               for each in [*node.decorator_list, *node.bases]) and all(
        isinstance(each, ast.AnnAssign) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for each in node.body)


def inheritance(root: Path) -> list[str]:
    """Classes that inherit from a class of ours that is not a Protocol, an error or a record of fields alone."""
    classes = [(m, n) for m, p in modules_of(root).items() for n in ast.walk(parse(p)) if isinstance(n, ast.ClassDef)]
    bases = {node.name: [ast.unparse(b).split("[")[0].split(".")[-1] for b in node.bases] for _, node in classes}
    harmless = {name for name, of in bases.items() if any(b.endswith(("Protocol", "Error", "Exception")) for b in of)}
    harmless |= {node.name for _, node in classes if has_only_fields(node)}
    return [f"{module}:{node.lineno} {node.name} inherits the implementation of {base}"
            for module, node in classes for base in bases[node.name]
            if base in bases and base not in harmless | SUBCLASSED]


def mirror(root: Path) -> list[str]:
    """Tests that import another test's module (what they share is in tests/factories or beside them), and folders of
    tests that are neither a package's nor one of TEST_FOLDERS."""
    folders = {".".join(m.split(".")[1:]) for m, p in modules_of(root).items() if p.stem == "__init__"} | TEST_FOLDERS
    faults = []
    for path in sorted((root / "tests").rglob("*.py")):
        place = ".".join(path.relative_to(root / "tests").parent.parts)
        if place and place not in folders:
            faults.append(f"tests/{path.relative_to(root / 'tests')} is in no package's folder")
        for node in ast.walk(parse(path)):
            found = [m for m in targets(node, "tests", {}) if m.rpartition(".")[2].startswith("test_")]
            faults += [f"{path.name}:{node.lineno} imports {module}, a test" for module in found]
    return faults


RULES: list[Callable[[Path], list[str]]] = [upward, circles, nevers, dependencies, sizes, twins, names, inheritance,
                                            mirror]
