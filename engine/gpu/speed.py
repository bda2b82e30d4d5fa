"""How fast the kernels are, beside what the device can do: its own copy for bytes, its library's product for operations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from engine.gpu.correctness import Shape, check_decode, prefill_tuned_for, random_pages, tuned_for
from engine.gpu.timing import copy_bytes_per_s, matmul_flops_per_s, seconds_of
from engine.kernels import decode_attention, pointwise, prefill_attention
from engine.kernels.decode_attention import DecodeTuning

MULTIPROCESSOR_BYTES = 228 * 1024  # shared memory of one, compute capability 9
MULTIPROCESSOR_WARPS = 64
HEADS = (32, 8, 128)  # query heads, key/value heads, dimension of an 8B network


class Ceilings(NamedTuple):
    """What the device reaches by its own means, measured in the same sitting."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float


class Sizes(NamedTuple):
    """What to measure. ``decode``: (sequences, context); ``prefill``: (new tokens, tokens before); ``rows``: token rows of the pointwise kernels."""

    copy_bytes: int
    matmul: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    tuned_at: tuple[int, int]
    prefill: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    heads: tuple[int, int, int] = HEADS


LARGE = Sizes(
    4 * 2**30, (4096, 8192), ((1, 8192), (8, 8192), (16, 2048), (64, 1024), (64, 8192), (256, 1024), (256, 2048)), (64, 8192),
    ((512, 0), (2048, 0), (8192, 0), (2048, 6144)), (64, 2048),
)  # fmt: skip
SMALL = Sizes(2**22, (128,), ((2, 48),), (2, 48), ((24, 0),), (4,), (4, 2, 16))


def ceilings(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Ceilings:
    """Measure them."""
    return Ceilings(copy_bytes_per_s(device, sizes.copy_bytes), matmul_flops_per_s(device, dtype, sizes.matmul))


class _Decode:
    """Decode attention of equal contexts, ready to run with any tuning."""

    def __init__(self, sizes: Sizes, sequences: int, context: int, device: torch.device, dtype: torch.dtype) -> None:
        heads, kv_heads, dim = sizes.heads
        g = torch.Generator(device=device).manual_seed(sequences + context)
        self.shape = Shape(heads, kv_heads, dim, 16, (context,) * sequences, dtype=dtype)
        self._pages = random_pages(self.shape, device, g)
        self._q = torch.randn(sequences, heads, dim, generator=g, device=device).to(dtype)
        self._rows = torch.arange(sequences, dtype=torch.int32, device=device)
        self._device = device
        self.bytes = 2 * sequences * context * kv_heads * dim * dtype.itemsize

    def seconds(self, tuning: DecodeTuning, repeats: int) -> float:
        """Median seconds of the kernel and its reduction; the cut, once a step, is not part of it."""
        shape, pages, device = self.shape, self._pages, self._device
        count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        workspace = decode_attention.DecodeWorkspace(len(shape.context), shape.heads, shape.kv_heads, shape.dim, count, device, tuning)
        workspace.cut(pages.context)

        def run() -> None:
            decode_attention.decode_attention(
                self._q, pages.keys, pages.values, pages.table, self._rows, pages.context, workspace, scale=shape.dim**-0.5
            )

        return seconds_of(run, device, repeats=repeats, warm_up=1 if device.type != "cuda" else 3)


def decode_rates(device: torch.device, sizes: Sizes, dtype: torch.dtype, ceiling: Ceilings, repeats: int) -> Iterator[dict[str, Any]]:
    """Bytes of keys and values read per second, and their share of the copy's, with the setting that the engine would take."""
    for sequences, context in sizes.decode:
        case = _Decode(sizes, sequences, context, device, dtype)
        seconds = case.seconds(tuned_for(device), repeats)
        yield {
            "sequences": sequences, "context": context, "seconds": seconds, "bytes_per_s": case.bytes / seconds,
            "of_copy": case.bytes / seconds / ceiling.copy_bytes_per_s,
        }  # fmt: skip


def resident(tuning: DecodeTuning, dim: int, itemsize: int) -> int:
    """Programs of ``tuning`` that a multiprocessor holds: by shared memory (key and value tiles of all stages but one, and the query) and by warps."""
    shared = 2 * tuning.block_n * dim * itemsize * max(1, tuning.stages - 1) + 8 * 1024
    return max(1, min(MULTIPROCESSOR_BYTES // shared, MULTIPROCESSOR_WARPS // tuning.warps))


def candidates(dim: int, itemsize: int) -> list[DecodeTuning]:
    """The settings to try, those near the engine's own first; each with the programs that then fit, and several numbers of waves at the default."""
    default = DecodeTuning()

    def distance(one: DecodeTuning) -> tuple:
        far = abs(one.block_n.bit_length() - default.block_n.bit_length()) + abs(one.warps.bit_length() - default.warps.bit_length())
        return (far + abs(one.stages - default.stages) + abs(one.waves - default.waves), one)

    tiles = [one._replace(resident=resident(one, dim, itemsize)) for one in decode_attention.CANDIDATES]
    waves = [default._replace(waves=count) for count in (2, 4, 8, 12)]
    return sorted([*tiles, *waves], key=distance)


def sweep(device: torch.device, sizes: Sizes, dtype: torch.dtype, ceiling: Ceilings, *, budget_s: float, repeats: int) -> list[dict[str, Any]]:
    """Time the candidates at one shape until the budget is used up, the best first; a candidate that is wrong or does not build says so."""
    case = _Decode(sizes, *sizes.tuned_at, device, dtype)
    deadline_s = time.monotonic() + budget_s
    g = torch.Generator(device=device).manual_seed(1)
    small = Shape(*sizes.heads, 16, (100, 37), dtype=dtype)
    rows: list[dict[str, Any]] = []
    for tuning in candidates(sizes.heads[2], dtype.itemsize):
        if time.monotonic() > deadline_s:
            break
        row: dict[str, Any] = dict(tuning._asdict())
        try:
            check = check_decode(small, device, g, tuning, 8)
            seconds = case.seconds(tuning, repeats)
        except Exception as error:  # too much shared memory, a compiler's refusal: this candidate is out, the others go on
            rows.append(row | {"problem": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"})
            continue
        if not check.passed:
            rows.append(row | {"problem": f"wrong by {check.error:.1e}"})
            continue
        rows.append(row | {"seconds": seconds, "of_copy": case.bytes / seconds / ceiling.copy_bytes_per_s})
    return sorted(rows, key=lambda row: row.get("seconds", float("inf")))


def prefill_rates(device: torch.device, sizes: Sizes, dtype: torch.dtype, ceiling: Ceilings, repeats: int) -> Iterator[dict[str, Any]]:
    """Operations of causal attention (two products over the pairs that are seen) per second, and their share of the library's product."""
    heads, kv_heads, dim = sizes.heads
    for new, before in sizes.prefill:
        g = torch.Generator(device=device).manual_seed(new)
        pages = random_pages(Shape(heads, kv_heads, dim, 16, (new + before,), dtype=dtype), device, g)
        q = torch.randn(new, heads, dim, generator=g, device=device).to(dtype)
        rows, starts = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([0, new], dtype=torch.int32, device=device)
        tuning = prefill_tuned_for(device)

        def run(q=q, pages=pages, rows=rows, starts=starts, new=new, tuning=tuning) -> None:
            prefill_attention.prefill_attention(
                q, pages.keys, pages.values, pages.table, rows, pages.context, starts, new, scale=dim**-0.5, tuning=tuning
            )

        seconds = seconds_of(run, device, repeats=repeats, warm_up=1 if device.type != "cuda" else 3)
        flops = 4 * heads * dim * (new * before + new * (new + 1) / 2)
        yield {"new": new, "before": before, "seconds": seconds, "flops_per_s": flops / seconds, "of_matmul": flops / seconds / ceiling.matmul_flops_per_s}


def pointwise_rates(device: torch.device, sizes: Sizes, dtype: torch.dtype, ceiling: Ceilings, repeats: int) -> Iterator[dict[str, Any]]:
    """Bytes read and written per second by the kernels that only move data, and their share of the copy's."""
    heads, _, dim = sizes.heads
    hidden, wide = heads * dim, heads * dim * 7 // 2
    for rows in sizes.rows:
        x, residual = (torch.randn(rows, hidden, device=device).to(dtype) for _ in range(2))
        gate_up, weight = torch.randn(rows, 2 * wide, device=device).to(dtype), torch.ones(hidden, device=device, dtype=dtype)
        runs: Sequence[tuple[str, int, Any]] = (
            ("add_rmsnorm", 4 * x.nbytes, lambda x=x, r=residual, w=weight: pointwise.add_rmsnorm(x, r, w, 1e-5)),
            ("silu_mul", gate_up.nbytes * 3 // 2, lambda g=gate_up: pointwise.silu_mul(g)),
        )
        for name, moved, run in runs:
            seconds = seconds_of(run, device, repeats=repeats, warm_up=1 if device.type != "cuda" else 3)
            yield {"kernel": name, "rows": rows, "seconds": seconds, "bytes_per_s": moved / seconds, "of_copy": moved / seconds / ceiling.copy_bytes_per_s}
