"""Chunked-prefill attention over pages in Triton: a tile of new tokens of one sequence against all its cached ones.

A program takes ``block_q`` tokens with all query heads of one key/value head as the rows of one product, so that grouped
heads share every KV tile. Tiles below the diagonal run without a mask; only the last few are masked. Later tiles see more
context, so they come first in the grid. The chunk's own keys and values must be in the pages already.
Meaning and shapes: ``engine.kernels.reference.prefill_attention``, here for several chunks at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.decode_attention import LOG2_E
from engine.kernels.interpreting import INTERPRETING


class PrefillTuning(NamedTuple):
    """Rows (tokens × padded group) and KV tokens of a tile, warps and pipeline stages."""

    block_m: int = 128
    block_n: int = 64
    warps: int = 8
    stages: int = 3


#: Candidates for a device run to time; every one must pass the same checks.
CANDIDATES = tuple(PrefillTuning(block_m=m, block_n=n, warps=w, stages=s) for m in (64, 128) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3))


def prefill_tuning(major: int) -> PrefillTuning:
    """Return the start for a device of compute capability ``major``: without wgmma a KV tile of 64 does not fit the registers."""
    return PrefillTuning() if major >= 9 else PrefillTuning(block_n=32)


@triton.jit
def _prefill_tile(
    acc, total, best, page, query, slope, query_position, start, end, pages, key_cache, value_cache, scale, page_stride, token_stride, offset, dim,
    DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    key = start + tl.arange(0, BLOCK_N)
    readable = (key < end)[:, None] & (dim < DIM)[None, :]
    at = (page.to(tl.int64) * page_stride + (key % BLOCK_TOKENS) * token_stride + offset)[:, None] + dim[None, :]
    # The next tile's page ids come one turn early: the pipeline's stages then all go to keys and values.
    page = tl.load(pages + (key + BLOCK_N) // BLOCK_TOKENS, mask=key + BLOCK_N < end, other=0)
    k = tl.load(key_cache + at, mask=readable, other=0.0)
    v = tl.load(value_cache + at, mask=readable, other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    if ALIBI:
        score += slope[:, None] * (key[None, :] - query_position[:, None]).to(tl.float32)
    if MASKED:
        seen = key[None, :] <= query_position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > query_position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
    peak = tl.maximum(best, tl.max(score, 1))
    # A row may have seen no key yet (a window that starts later): keep its exponent finite.
    floor = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score - floor[:, None])
    shrink = tl.exp2(best - floor)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return acc, total, peak, page


@triton.jit
def prefill_kernel(
    q, key_cache, value_cache, table, rows, context, starts, out, slopes,
    scale, q_stride, page_stride, token_stride, table_stride, out_stride,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    first = tl.load(starts + chunk)
    count = tl.load(starts + chunk + 1) - first
    if tile * BLOCK_Q >= count:
        return
    before = tl.load(context + chunk) - count
    row = tl.arange(0, BLOCK_Q * GROUP_PAD)
    token = tile * BLOCK_Q + row // GROUP_PAD
    head = kv_head * GROUP + row % GROUP_PAD
    dim = tl.arange(0, DIM_PAD)
    inside = ((token < count) & (row % GROUP_PAD < GROUP))[:, None] & (dim < DIM)[None, :]
    query = tl.load(q + (first + token).to(tl.int64)[:, None] * q_stride + head[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    slope = tl.zeros([BLOCK_Q * GROUP_PAD], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=row % GROUP_PAD < GROUP, other=0.0) * 1.4426950408889634
    pages = table + tl.load(rows + chunk).to(tl.int64) * table_stride
    query_position = before + token
    lowest = before + tile * BLOCK_Q
    end = before + tl.minimum(tile * BLOCK_Q + BLOCK_Q, count)
    best = tl.full([BLOCK_Q * GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * GROUP_PAD], tl.float32)
    acc = tl.zeros([BLOCK_Q * GROUP_PAD, DIM_PAD], tl.float32)
    # With a window every tile is masked, from the first key that the tile's first token sees; else only those at the diagonal.
    clear = (lowest + 1) // BLOCK_N * BLOCK_N
    first_key = 0
    if WINDOW > 0:
        clear = tl.maximum(lowest - WINDOW + 1, 0)
        first_key = clear
    ahead = first_key + tl.arange(0, BLOCK_N)
    page = tl.load(pages + ahead // BLOCK_TOKENS, mask=ahead < end, other=0)
    if WINDOW == 0:
        for start in range(0, clear, BLOCK_N):
            acc, total, best, page = _prefill_tile(
                acc, total, best, page, query, slope, query_position, start, end, pages, key_cache, value_cache, scale, page_stride, token_stride, kv_head * DIM, dim,
                DIM, BLOCK_TOKENS, BLOCK_N, WINDOW, ALIBI, False, UPCAST,
            )  # fmt: skip
    for start in range(clear, end, BLOCK_N):
        acc, total, best, page = _prefill_tile(
            acc, total, best, page, query, slope, query_position, start, end, pages, key_cache, value_cache, scale, page_stride, token_stride, kv_head * DIM, dim,
            DIM, BLOCK_TOKENS, BLOCK_N, WINDOW, ALIBI, True, UPCAST,
        )  # fmt: skip
    # A row beyond the chunk's end may have seen nothing; it is not stored, but 0/0 must not trap.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + (first + token).to(tl.int64)[:, None] * out_stride + head[:, None] * DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)


def prefill_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, rows: Tensor, context: Tensor, starts: Tensor, longest: int, *,
    scale: float, window: int = 0, slopes: Tensor | None = None, tuning: PrefillTuning | None = None,
) -> Tensor:  # fmt: skip
    """Attend the chunks of ``q`` [T, H, D], chunk c being rows ``starts[c]`` to ``starts[c + 1]`` (int32 [C + 1]).

    ``rows``, ``context`` int32 [C]: table row and cached tokens, the chunk's included; ``longest``: tokens of the longest chunk.
    """
    tuning = tuning or PrefillTuning()
    tokens, heads, dim = q.shape
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    group_pad = triton.next_power_of_2(group)
    block_q = max(tuning.block_m // group_pad, 1 if group_pad >= 16 else 16 // group_pad)
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    prefill_kernel[(triton.cdiv(longest, block_q), kv_heads, rows.shape[0])](
        q, key_cache, value_cache, table, rows, context, starts, out, out if slopes is None else slopes,
        scale * LOG2_E, q.stride(0), key_cache.stride(0), key_cache.stride(1), table.stride(0), out.stride(0),
        GROUP=group, GROUP_PAD=group_pad, DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)), BLOCK_TOKENS=key_cache.shape[1],
        BLOCK_Q=block_q, BLOCK_N=tuning.block_n, WINDOW=window, ALIBI=slopes is not None, UPCAST=INTERPRETING,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    return out
