"""Compiling kernels: once, safely among processes, and a clear reason where it cannot be done."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_rlhf.kernels import REFERENCE, build, cpu, ops_for
from hybrid_rlhf.kernels.ops import KernelsUnavailableError

ROOT = Path(build.__file__).parents[2]
SOURCE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny_kernels", "", -1, methods};
PyMODINIT_FUNC PyInit_tiny_kernels() { return PyModule_Create(&definition); }
"""
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++").split()[0]) is None, reason="no compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def source(tmp_path) -> Path:
    """A module that compiles in a second, PyInit and all."""
    path = tmp_path / "tiny.cpp"
    path.write_text(SOURCE.replace("ANSWER", "42"))
    return path


def load(source: Path):
    return build.load_extension("tiny_kernels", [source])


def no_more_builds(*_args, **_settings):
    raise AssertionError("it compiled again")


@pytest.mark.slow
@needs_compiler
def test_the_second_load_compiles_nothing_and_a_changed_source_does(source, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert load(source).answer() == 42
    assert [r.getMessage().split(" into ")[0] for r in caplog.records] == ["compiling the C++ kernels for this machine"]
    with monkeypatch.context() as patch:
        patch.setattr(build.subprocess, "run", no_more_builds)
        assert load(source).answer() == 42
        source.write_text(SOURCE.replace("ANSWER", "43"))
        with pytest.raises(AssertionError, match="compiled again"):
            load(source)
    assert load(source).answer() == 43


def test_other_flags_another_processor_or_another_torch_is_another_build(source, monkeypatch):
    found = {build._fingerprint([source])}
    for owner, name, value in ((build, "FLAGS", ("-O1",)), (build.accelerator, "flags", lambda: "flags: avx9"),
                               (build.torch, "__version__", "9.9")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            found.add(build._fingerprint([source]))
    assert len(found) == 4


@pytest.mark.slow
@needs_compiler
def test_processes_that_start_together_build_once(source, cache):
    code = textwrap.dedent(f"""
        import logging; logging.basicConfig()
        from pathlib import Path
        from hybrid_rlhf.kernels.build import load_extension
        print(load_extension("tiny_kernels", [Path({str(source)!r})]).answer())
    """)
    started = [subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    ended = [process.communicate(timeout=280) for process in started]
    assert [out.strip() for out, _ in ended] == ["42"] * 2
    assert sum("compiling" in err for _, err in ended) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]  # nothing half-built is left


@pytest.mark.slow
@needs_compiler
def test_a_damaged_library_is_said_and_built_again_at_the_next_load(source, cache):
    library = cache / f"tiny_kernels-{build._fingerprint([source])}" / "tiny_kernels.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"not a library")
    with pytest.raises(KernelsUnavailableError, match="cannot be loaded"):
        load(source)
    assert load(source).answer() == 42


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "digest", "nothing"])
def test_a_library_that_is_not_as_it_was_built_is_not_loaded_but_built_again(source, cache, monkeypatch, damage):
    """The linker would map a library that has lost its end, and the process would end by a signal."""
    folder = cache / f"tiny_kernels-{build._fingerprint([source])}"
    library = folder / "tiny_kernels.so"
    folder.mkdir(parents=True)
    (folder / "sha256").write_text(hashlib.sha256(b"whole").hexdigest())
    if damage == "cut":
        library.write_bytes(b"who")
    elif damage == "digest":
        library.write_bytes(b"whole")
        (folder / "sha256").write_bytes(b"\xff")
    made = []

    def compiled(command, **_settings):
        made.append(Path(command[4], "tiny_kernels.so"))
        made[0].write_bytes(b"built")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(build.subprocess, "run", compiled)
    monkeypatch.setattr(build, "_imported", lambda _name, path: path.read_bytes())
    assert load(source) == b"built" == load(source)
    assert len(made) == 1
    assert (folder / "sha256").read_text() == hashlib.sha256(b"built").hexdigest()
    assert sorted(path.name for path in cache.iterdir()) == sorted([folder.name, f"{folder.name}.lock"])


@needs_compiler
def test_a_source_that_does_not_compile_is_one_line_and_leaves_nothing_behind(source, cache):
    source.write_text("int main( {")
    with pytest.raises(KernelsUnavailableError, match=r"failed: .*tiny.cpp.* error: ") as caught:
        load(source)
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_cache_folder_that_cannot_be_written_names_the_way_out(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path / "file"))
    with pytest.raises(KernelsUnavailableError, match="HYBRID_RLHF_CACHE"):
        load(source)


def test_without_a_compiler_the_reference_is_used_and_said_in_one_line(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    ops_for.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            ops = ops_for("cpu")
            ops_for("cpu")
    finally:
        ops_for.cache_clear()
    assert ops[1:] == REFERENCE[1:] and "no-such-compiler" in ops.name
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()


def test_every_source_of_the_kernels_is_known_to_the_build():
    folder = Path(cpu.__file__).parent
    assert {*cpu.SOURCES, *cpu.HEADERS} == {*folder.glob("*.cpp"), *folder.glob("*.h")}
