"""Paged decode attention in Triton: one query per sequence, the context split over programs, then a reduction.

Decode attention reads every cached key and value once and does few operations on them, so the design serves bandwidth:

- A program takes one key/value head with *all* query heads that share it, padded to 16 rows: the KV bytes are read once
  per group and the products run on the tensor cores instead of competing with the loads for issue slots.
- Key/value heads are the fastest grid axis: programs that run together read neighbouring segments of the same pages.
- The context is cut so that about ``waves`` programs per resident slot exist, whatever the batch: the length of a cut is computed on the
  device once a step (``split_tokens``), because a captured graph fixes the grid (``max_splits``) but not the contexts. Programs beyond the end of their sequence return at once.
- ``num_stages`` asks for asynchronous copies of the next tiles while this one is multiplied; page ids are part of that pipeline.

Softmax runs in base 2 (one multiplication less), with the scale folded in. Meaning and shapes: ``engine.kernels.reference.decode_attention``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.interpreting import INTERPRETING

LOG2_E = 1.4426950408889634


class DecodeTuning(NamedTuple):
    """What may be tuned per device without changing the result's meaning: KV tokens a tile, warps, pipeline stages, residency."""

    block_n: int = 64
    warps: int = 4
    stages: int = 3
    resident: int = 3  # programs that fit a multiprocessor of 228 KiB: two pairs of tiles of 64 x 128 in bfloat16 and the rest are 70 KiB
    waves: int = 6  # programs per resident slot; more balance uneven contexts, fewer cost less reduction
    split_limit: int = 64


#: Candidates for a device run to time; every one must pass the same checks.
CANDIDATES = tuple(DecodeTuning(block_n=n, warps=w, stages=s) for n in (32, 64, 128) for w in (2, 4, 8) for s in (2, 3, 4))


def decode_tuning(major: int) -> DecodeTuning:
    """Return the start for a device of compute capability ``major``: before 9 a multiprocessor has 164 KiB of shared memory."""
    return DecodeTuning() if major >= 9 else DecodeTuning(resident=2)


@triton.jit
def _first_key(length, WINDOW: tl.constexpr):
    return tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0


@triton.jit
def decode_kernel(
    q, key_cache, value_cache, table, rows, context, split_tokens, partial, partial_lse, out, slopes,
    scale, q_stride, page_stride, token_stride, table_stride, out_stride,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(context + sequence)
    span = tl.load(split_tokens)
    begin = _first_key(length, WINDOW) + split * span
    end = tl.minimum(begin + span, length)
    if begin >= end:
        return
    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + group
    inside = (group < GROUP)[:, None] & (dim < DIM)[None, :]
    query = tl.load(q + sequence.to(tl.int64) * q_stride + head[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    slope = tl.zeros([GROUP_PAD], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=group < GROUP, other=0.0) * 1.4426950408889634
    pages = table + tl.load(rows + sequence).to(tl.int64) * table_stride
    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    key = begin + tl.arange(0, BLOCK_N)
    page = tl.load(pages + key // BLOCK_TOKENS, mask=key < end, other=0)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        valid = key < end
        at = (page.to(tl.int64) * page_stride + (key % BLOCK_TOKENS) * token_stride + kv_head * DIM)[:, None] + dim[None, :]
        # The next tile's page ids come one turn early: the pipeline's stages then all go to keys and values.
        page = tl.load(pages + (key + BLOCK_N) // BLOCK_TOKENS, mask=key + BLOCK_N < end, other=0)
        readable = valid[:, None] & (dim < DIM)[None, :]
        k = tl.load(key_cache + at, mask=readable, other=0.0)
        v = tl.load(value_cache + at, mask=readable, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if ALIBI:
            score += slope[:, None] * (key - length + 1)[None, :].to(tl.float32)
        score = tl.where(valid[None, :], score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - peak[:, None])
        shrink = tl.exp2(best - peak)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        best = peak
    acc = acc / total[:, None]
    if MAX_SPLITS == 1:
        tl.store(out + sequence.to(tl.int64) * out_stride + head[:, None] * DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:
        row = (sequence.to(tl.int64) * tl.num_programs(0) * GROUP + head) * MAX_SPLITS + split
        tl.store(partial + row[:, None] * DIM + dim[None, :], acc, mask=inside)
        tl.store(partial_lse + row, best + tl.log2(total), mask=group < GROUP)


@triton.jit
def reduce_kernel(
    partial, partial_lse, context, split_tokens, out, out_stride,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    length = tl.load(context + sequence)
    used = tl.cdiv(length - _first_key(length, WINDOW), tl.load(split_tokens))
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, DIM_PAD)
    row = (sequence * tl.num_programs(0) + head) * MAX_SPLITS + split
    lse = tl.load(partial_lse + row, mask=split < used, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    mask = (split < used)[:, None] & (dim < DIM)[None, :]
    part = tl.load(partial + row[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    merged = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + sequence * out_stride + head * DIM + dim, merged.to(out.dtype.element_ty), mask=dim < DIM)


def max_splits(batch: int, kv_heads: int, multiprocessors: int, tuning: DecodeTuning) -> int:
    """Return the grid's split axis for ``batch`` sequences: twice the even share, so that one long context can be cut finer.

    A power of two, at most ``split_limit``; 1 once batch and heads alone make enough programs. Depends on the bucket only.
    """
    target = multiprocessors * tuning.resident * tuning.waves
    programs = batch * kv_heads
    if programs >= target:
        return 1
    return min(tuning.split_limit, triton.next_power_of_2(2 * triton.cdiv(target, programs)))


class DecodeWorkspace:
    """The buffers that decode attention reuses in every layer and step: partial results and the length of a split.

    Allocated once for the largest batch, so that captured graphs keep their addresses. Bytes: 4 · batch · heads · splits · (dim + 1).
    """

    def __init__(self, batch: int, heads: int, kv_heads: int, dim: int, multiprocessors: int, device: torch.device, tuning: DecodeTuning) -> None:
        self.tuning = tuning
        self.kv_heads = kv_heads
        self.multiprocessors = multiprocessors
        rows = max(size * max_splits(size, kv_heads, multiprocessors, tuning) for size in range(1, batch + 1))
        self.partial = torch.empty(rows * heads * dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows * heads, dtype=torch.float32, device=device)
        self.split_tokens = torch.empty(1, dtype=torch.int32, device=device)

    def splits(self, batch: int) -> int:
        """Return the grid's split axis for ``batch`` sequences."""
        return max_splits(batch, self.kv_heads, self.multiprocessors, self.tuning)

    def cut(self, context: Tensor) -> None:
        """Set ``split_tokens`` on the device from the contexts [S]: an even share of all work, coarse enough for the grid.

        Torch operations without a host value, so it can be part of a captured graph; once a step, not once a layer.
        """
        splits, tile = self.splits(context.shape[0]), self.tuning.block_n
        target = self.multiprocessors * self.tuning.resident * self.tuning.waves
        share = context.sum(dtype=torch.int64) * self.kv_heads // target + 1
        least = (context.amax().long() + splits - 1) // splits
        self.split_tokens.copy_((torch.maximum(share, least) + tile - 1) // tile * tile)


def decode_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, rows: Tensor, context: Tensor, workspace: DecodeWorkspace, *,
    scale: float, window: int = 0, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend ``q`` [S, H, D] to the pages of ``table[rows]``; ``workspace.cut(context)`` must have run for these contexts."""
    batch, heads, dim = q.shape
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    tuning = workspace.tuning
    splits = workspace.splits(batch)
    out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device)
    dim_pad = max(16, triton.next_power_of_2(dim))
    decode_kernel[(kv_heads, batch, splits)](
        q, key_cache, value_cache, table, rows, context, workspace.split_tokens, workspace.partial, workspace.lse, out, out if slopes is None else slopes,
        scale * LOG2_E, q.stride(0), key_cache.stride(0), key_cache.stride(1), table.stride(0), out.stride(0),
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), DIM=dim, DIM_PAD=dim_pad, BLOCK_TOKENS=key_cache.shape[1], BLOCK_N=tuning.block_n,
        MAX_SPLITS=splits, WINDOW=window, ALIBI=slopes is not None, UPCAST=INTERPRETING, num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    if splits > 1:
        reduce_kernel[(heads, batch)](
            workspace.partial, workspace.lse, context, workspace.split_tokens, out, out.stride(0),
            DIM=dim, DIM_PAD=dim_pad, MAX_SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), WINDOW=window, num_warps=2,
        )  # fmt: skip
    return out
