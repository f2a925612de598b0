"""`hybrid-rlhf doctor` against machines that lack something, made by taking it away."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as real_version
from types import SimpleNamespace

import pytest

from hybrid_rlhf import cli
from hybrid_rlhf.commands import doctor


@pytest.fixture
def lacking(monkeypatch):
    """A function that makes packages look absent (None) or of another version."""

    def lack(**versions):
        def version(name):
            if name not in versions:
                return real_version(name)
            if versions[name] is None:
                raise PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(doctor, "version", version)

    return lack


def by_name(capsys):
    return {f["name"]: f for f in json.loads(capsys.readouterr().out)}


def test_what_the_tests_run_on_lacks_nothing(capsys):
    assert cli.main(["doctor", "--json", "--no_compile"]) == 0
    found = by_name(capsys)
    assert found["deepspeed"]["found"] == real_version("deepspeed")
    assert all(found[name]["state"] == "ok" for name in ("Python", "torch", "transformers", "C++ compiler"))
    assert "GiB free" in found["memory"]["found"]


def test_a_missing_dependency_is_named_with_its_cure_and_exit_code_3(lacking, capsys):
    lacking(peft=None)
    assert doctor.main(["--no_compile"]) == 3
    said = capsys.readouterr().out
    assert "MISSING  peft" in said
    assert 'pip install "peft>=' in said


def test_a_release_outside_the_tested_range_says_the_range(lacking, capsys):
    lacking(transformers="4.40.0")
    assert doctor.main(["--no_compile", "--json"]) == 3
    assert by_name(capsys)["transformers"]["found"].startswith("4.40.0, outside the tested range")


def test_a_missing_extra_is_a_note_and_not_an_error(lacking, capsys):
    lacking(bitsandbytes=None)
    assert doctor.main(["--no_compile", "--json"]) == 0
    extra = by_name(capsys)["extra: quantize"]
    assert (extra["state"], extra["cure"]) == ("warning", 'pip install "hybrid-rlhf[quantize]"')


def test_without_a_compiler_it_says_what_is_slower(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor.main(["--no_compile", "--json"]) == 0
    assert "slower" in by_name(capsys)["C++ compiler"]["cure"]


def test_a_full_disk_is_a_note(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    assert doctor.main(["--no_compile", "--json"]) == 0
    assert "1.0 GiB free" in by_name(capsys)["disk: here"]["found"]


def test_an_unknown_flag_is_one_line(capsys):
    assert doctor.main(["--verbose"]) == 2
    assert capsys.readouterr().err.startswith("error: doctor: unknown argument --verbose")
