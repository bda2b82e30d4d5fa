"""Timing on a device, and how far a result is from its reference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def seconds_of(run: Callable[[], object], device: torch.device, *, repeats: int = 30, warm_up: int = 3) -> float:
    """Median seconds of ``run`` on ``device``. On CUDA by device events around each call, behind enough queued work that launching is hidden."""
    for _ in range(warm_up):
        run()
    if device.type != "cuda":
        found = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
        return statistics.median(found)
    flush = torch.empty(2**30, dtype=torch.int8, device=device)  # larger than any L2, and long enough to launch ``run`` behind it
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    for begin, end in events:
        flush.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in events)


def relative_error(found: Tensor, reference: Tensor) -> float:
    """|found - reference| / |reference|, in float64; infinite where ``found`` holds anything that is not finite."""
    if not torch.isfinite(found).all():
        return float("inf")
    wide = reference.double()
    return ((found.double() - wide).norm() / wide.norm()).item()


def copy_bytes_per_s(device: torch.device, size_bytes: int) -> float:
    """Bytes read and written per second by the device's own copy of ``size_bytes``."""
    source = torch.randint(0, 127, (size_bytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / seconds_of(lambda: target.copy_(source), device)


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> float:
    """Best rate of a square product over ``sizes``, on random data (zeros run faster than anything real)."""
    best = 0.0
    for size in sizes:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty(size, size, dtype=dtype, device=device)
        best = max(best, 2 * size**3 / seconds_of(lambda a=left, b=right, c=out: torch.mm(a, b, out=c), device, repeats=10))
    return best
