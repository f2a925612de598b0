"""make site: the pages, with those of the examples and the API reference, without a warning and without a dead link.

Also the version, which several files say.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import hybrid_rlhf

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_that_names_the_version_names_this_one() -> None:
    version = hybrid_rlhf.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    studio = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["studio"]
    assert studio["image"] == f"hybrid-rlhf:{version}"
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert next(head for head in heads if head != "Unreleased") == version


def test_every_page_of_results_is_listed() -> None:
    folder = ROOT / "docs" / "results"
    listed = re.findall(r"\]\((\w+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")


class Page(HTMLParser):
    """The ids and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = {""}
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids.add(found.get("id") or "")
        self.links += [link for name in ("href", "src") if (link := found.get(name))]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    shutil.rmtree(ROOT / "outputs" / "reference", ignore_errors=True)  # as in a fresh clone
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT,
                          capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_file_and_a_place_in_it(site) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":  # which has the host's own addresses
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists() or (there in pages and unquote(parts.fragment) not in pages[there].ids):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 90 and sum(len(page.links) for page in pages.values()) > 5000
    assert dead == []


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere_and_its_search_knows_options_and_trainers(site) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|img|iframe)[^>]+src=\"https?://", text), path
        assert not re.search(r"<link[^>]+rel=\"stylesheet\"[^>]+href=\"https?://", text), path
    documents = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    text = "\n".join(document["text"] for document in documents)
    assert "ppo.kl_coef" in text and "GRPOTrainer" in text and "calculator" in text
    for page, words in (("rewards", ("BadAnswer", "(B,)")), ("training", ("hybrid_rlhf.training.step3_ppo",)),
                        ("python", ("GRPOTrainer", "UserError")), ("trainers", ("PPOTrainer",))):
        reference = (site / "reference" / page / "index.html").read_text(encoding="utf-8")
        assert all(word in reference for word in words), page


@pytest.mark.slow
def test_lists_that_github_shows_are_lists_of_the_site(site) -> None:
    changes = (site / "CHANGELOG" / "index.html").read_text(encoding="utf-8")
    assert changes.count("<li>") > 200
