"""What mkdocs.yml needs beside the pages of docs/: pages and files of the rest of the checkout, links to them, and the
API reference, one page a package, from the docstrings. Modules are read and not imported: torch need not be there.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCES = ROOT / "outputs" / "reference"  # `paths` of mkdocstrings
TOP = ("CHANGELOG.md", "MIGRATION.md", "CONTRIBUTING.md", "RELEASE.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "LICENSE")
_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_ITEM = re.compile(r"- |\d+\. ")
_IN_LIST = re.compile(r"- |\d+\. |\s")
_TABLE_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")


@event_priority(100)  # before mkdocstrings', which leaves out a path that is not there and then reads the checkout
def on_config(config):  # noqa: ANN001, ANN201 - mkdocs' own
    """A copy of the package as it is installed, with training and inference in it, as setup.py maps them; and the
    pages of results/ and of the reference in the navigation."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    for name in ("hybrid_rlhf", "training", "inference"):
        inside = "" if name == "hybrid_rlhf" else name
        shutil.copytree(ROOT / name, SOURCES / "hybrid_rlhf" / inside, ignore=shutil.ignore_patterns("__pycache__"))
    for section, folder in (("Measured", "results"), ("Reference", "reference")):
        pages = reference() if folder == "reference" else [path.stem for path in (DOCS / folder).glob("*.md")]
        entry = next(entry for entry in config.nav if section in entry)
        entry[section] = [f"{folder}/README.md", *(f"{folder}/{name}.md" for name in sorted(pages) if name != "README")]
    return config


def on_files(files: Files, config) -> Files:  # noqa: ANN001
    """Add the pages of the examples and of the top folder, every file that a page links to, and the reference."""
    pages = [*(ROOT / name for name in TOP), *sorted((ROOT / "examples").rglob("README.md"))]
    wanted = {path.relative_to(ROOT).as_posix() for path in pages}
    for page in [*DOCS.rglob("*.md"), *(path for path in pages if path.suffix == ".md")]:
        targets = {_target(page, link[1]) for link in _LINK.findall(page.read_text(encoding="utf-8"))}
        wanted |= {name for name in targets if name and (ROOT / name).is_file()}
    for name in sorted(wanted - {"README.md"}):
        if files.get_file_from_path(_site_path(name)) is None:
            files.append(File.generated(config, _site_path(name), abs_src_path=str(ROOT / name)))
    for name, text in reference().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:  # noqa: ANN001
    """Links to files of the checkout lead to their place in the site. What GitHub reads in another way: code in tables
    is without its backslashes, and a list that follows a line of text gets the empty line that it needs here."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation", "toc"]  # its table is wide
    source = DOCS / here if (DOCS / here).exists() else ROOT / here

    def link(match: re.Match) -> str:
        name = _target(source, match[2])
        if name is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(_site_path(name), posixpath.dirname(here) or '.')}{match[3]}"

    lines: list[str] = []
    is_code = False
    for line in markdown.split("\n"):
        is_code ^= line.startswith("```")
        if not is_code and _ITEM.match(line) and lines and lines[-1] and not _IN_LIST.match(lines[-1]):
            lines.append("")
        lines.append(_TABLE_CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line)
    return _LINK.sub(link, "\n".join(lines))


def _target(page: Path, link: str) -> str | None:
    """The linked file by its path from the checkout's top; a folder is its README.md. None where there is none."""
    path = (page.parent / link).resolve()
    path = path / "README.md" if path.is_dir() else path
    return path.relative_to(ROOT).as_posix() if path.exists() and path.is_relative_to(ROOT) else None


def _site_path(name: str) -> str:
    """Where a file of the checkout stands in the site. The landing page stands for README.md."""
    return "index.md" if name == "README.md" else name.removeprefix("docs/")


def _summary(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = re.match(r'\s*"""(.*?)(?:\.\s|\.?"""|\n\n)', path.read_text(encoding="utf-8"), re.S)
    return " ".join(text[1].split()) if text else ""


def reference() -> dict[str, str]:
    """Page -> Markdown: what `from hybrid_rlhf import` gives, a page for each package, and a table of them."""
    source = (ROOT / "hybrid_rlhf" / "api.py").read_text(encoding="utf-8")
    classes = re.findall(r"^class (\w+)\(Training\)", source, re.M)
    trainers = "\n".join(f"::: hybrid_rlhf.api.{name}\n" for name in ("Training", *classes))
    pages = {"python": f"# From Python\n\n`from hybrid_rlhf import SFTTrainer`; [how](../guide/from-python.md).\n\n"
                         f"{trainers}\n::: hybrid_rlhf.core.config.UserError\n"}
    rows = ["| [from Python](python.md) | `from hybrid_rlhf import ...`: the trainer classes |"]
    for package in sorted(path for path in (SOURCES / "hybrid_rlhf").iterdir() if (path / "__init__.py").exists()):
        modules = [path for path in sorted(package.rglob("*.py"), key=lambda path: (path.name != "__init__.py", path))
                   if "__pycache__" not in path.parts and not path.name.startswith("__main")]
        names = (".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in modules)
        blocks = (f"::: {name.removesuffix('.__init__')}\n" for name in names)
        pages[package.name] = "\n".join([f"# hybrid_rlhf.{package.name}\n", *blocks])
        rows.append(f"| [{package.name}]({package.name}.md) | {_summary(package / '__init__.py')} |")
    rows = ["# API reference", "", "From the docstrings, one page a package.", "", "| | |", "|---|---|", *rows]
    pages["README"] = "\n".join(rows)
    return pages
