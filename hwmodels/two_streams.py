"""What a step costs whose decodes and prompts run on two streams of one GPU.

Alone, the decodes would take T_d and the prompts T_p, which keep the arithmetic units busy for C and the memory for M seconds.
Together they can take no less than either alone, nor than either resource needs for both:

    ideal  = max(T_d, T_p, C_d + C_p, M_d + M_p)        serial = T_d + T_p
    step   = ideal + contention (serial - ideal)

``contention`` is the share of the possible overlap that is lost: kernels take SMs, cache and bandwidth from each other at finer
grain than these sums. 0 is a perfect overlap, 1 none. It depends on kernels and GPU and must be measured; nothing here derives it.
"""

from __future__ import annotations

from typing import NamedTuple


class Stream(NamedTuple):
    """One stream's part of a step, alone on the GPU: its time and how long it keeps compute and memory busy, seconds."""

    seconds: float
    compute_s: float
    memory_s: float


def overlapped_s(one: Stream, other: Stream, contention: float) -> float:
    """Seconds until both streams are done."""
    ideal = max(one.seconds, other.seconds, one.compute_s + other.compute_s, one.memory_s + other.memory_s)
    return ideal + contention * max(0.0, one.seconds + other.seconds - ideal)
