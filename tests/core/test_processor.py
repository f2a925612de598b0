"""What the processor multiplies, by the flags that Linux gives; the dtype of training and doctor go by it."""

from __future__ import annotations

import pytest

from hybrid_rlhf.commands import doctor
from hybrid_rlhf.core import processor

# of a Xeon with AMX, an EPYC of Zen 4, and one of Zen 3
FLAGS = {"amx": "fpu avx2 avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8",
         "zen4": "fpu avx2 avx512f avx512_bf16", "zen3": "fpu sse2 avx avx2 fma"}


@pytest.fixture
def computer(tmp_path, monkeypatch):
    def use(name: str) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(f"processor\t: 0\nmodel name\t: a: b\nflags\t\t: {FLAGS[name]}\nbugs\t\t: amx_bf16\n")
        monkeypatch.setattr(processor, "_CPUINFO", path)

    return use


@pytest.mark.parametrize(("name", "unit"), [("amx", "AMX"), ("zen4", "AVX512-BF16"), ("zen3", None)])
def test_the_unit_for_bfloat16_is_read_from_the_flags(computer, name, unit) -> None:
    computer(name)
    assert processor.bf16_unit() == unit


def test_a_system_without_flags_has_no_unit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "none")
    assert processor.bf16_unit() is None
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "arm")
    assert processor.bf16_unit() is None


def test_doctor_says_in_which_dtype_a_cpu_trains_and_why(computer) -> None:
    computer("zen3")
    finding, = doctor._processor()
    assert (finding.state, finding.found) == ("ok", "no AMX or AVX512-BF16, so bfloat16 is emulated: "
                                                    "model.dtype auto trains in float32 on it")
    computer("amx")
    finding, = doctor._processor()
    assert finding.found == "AMX multiplies bfloat16: model.dtype auto trains in bfloat16 with fp32 masters on it"
