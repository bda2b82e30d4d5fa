"""Compile every kernel ahead of time for sm_80 and sm_90, which needs no GPU, and report what the code uses.

``python -m engine.kernels.aot [--json] [--arch 80 90]``. Not possible in Triton's interpreter (``TRITON_INTERPRET=1``): then the kernels are
Python functions. Compiled code is cached by Triton, so a second report is quick.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.chosen import BLOCK_I, BLOCK_O, BLOCK_T, chosen_kernel
from engine.kernels.decode_attention import decode_kernel, decode_tuning, reduce_kernel
from engine.kernels.interpreting import INTERPRETING
from engine.kernels.pointwise import kv_write_kernel, rmsnorm_kernel, rope_kernel, silu_mul_kernel
from engine.kernels.prefill_attention import prefill_kernel, prefill_tuning

ARCHITECTURES = (80, 90)


class Specimen(NamedTuple):
    """A kernel with the argument types and constants to compile it for; pointers and strides are taken as divisible by 16, as they are in use."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int


class Resources(NamedTuple):
    """What one compiled kernel uses: registers and spilled bytes a thread, shared memory bytes a program, the kind of tensor-core instruction.

    Spills are the stack of the final code: these kernels index no local array, so nothing else can be on it.
    """

    kernel: str
    arch: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    tensor_core: str
    warps: int
    stages: int
    compile_s: float


def specimens(arch: int) -> list[Specimen]:
    """Return the kernels as ``sm_<arch>`` would run them at an 8B Llama's shapes in bfloat16: 32 query and 8 key/value heads of 128, pages of 16 tokens."""
    decode, prefill = decode_tuning(arch // 10), prefill_tuning(arch // 10)
    pages = {"key_cache": "*bf16", "value_cache": "*bf16", "table": "*i32", "rows": "*i32", "context": "*i32"}
    strides = dict.fromkeys(("q_stride", "page_stride", "token_stride", "table_stride", "out_stride"), "i32")
    tail = {"out": "*bf16", "slopes": "*fp32", "scale": "fp32"} | strides
    common = {"GROUP": 4, "DIM": 128, "DIM_PAD": 128, "BLOCK_TOKENS": 16, "WINDOW": 0, "ALIBI": False, "UPCAST": False}
    split = {"split_tokens": "*i32", "partial": "*fp32", "partial_lse": "*fp32"}
    return [
        Specimen(
            "decode_attention", decode_kernel, {"q": "*bf16"} | pages | split | tail, common | {"GROUP_PAD": 16, "BLOCK_N": decode.block_n, "MAX_SPLITS": 8}, decode.warps, decode.stages
        ),
        Specimen(
            "decode_reduce", reduce_kernel,
            {"partial": "*fp32", "partial_lse": "*fp32", "context": "*i32", "split_tokens": "*i32", "out": "*bf16", "out_stride": "i32"},
            {"DIM": 128, "DIM_PAD": 128, "MAX_SPLITS": 8, "SPLITS_PAD": 8, "WINDOW": 0}, 2, 1,
        ),
        Specimen(
            "prefill_attention", prefill_kernel, {"q": "*bf16"} | pages | {"starts": "*i32"} | tail,
            common | {"GROUP_PAD": 4, "BLOCK_Q": prefill.block_m // 4, "BLOCK_N": prefill.block_n}, prefill.warps, prefill.stages,
        ),
        Specimen(
            "kv_write", kv_write_kernel,
            {"keys": "*bf16", "values": "*bf16", "key_cache": "*bf16", "value_cache": "*bf16", "slots": "*i32", "key_stride": "i32", "value_stride": "i32"},
            {"WIDTH": 1024, "BLOCK": 1024}, 4, 1,
        ),
        Specimen(
            "add_rmsnorm", rmsnorm_kernel, {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32", "width": "i32"},
            {"ADD": True, "BLOCK": 4096}, 8, 1,
        ),
        Specimen(
            "rope", rope_kernel, {"heads": "*bf16", "positions": "*i32", "cos": "*fp32", "sin": "*fp32", "token_stride": "i32"},
            {"HEADS": 40, "HEADS_PAD": 64, "HALF": 64, "HALF_PAD": 64, "INT8": False}, 4, 1,
        ),
        *(
            Specimen(
                name, chosen_kernel,
                {"x": "*bf16", "w": "*bf16", "out": "*bf16", "chosen": "*i32"}
                | dict.fromkeys(("rows", "x_stride", "out_stride", "matrix_stride", "width", "second", "third", "end"), "i32"),
                {"ADD": name == "lora_expand", "BLOCK_T": BLOCK_T, "BLOCK_O": BLOCK_O, "BLOCK_I": block_i, "UPCAST": False}, 4, 3,
            )
            for name, block_i in (("chosen_matrix", BLOCK_I), ("lora_expand", 16))
        ),
        Specimen("silu_mul", silu_mul_kernel, {"gate_up": "*bf16", "out": "*bf16", "width": "i32"}, {"BLOCK": 1024}, 4, 1),
    ]  # fmt: skip


def missing_tool() -> str:
    """Return the name of a CUDA tool that this Triton's wheel lacks (the assembler, or the reader of its output), or ''."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return next((name for name in ("ptxas", "cuobjdump") if not (folder / name).is_file()), "")


def compile_one(specimen: Specimen, arch: int) -> Resources:
    """Compile one kernel for ``sm_<arch>`` and read its resources from the assembler's own report."""
    begin = time.perf_counter()
    names = specimen.kernel.arg_names
    signature = {name: "constexpr" if name in specimen.constants else specimen.types[name] for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in specimen.types.items()
        if kind.startswith("*") or name.endswith("stride") or name == "width"
    }
    source = ASTSource(fn=specimen.kernel, signature=signature, constexprs=specimen.constants, attrs=aligned)
    options = {"num_warps": specimen.warps, "num_stages": specimen.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spills = _used(compiled.asm["cubin"])
    unit = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "none"
    return Resources(
        specimen.name, arch, registers, compiled.metadata.shared, spills, unit, specimen.warps, specimen.stages, time.perf_counter() - begin
    )


def _used(cubin: bytes) -> tuple[int, int]:
    """Return (registers, bytes of stack) of the one kernel in the final code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def report(architectures: Sequence[int] = ARCHITECTURES) -> list[Resources]:
    """Compile every kernel for every architecture. Raises RuntimeError in the interpreter and without an assembler."""
    if INTERPRETING:
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET=1")
    if missing_tool():
        raise RuntimeError(f"this Triton has no {missing_tool()}")
    return [compile_one(specimen, arch) for arch in architectures for specimen in specimens(arch)]


def main() -> None:
    """Print the report as a table, or as JSON."""
    parser = argparse.ArgumentParser(description="Compile the engine's kernels without a GPU and report their resources.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arch", type=int, nargs="*", default=list(ARCHITECTURES))
    arguments = parser.parse_args()
    rows = report(arguments.arch)
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows]))
        return
    print(f"{'kernel':<18} {'arch':>5} {'registers':>9} {'shared B':>9} {'spill B':>8} {'tensor core':>11} {'warps':>5} {'stages':>6} {'compile s':>9}")
    for r in rows:
        print(f"{r.kernel:<18} sm_{r.arch:<2} {r.registers:>9} {r.shared_bytes:>9} {r.spill_bytes:>8} {r.tensor_core:>11} {r.warps:>5} {r.stages:>6} {r.compile_s:>9.2f}")


if __name__ == "__main__":
    main()
