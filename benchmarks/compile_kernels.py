"""What the Triton kernels need on each generation of cards, compiled to machine code; needs Triton and no card.

    python benchmarks/compile_kernels.py [--architectures 86 90] [--cases attend_128 ...] [--json FILE]
        [--page docs/results/kernels.md]

Every kernel in the form that the library chooses for the card: for every head size, one query head to a key head, four
and sixty-four, with every option; sampling and log-probabilities with every option and with none. Registers and spills
are ptxas's; blocks to a processor are what registers, shared memory and threads allow. Ends with 1 where a kernel does
not fit its card or spills more than 16 bytes a thread, or where decode attention leaves a processor a single block.
Four minutes on a core.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import harness
import torch
from harness import parser_of, table_of, write_rows, write_tables

SPILLED = 16  # bytes a thread that are not worth naming


class Limits(NamedTuple):
    """Of one generation: KiB of shared memory of a block and of a processor; threads and blocks of a processor."""

    names: str
    block: int
    processor: int
    threads: int
    blocks: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". All have 65,536 registers.
ARCHITECTURES = {75: Limits("T4, RTX 20", 64, 64, 1024, 16), 80: Limits("A100", 163, 164, 2048, 32),
                 86: Limits("RTX 30, A10", 99, 100, 1536, 16), 89: Limits("RTX 40, L4", 99, 100, 1536, 24),
                 90: Limits("H100", 227, 228, 2048, 32), 100: Limits("B200", 227, 228, 2048, 32),
                 120: Limits("RTX 50", 99, 100, 1536, 24)}
POINTERS = dict(pages="*i64", positions="*i64", mask="*i1", maxima="*fp32", totals="*fp32", seen="*i1", forbidden="*i1",
                streams="*i64", sums="*fp32", picks="*i32", levels="*fp32",
                lasts="*i32", kept="*i1", logprobs="*fp32", parts="*fp32", targets="*i64",
                entropy="*fp32", correct="*i1", normalisers="*fp32", by_logprobs="*fp32", by_entropy="*fp32")
NUMBERS = dict.fromkeys(("scaling", "softcap", "temperature", "penalty", "top_p", "min_p", "eps"), "fp32")


class Kernel(NamedTuple):
    """One kernel as it is launched: its compile-time constants, the types of its pointers, warps and stages."""

    function: object
    constants: dict[str, object]
    pointers: dict[str, str]
    launch: dict[str, int]


class Case(NamedTuple):
    """One row of the table. build(architecture, type): the kernel there. least: blocks that a processor must hold.
    oldest: the first generation that uses it."""

    work: str
    types: tuple[str, ...]
    build: Callable[[int, str], Kernel]
    least: int = 1
    oldest: int = 75


# -- the kernels, as the library launches them -------------------------------------------------------------------------


def attend(group: int, dim: int, value_dim: int) -> Callable[[int, str], Kernel]:
    def build(architecture: int, kind: str) -> Kernel:
        from hybrid_rlhf.kernels import triton_attention as attention
        from hybrid_rlhf.kernels.ops import PAGE_COLUMNS

        card = attention.Card(1, ARCHITECTURES[architecture].block * 1024, has_matrix_units=architecture >= 80)
        form = attention.form_for(card, group, dim, value_dim, is_16_bit=kind != "fp32")
        constants = dict(form.sizes, DIM=dim, VALUE_DIM=value_dim, GROUP=group, NUM_SPLITS=1, PAGE=PAGE_COLUMNS,
                         HAS_MASK=True, HAS_SINKS=True, HAS_SOFTCAP=True)
        pointers = dict.fromkeys(("query", "key", "value", "keys", "values", "sinks", "out"), "*" + kind)
        function = attention._attend_grouped if form.is_grouped else attention._attend_single
        return Kernel(function, constants, pointers, form.launch)

    return build


def join(value_dim: int) -> Callable[[int, str], Kernel]:
    def build(_architecture: int, kind: str) -> Kernel:
        from hybrid_rlhf.kernels import triton_attention as attention

        constants = dict(VALUE_DIM=value_dim, BLOCK_V=value_dim, NUM_SPLITS=32, BLOCK_S=32, HAS_SINKS=True)
        return Kernel(attention._join, constants, dict(sinks="*" + kind, out="*" + kind), dict(num_warps=4))

    return build


def sampling(step: str, is_plain: bool) -> Callable[[int, str], Kernel]:
    def build(_architecture: int, kind: str) -> Kernel:
        from hybrid_rlhf.kernels import triton_sampling

        flags = dict.fromkeys(("HAS_SEEN", "HAS_FORBIDDEN", "TEMPERED"), not is_plain)
        if step == "scan":
            return Kernel(triton_sampling._scan, dict(CHUNK=triton_sampling._CHUNK, GREEDY=False, CUT=not is_plain,
                                                      KEEPS=not is_plain, **flags),
                          dict(logits="*" + kind), dict(num_warps=4))
        if step == "cut":
            return Kernel(triton_sampling._cut, dict(CHUNKS=128, HAS_TOP_K=True, HAS_TOP_P=True,
                                                     BLOCK=triton_sampling._BLOCK, **flags),
                          dict(logits="*" + kind), dict(num_warps=16))  # chunks of Gemma's 262,144 tokens
        return Kernel(triton_sampling._draw, dict(CHUNKS=128, TEMPERED=not is_plain),
                      dict(logits="*" + kind, out="*i64"), dict(num_warps=4))

    return build


def norm(size: int, is_backward: bool) -> Callable[[int, str], Kernel]:
    def build(_architecture: int, kind: str) -> Kernel:
        from hybrid_rlhf.kernels import triton_fused as fused

        form = fused._norm_form(size)
        constants = dict(ADDS_ONE=False, BLOCK_R=form["BLOCK_R"], BLOCK_D=form["BLOCK_D"])
        pointers = dict.fromkeys(("x", "weight", "out", "gradient", "by_x"), "*" + kind) | {"by_weight": "*fp32"}
        function = fused._norm_backward if is_backward else fused._norm
        return Kernel(function, constants | (dict(BY_WEIGHT=True) if is_backward else {}), pointers,
                      dict(num_warps=form["num_warps"]))

    return build


def gate(is_gelu: bool, is_backward: bool) -> Callable[[int, str], Kernel]:
    def build(_architecture: int, kind: str) -> Kernel:
        from hybrid_rlhf.kernels import triton_fused as fused

        pointers = dict.fromkeys(("gate", "up", "out", "gradient", "by_gate", "by_up"), "*" + kind)
        return Kernel(fused._gate_backward if is_backward else fused._gate,
                      dict(IS_GELU=is_gelu, BLOCK=fused._BLOCK), pointers, dict(num_warps=4))

    return build


def turn(size: int) -> Callable[[int, str], Kernel]:
    def build(_architecture: int, kind: str) -> Kernel:
        from hybrid_rlhf.kernels import triton_fused as fused

        block = size // 2
        return Kernel(fused._turn, dict(BLOCK_H=min(32, fused._TILE // block), BLOCK_D=block),
                      dict.fromkeys(("x", "cosines", "sines", "out"), "*" + kind), dict(num_warps=4))

    return build


def scores(is_plain: bool, is_backward: bool) -> Callable[[int, str], Kernel]:
    def build(_architecture: int, kind: str) -> Kernel:
        from hybrid_rlhf.kernels import triton_scores

        flags = dict(BY_LOGPROBS=True, BY_ENTROPY=not is_plain) if is_backward else dict(WITH_ENTROPY=not is_plain)
        return Kernel(triton_scores._score_backward if is_backward else triton_scores._score,
                      dict(TEMPERED=not is_plain, BLOCK=triton_scores._BLOCK, **flags),
                      dict.fromkeys(("logits", "gradient"), "*" + kind), dict(num_warps=triton_scores._WARPS))

    return build


def layer(architecture: int, act: Callable[[], object], name: str) -> Kernel:
    """The last launch of a kernel of triton_layer in `act`, with the types of the tensors that it is given there."""
    from hybrid_rlhf.kernels import triton_attention, triton_layer

    launches: list[tuple[tuple, dict]] = []

    class Launched:
        def __getitem__(self, _grid: tuple) -> Callable:
            return lambda *given, **named: launches.append((given, named))

    card = triton_attention.Card(132, ARCHITECTURES[architecture].block * 1024, has_matrix_units=True)
    overlap = dict(OVERLAPS=True, launch_pdl=True) if architecture >= 90 else dict(OVERLAPS=False)
    function = getattr(triton_layer, name)
    with mock.patch.multiple(triton_layer, card_of=lambda _device: card, _overlap=lambda _device: overlap,
                             **{name: Launched()}):
        act()
    given, named = launches[-1]
    kinds = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
             torch.uint8: "u8", torch.int8: "i8"}
    types = {n: "*" + kinds[v.dtype] if isinstance(v, torch.Tensor) else "fp32" if isinstance(v, float) else "i32"
             for n, v in zip(function.arg_names, given, strict=False)}
    constants = {n: v for n, v in named.items() if n in function.arg_names}
    return Kernel(function, constants, types, {n: v for n, v in named.items() if n not in constants})


def layer_product(rows: int, size_in: int, sizes: Sequence[int], *, is_gated: bool = False,
                  bits: int = 16) -> Callable[[int, str], Kernel]:
    """With bias, adapters of rank 16 and, but for a gate, what is added."""
    def build(architecture: int, kind: str) -> Kernel:
        from hybrid_rlhf.core.tensors import PackedMatrix
        from hybrid_rlhf.kernels.triton_layer import Matrix, product

        dtype = dict(bf16=torch.bfloat16, fp16=torch.float16)[kind]

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        def weight(size: int) -> torch.Tensor | PackedMatrix:
            if bits == 16:
                return empty(size, size_in)
            table, is_4 = empty(16, dtype=torch.float32) if bits == 4 else None, bits == 4
            return PackedMatrix(
                empty(size * size_in // 2, dtype=torch.uint8) if is_4 else empty(size, size_in, dtype=torch.int8),
                empty(size * size_in // 64 if is_4 else size, dtype=torch.float32), table, torch.Size((size, size_in)))

        matrices = [Matrix(weight(n), empty(n), (empty(16, size_in), empty(n, 16), 0.5)) for n in sizes]
        return layer(architecture, lambda: product(
            empty(rows, size_in), matrices, None if is_gated else empty(rows, sum(sizes)), is_gated=is_gated,
            activation="silu" * is_gated), "_product")

    return build


def layer_row(is_norm: bool) -> Callable[[int, str], Kernel]:
    """LayerNorm of 4,096 numbers; or norm and rotation of a head of 128."""
    def build(architecture: int, kind: str) -> Kernel:
        from hybrid_rlhf.kernels.triton_layer import DecodeLayer

        weight = torch.empty(4096, dtype=dict(bf16=torch.bfloat16, fp16=torch.float16)[kind])
        kernels = object.__new__(DecodeLayer)
        kernels._norms, kernels._norm_biases = [weight, weight, weight[:128], weight[:128]], [weight] * 4
        kernels._eps, kernels._adds_one = 1e-5, False
        if is_norm:
            return layer(architecture, lambda: kernels._norm(0, weight[None]), "_norm_row")
        return layer(architecture, lambda: kernels._place(weight.view(2, 2048), 8, 4, weight[None, :128],
                                                          weight[None, :128]), "_place_heads")

    return build


SIZES = [*((size, size) for size in (64, 80, 96, 112, 128, 192, 256, 512)), (192, 128), (576, 512)]  # of keys, values
SIXTEEN, ALL = ("fp16", "bf16"), ("fp16", "bf16", "fp32")


def cases() -> dict[str, Case]:
    """By name. Where more query heads to a key head than four make no other tiles, they are not compiled again."""
    found = {}
    for dim, value_dim in SIZES:
        size = f"{dim}" if dim == value_dim else f"{dim}/{value_dim}"
        name = f"attend_{size.replace('/', '_')}"
        found[name] = Case(f"attention {size}", SIXTEEN, attend(1, dim, value_dim), 2)
        found[f"{name}_fp32"] = Case(f"attention {size}, fp32", ("fp32",), attend(1, dim, value_dim), 2)
        for group in (4, 64) if dim <= 128 else (4,):
            work = f"attention {size}, {group} heads to a key head"
            found[f"{name}_group{group}"] = Case(work, SIXTEEN, attend(group, dim, value_dim), 2)
    for dim in (64, 128, 256, 512):
        found[f"join_{dim}"] = Case(f"joining 32 parts of {dim}", ALL, join(dim))
    for step, is_plain in (("scan", True), ("scan", False), ("cut", False), ("draw", True), ("draw", False)):
        name, options = (step, "") if is_plain else (f"{step}_truncated", ", all options")
        found[name] = Case(f"sampling, {step}{options}", ALL, sampling(step, is_plain))
    for is_backward, word in ((False, ""), (True, ", backward")):
        end = "_backward" if is_backward else ""
        for size in (128, 4096, 8192):
            found[f"norm_{size}{end}"] = Case(f"norm of {size}{word}", ALL, norm(size, is_backward))
        for is_gelu, name in ((False, "silu"), (True, "gelu")):
            found[f"gate_{name}{end}"] = Case(f"gate, {name}{word}", ALL, gate(is_gelu, is_backward))
        for is_plain, name, options in ((True, "plain", ""), (False, "all", ", entropy and temperature")):
            found[f"scores_{name}{end}"] = Case(f"log-probabilities{options}{word}", ALL, scores(is_plain, is_backward))
    for rows, bits in itertools.product((16, 64), (16, 8, 4)):
        name, work = f"layer_{rows}", f"product of a decode layer, {rows} rows"
        name, work = (name, work) if bits == 16 else (f"{name}_{bits}bit", f"{work}, {bits} bits")
        for end, what, build in (("", "", layer_product(rows, 4096, (4096, 1024, 1024), bits=bits)),
                                 ("_split", ", inputs split", layer_product(rows, 8192, (2048,), bits=bits)),
                                 ("_gated", ", gate", layer_product(rows, 4096, (14336,) * 2, is_gated=True,
                                                                    bits=bits))):
            found[name + end] = Case(work + what, SIXTEEN, build, oldest=80)
    found["layer_norm"] = Case("norm of a decode layer", SIXTEEN, layer_row(is_norm=True), oldest=80)
    found["layer_heads"] = Case("norm and rotation of a decode layer's heads", SIXTEEN, layer_row(is_norm=False),
                                oldest=80)
    found["rotary_128"] = Case("rotary positions, 128", ALL, turn(128))
    return found


# -- compiling ---------------------------------------------------------------------------------------------------------


def compiled(kernel: Kernel, architecture: int) -> dict[str, int]:
    """Registers and bytes spilled of a thread, bytes of shared memory, warps. Every parameter that is neither constant,
    pointer nor float is an integer; pointers and strides are multiples of 16, as they are in use.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, types = kernel.function.arg_names, NUMBERS | POINTERS | kernel.pointers
    signature = {n: "constexpr" if n in kernel.constants else types.get(n, "i32") for n in names}
    places = {n: (i,) for i, n in enumerate(names)}
    aligned = {places[n]: [["tt.divisibility", 16]] for n, t in signature.items() if t[0] == "*" or t == "i32"}
    source = ASTSource(kernel.function, signature, {places[n]: v for n, v in kernel.constants.items()}, aligned)
    said = io.StringIO()
    with (tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope(),
          contextlib.redirect_stdout(said)):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = folder, True
        found = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=kernel.launch)
    if found.asm["cubin"][:4] != b"\x7fELF":
        raise SystemExit(f"{kernel.function.__name__} for sm_{architecture} is no machine code")
    registers, spilled = (int(re.search(pattern, said.getvalue())[1])
                          for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return dict(registers=registers, spilled=spilled, shared=found.metadata.shared, warps=found.metadata.num_warps)


def blocks_of(registers: int, shared: int, warps: int, architecture: int) -> int:
    """Blocks that a processor holds at once; registers are given out 8 a thread to whole warps, and since Ampere the
    system takes 1 KiB of each block's shared memory."""
    limits, reserved = ARCHITECTURES[architecture], 1024 if architecture >= 80 else 0
    by_registers = 65536 // (-(-registers // 8) * 8 * 32) // warps
    by_shared = limits.processor * 1024 // (shared + reserved) if shared + reserved else limits.blocks
    return min(by_registers, by_shared, limits.threads // (32 * warps), limits.blocks)


def faults_of(row: dict, least: int) -> list[str]:
    """What is wrong with one compiled kernel."""
    limit = ARCHITECTURES[row["architecture"]].block * 1024
    return [text for is_wrong, text in (
        (row["shared"] > limit, f"{row['shared']} bytes of shared memory, of {limit}"),
        (row["spilled"] > SPILLED, f"spills {row['spilled']} bytes"),
        (row["blocks"] < least, f"{row['blocks']} blocks to a processor, not {least}")) if is_wrong]


def rows(names: Sequence[str], architectures: Sequence[int]) -> Iterator[dict]:
    """A row for each case, architecture and type; Turing has no bf16."""
    for name in names:
        case = cases()[name]
        for architecture in architectures:
            for kind in case.types:
                if architecture < (80 if kind == "bf16" else case.oldest):
                    continue
                kernel = case.build(architecture, kind)
                use = compiled(kernel, architecture)
                row = {"case": name, "architecture": architecture, "type": kind, "kernel": kernel.function.__name__,
                       **use, "blocks": blocks_of(use["registers"], use["shared"], use["warps"], architecture)}
                row["faults"] = faults_of(row, case.least)
                print(f"{name} sm_{architecture} {kind}: {row['registers']} registers, {row['spilled']} spilled, "
                      f"{row['shared']} bytes, {row['blocks']} blocks{''.join('; ' + f for f in row['faults'])}",
                      flush=True)
                yield row


# -- the page ----------------------------------------------------------------------------------------------------------


def cell_of(found: list[dict]) -> str:
    """The worst of the types: registers, KiB of shared memory, blocks to a processor, and what it spills."""
    registers, shared, spilled = (max(row[key] for row in found) for key in ("registers", "shared", "spilled"))
    text = f"{registers}, {shared / 1024:.0f}, {min(row['blocks'] for row in found)}"
    text += f" ({spilled} spilled)" if spilled else ""
    return f"**{text}**" if any(row["faults"] for row in found) else text


def tables_of(found: list[dict]) -> list[str]:
    limits = table_of(["", "cards", "KiB of a block", "KiB of a processor", "threads", "blocks"],
                      [(f"sm_{a}", *ARCHITECTURES[a]) for a in ARCHITECTURES])
    lines = []
    for name, case in cases().items():
        by = {a: [row for row in found if row["case"] == name and row["architecture"] == a] for a in ARCHITECTURES}
        if any(by.values()):
            lines.append([case.work, *(cell_of(by[a]) if by[a] else None for a in ARCHITECTURES)])
    return [limits, table_of(["", *(f"sm_{a}" for a in ARCHITECTURES)], lines)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, cases())
    parser.add_argument("--architectures", type=int, nargs="+", choices=list(ARCHITECTURES),
                        default=list(ARCHITECTURES))
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    options = harness.parse(parser, argv)
    os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton
    names = options.cases[:1] if options.quick else options.cases
    found = write_rows(rows(names, options.architectures), options.json)
    if options.page:
        write_tables(options.page, *tables_of(found))
    return int(any(row["faults"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
