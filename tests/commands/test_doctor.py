"""`hybrid-rlhf doctor` against machines that lack something, made by taking it away."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as real_version
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf import cli
from hybrid_rlhf import kernels as kernels_package
from hybrid_rlhf.commands import doctor
from hybrid_rlhf.core import compat


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

        for module in (doctor, compat):
            monkeypatch.setattr(module, "version", version)

    return lack


def by_name(capsys):
    return {f["name"]: f for f in json.loads(capsys.readouterr().out)}


def test_what_the_tests_run_on_lacks_nothing(capsys):
    assert cli.main(["doctor", "--json", "--no_compile"]) == 0
    found = by_name(capsys)
    assert found["deepspeed"]["detail"] == real_version("deepspeed")
    assert all(found[name]["state"] == "ok" for name in ("Python", "torch", "transformers", "C++ compiler"))
    assert "GiB free" in found["memory"]["detail"]


def test_a_missing_dependency_is_named_with_its_cure_and_exit_code_3(lacking, capsys):
    lacking(peft=None)
    assert doctor.main(["--no_compile"]) == 3
    said = capsys.readouterr().out
    assert "MISSING  peft" in said
    assert 'pip install "peft' in said and ">=" in said


def test_a_command_to_copy_stands_on_one_line_however_narrow_the_terminal_is(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    doctor.show([doctor.Finding("GPU", "warning", "none", "pip install torch --index-url https://example.org/a/wheel")])
    assert "  GPU: pip install torch --index-url https://example.org/a/wheel\n" in capsys.readouterr().out


@pytest.mark.parametrize(("versions", "name", "code", "state", "detail", "cure"), [
    ({"transformers": "4.40.0"}, "transformers", 3, "missing", "4.40.0, outside the tested range", "pip install"),
    ({"transformers": "9.1.0"}, "transformers", 0, "warning", "9.1.0, newer than 5.",
     f'pip install "transformers=={compat.TESTED["transformers"]}" if anything is slow or fails'),
    ({"bitsandbytes": None}, "extra: quantize", 0, "warning", "", 'pip install "hybrid-rlhf[quantize]"')],
    ids=["too old", "newer than tested", "an extra is missing"])
def test_a_release_that_is_not_the_tested_one_is_named_with_its_cure(lacking, capsys, versions, name, code, state,
                                                                     detail, cure):
    lacking(**versions)
    assert doctor.main(["--no_compile", "--json"]) == code
    line = by_name(capsys)[name]
    assert line["state"] == state and line["detail"].startswith(detail) and line["cure"].startswith(cure)


def test_without_a_compiler_it_says_what_is_slower(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor.main(["--no_compile", "--json"]) == 0
    assert "slower" in by_name(capsys)["C++ compiler"]["cure"]


def test_a_full_disk_is_a_note(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    assert doctor.main(["--no_compile", "--json"]) == 0
    assert "1.0 GiB free" in by_name(capsys)["disk: here"]["detail"]


def test_an_unknown_flag_is_one_line(capsys):
    assert cli.main(["doctor", "--verbose"]) == 2
    assert capsys.readouterr().err.startswith("error: doctor: unknown argument --verbose")


@pytest.fixture
def card(monkeypatch):
    """Says that one card of a capability is there, and what `ops_for` has for it."""

    def there(capability, kernels="cuda (Triton)", built=("sm_75", "sm_80", "sm_90")):
        said = dict(is_available=True, device_count=1, mem_get_info=(6 << 30, 8 << 30), get_device_name="T4",
                    get_device_capability=capability, get_arch_list=list(built))
        for name, value in said.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_device, value=value: value)
        monkeypatch.setattr(kernels_package, "ops_for", lambda _kind: SimpleNamespace(name=kernels))

    return there


def test_a_card_that_launches_triton_kernels_is_ok(card, capsys):
    card((8, 6))
    assert doctor.main(["--no_compile", "--json"]) == 0
    found = by_name(capsys)
    assert found["GPU 0"]["detail"] == "T4, 6.0 GiB of 8.0 GiB free, capability 8.6"
    assert (found["GPU 0"]["state"], found["GPU kernels"]["state"]) == ("ok", "ok")


def test_a_turing_card_is_told_that_auto_is_float16(card, capsys):
    card((7, 5))
    assert doctor.main(["--no_compile", "--json"]) == 0
    found = by_name(capsys)["GPU 0"]
    assert found["state"] == "warning" and found["detail"].endswith("so model.dtype auto is float16")


def test_no_compile_compiles_nothing_beside_the_kernels_of_another_python(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path))
    other = doctor.cache_folder() / "hybrid_rlhf_cpu-of-another-python"
    other.mkdir(parents=True)
    (other / "hybrid_rlhf_cpu.so").touch()
    monkeypatch.setattr(kernels_package, "ops_for", lambda device: pytest.fail("compiled"))
    assert doctor.main(["--no_compile", "--json"]) == 0
    assert by_name(capsys)["CPU kernels"]["detail"].startswith("not compiled yet")


def test_a_card_that_torch_has_no_kernels_for_is_missing_something(card, capsys):
    card((7, 0))
    assert doctor.main(["--no_compile", "--json"]) == 3
    found = by_name(capsys)["GPU 0"]
    assert found["state"] == "missing" and found["cure"].endswith("whl/cu126")


def test_a_card_on_which_triton_launches_nothing_is_a_note_with_the_reason(card, capsys):
    card((8, 6), "reference (Triton cannot launch kernels here: Python.h is missing: apt install python3.12-dev)")
    assert doctor.main(["--no_compile", "--json"]) == 0
    found = by_name(capsys)["GPU kernels"]
    assert found["state"] == "warning" and "apt install python3.12-dev" in found["detail"]


@pytest.mark.parametrize("cuda, states", [("13.0", ["warning"]), (None, [])], ids=["CUDA build", "CPU build"])
def test_a_cuda_build_without_a_card_is_checked_for_what_triton_compiles_with(monkeypatch, capsys, cuda, states):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert doctor.main(["--no_compile", "--json"]) == 0
    found = [f for f in json.loads(capsys.readouterr().out) if f["name"] == "GPU kernels"]
    assert [f["state"] for f in found] == states
    assert all("apt install gcc" in f["cure"] for f in found)
