"""Compiles the Triton kernels for a Hopper card without one, down to machine code; prints what each needs. Run by
tests/kernels/test_kernels_triton.py in a process of its own, with Triton's interpreter off.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybrid_rlhf.kernels import triton_attention as attention
from hybrid_rlhf.kernels import triton_sampling as sampling

SHARED_MEMORY = 99 * 1024  # bytes that a block may have on every card since Ampere's small ones
POINTERS = dict(slots="*i64", positions="*i64", mask="*i1", maxima="*fp32", totals="*fp32", seen="*i1", forbidden="*i1",
                streams="*i64", sums="*fp32", found="*i32", logprobs="*fp32", parts="*fp32")
NUMBERS = dict(scaling="fp32", softcap="fp32", temperature="fp32", penalty="fp32", top_p="fp32", min_p="fp32")


def compiled(function, constants: dict, pointers: dict[str, str], **options: int) -> None:
    """Every other parameter is an integer; pointers and strides are multiples of 16, as they are in use."""
    types = NUMBERS | POINTERS | pointers
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in function.arg_names}
    places = {n: (i,) for i, n in enumerate(function.arg_names)}
    aligned = {places[n]: [["tt.divisibility", 16]] for n, t in signature.items() if t[0] == "*" or t == "i32"}
    source = ASTSource(function, signature, {places[n]: v for n, v in constants.items()}, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    assert kernel.metadata.shared <= SHARED_MEMORY, kernel.metadata.shared
    print(f"{function.__name__}: {kernel.metadata.shared} bytes of shared memory", flush=True)


def attend(group: int, dim: int, value_dim: int, dtype: str, splits: int, has_all: bool) -> None:
    is_grouped = group > 1 and dtype != "*fp32"
    constants = dict(attention.blocks(group if is_grouped else 1, dim, value_dim), DIM=dim, VALUE_DIM=value_dim,
                     GROUP=group, NUM_SPLITS=splits, HAS_MASK=has_all, HAS_SINKS=has_all, HAS_SOFTCAP=has_all)
    pointers = dict.fromkeys(("query", "key", "value", "keys", "values", "sinks"), dtype)
    pointers["out"] = dtype if splits == 1 else "*fp32"
    function = attention._attend_grouped if is_grouped else attention._attend_single
    compiled(function, constants, pointers, **(dict(num_warps=4, num_stages=2) if is_grouped else dict(num_warps=8)))


def main() -> None:
    attend(1, 64, 64, "*bf16", 1, has_all=False)  # OPT
    attend(1, 80, 80, "*fp32", 3, has_all=True)
    attend(8, 128, 128, "*bf16", 3, has_all=True)  # Llama
    attend(71, 64, 64, "*bf16", 1, has_all=False)  # Falcon: more heads than one tile
    compiled(attention._join, dict(VALUE_DIM=128, BLOCK_V=128, NUM_SPLITS=3, BLOCK_S=4, HAS_SINKS=True),
             dict(sinks="*bf16", out="*bf16"), num_warps=4)
    flags = dict(HAS_SEEN=True, HAS_FORBIDDEN=True, TEMPERED=True, TRUNCATED=True)
    compiled(sampling._scan, dict(CHUNK=2048, GREEDY=False, **flags), dict(logits="*bf16"), num_warps=4)
    compiled(sampling._draw, dict(CHUNKS=32, TOP_K=50, HAS_TOP_P=True, BLOCK=4096, **flags),
             dict(logits="*bf16", out="*i64"), num_warps=16)


if __name__ == "__main__":
    main()
