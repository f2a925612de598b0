"""What an install puts where: one top-level name, one console command, every file, and pins for everything."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"hybrid_rlhf": "hybrid_rlhf", "training": "hybrid_rlhf/training", "inference": "hybrid_rlhf/inference"}
DATA = (".py", ".typed", ".yaml", ".yml", ".cpp", ".h", ".jinja", ".html", ".css", ".js")


@pytest.fixture
def declared(monkeypatch):
    """The keywords that setup.py hands to setuptools."""
    said = {}
    monkeypatch.setattr(setuptools, "setup", said.update)
    runpy.run_path(str(ROOT / "setup.py"))
    return said


def pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {canonical(name): version for name, version in (line.split("==") for line in lines if line)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def files_of_the_house() -> set[str]:
    """The files that an install must hold, by their path in site-packages."""
    return {f"{place}/{path.relative_to(ROOT / room).as_posix()}" for room, place in ROOMS.items()
            for path in (ROOT / room).rglob("*") if path.suffix in DATA and "__pycache__" not in path.parts}


def test_every_package_lies_under_the_one_top_level_name(declared):
    assert {name.split(".")[0] for name in declared["packages"]} == {"hybrid_rlhf"}
    assert {"hybrid_rlhf.training.step1_sft", "hybrid_rlhf.inference"} <= set(declared["packages"])
    assert declared["entry_points"] == {"console_scripts": ["hybrid-rlhf = hybrid_rlhf.cli:main"]}


def test_every_folder_with_a_file_to_install_is_a_package(declared):
    folders = {path.rpartition("/")[0].replace("/", ".") for path in files_of_the_house() if path.endswith(".py")}
    assert folders <= set(declared["packages"]), "an __init__.py is missing"


def test_the_version_is_written_once(declared):
    import hybrid_rlhf

    assert declared["version"] == hybrid_rlhf.__version__


def test_the_pythons_that_the_package_names_are_those_that_the_tests_run_on(declared):
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(declared["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert named == re.findall(r"3\.\d+", re.search(r"python: \[(.*)\]", workflow)[1])
    assert declared["python_requires"] == f">={named[0]}"


def test_without_an_address_the_description_is_the_readme_and_no_link_is_made_up(monkeypatch, request):
    monkeypatch.delenv("REPO_URL", raising=False)
    monkeypatch.delenv("SITE_URL", raising=False)
    said = request.getfixturevalue("declared")
    assert (said["long_description"], said["project_urls"]) == ((ROOT / "README.md").read_text(), {})


def test_with_the_repositorys_address_every_link_leads_there_at_this_version(monkeypatch, request):
    monkeypatch.setenv("REPO_URL", "https://example.org/us/hybrid/")
    monkeypatch.setenv("SITE_URL", "https://example.org/site/")
    said = request.getfixturevalue("declared")
    at = f"https://example.org/us/hybrid/blob/v{said['version']}/"
    assert f"in the studio]({at.replace('/blob/', '/raw/')}docs/images/studio_run.png)" in said["long_description"]
    assert f"[15 other methods]({at}docs/results/methods.md)" in said["long_description"]
    assert f"made\nfor]({at}docs/index.md#beside-other-libraries)" in said["long_description"]
    links = re.findall(r"\]\(([^)]*)\)", said["long_description"])
    assert links and all((ROOT / re.split(r"/v[\d.]+/", link)[1].split("#")[0]).is_file() for link in links)
    assert said["project_urls"] == {"Documentation": "https://example.org/site",
                                    "Source": "https://example.org/us/hybrid", "Changelog": f"{at}CHANGELOG.md"}


def test_every_dependency_is_pinned_within_its_declared_range(declared):
    pinned = pins()
    wanted = declared["install_requires"] + [r for extra in declared["extras_require"].values() for r in extra]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pinned[canonical(requirement.name)]), requirement


def test_pins_are_exact_releases_from_an_index_and_not_builds_of_one_machine():
    assert pins()["torch"] == "2.13.0"
    for name, version in pins().items():
        assert re.fullmatch(r"\d+(\.\w+)*", version), (name, version)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_installs_once_and_again_only_when_the_pins_changed(tmp_path):
    for name in ("Makefile", "setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    outer = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}  # we may run under make

    def plan() -> str:
        return subprocess.run(["make", "-n", "demo", "SEED=1"], cwd=tmp_path, env=outer, check=True, text=True,
                              capture_output=True).stdout

    first = plan()
    assert "venv .venv" in first
    assert "pip install" in first
    assert "-c constraints.txt -e '.[test]'" in first
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    assert plan() == ".venv/bin/python train.py --stage all --seed 1\n"
    later = (tmp_path / ".venv" / ".installed").stat().st_mtime + 10
    subprocess.run(["touch", "-d", f"@{later}", str(tmp_path / "constraints.txt")], check=True)
    assert "pip install" in plan()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the sources, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def environment(folder: Path) -> Path:
    """A new virtual environment that finds this one's dependencies but has nothing installed; returns its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site_packages(folder) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages"))


def install(python: Path, *what: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
                    "--no-index", "--no-build-isolation", "--disable-pip-version-check", *what], check=True)


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)


def assert_the_command_works(folder: Path, elsewhere: Path) -> None:
    """From a directory far from the checkout: help, a refusal of the launcher's, one of the chat's."""
    python, command = folder / "bin" / "python", folder / "bin" / "hybrid-rlhf"
    modules = "hybrid_rlhf.cli, hybrid_rlhf.training.step1_sft, hybrid_rlhf.inference.chat.repl"
    imported = run(python, "-c", f"import {modules}", cwd=elsewhere)
    assert imported.returncode == 0, imported.stderr
    assert run(python, "-c", "import training", cwd=elsewhere).returncode == 1
    assert run(python, "-c", "import inference", cwd=elsewhere).returncode == 1
    shown = run(command, "--help", cwd=elsewhere)
    assert (shown.returncode, "--stage" in shown.stdout) == (0, True), shown.stderr
    refused = run(command, "--stage", "nonsense", cwd=elsewhere)
    assert refused.returncode == 2, refused.stderr
    refused = run(command, "chat", "--model", "nowhere", cwd=elsewhere)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_install_from_the_sdist_adds_one_name_and_every_file_and_works_anywhere(source, tmp_path):
    python = environment(tmp_path / "env")
    before = {p.name for p in site_packages(tmp_path / "env").iterdir()}
    subprocess.run([sys.executable, "setup.py", "--quiet", "sdist", "-d", str(tmp_path)], cwd=source, check=True)
    archive = next(tmp_path.glob("*.tar.gz"))
    with tarfile.open(archive) as packed:
        assert not [name for name in packed.getnames() if "/tests" in name]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w",
                    str(tmp_path), str(archive)], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == files_of_the_house()
    install(python, str(wheel))
    added = {p.name for p in site_packages(tmp_path / "env").iterdir()} - before
    assert {name for name in added if not name.endswith(".dist-info")} == {"hybrid_rlhf"}
    assert_the_command_works(tmp_path / "env", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_editable_install_adds_no_name_of_ours_and_follows_the_sources(source, tmp_path):
    python = environment(tmp_path / "env")
    before = {p.name for p in site_packages(tmp_path / "env").iterdir()}
    install(python, "-e", str(source))
    added = {p.name for p in site_packages(tmp_path / "env").iterdir()} - before - {"__pycache__"}
    assert all(n.endswith(".dist-info") or n.startswith("__editable__") for n in added), added
    assert_the_command_works(tmp_path / "env", tmp_path)
    (source / "inference" / "added_later.py").write_text("WORD = 'found'\n")
    found = run(python, "-c", "import hybrid_rlhf.inference.added_later as m; print(m.WORD)", cwd=tmp_path)
    assert found.stdout == "found\n", found.stderr
