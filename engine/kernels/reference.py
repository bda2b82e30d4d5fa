"""What every kernel must compute, in plain torch: the meaning of the Triton kernels and the CPU's own path.

Shapes: T tokens, S sequences, H query heads, K key/value heads (H a multiple of K), D head dimension, W hidden size.
A cache is ``[blocks, block_tokens, K, D]``, a tensor or ``engine.kv_formats.NarrowPages``; ``table`` is int32 ``[S, columns]`` of block ids, one row per sequence. Arithmetic
is float32 at least (float64 when the inputs are), so the same functions on upcast inputs give the reference of a test.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 32  # rows of a step whose adapters are gathered; more are grouped by adapter


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) · weight`` over the last axis (Zhang and Sennrich 2019)."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm of ``residual + x``, ``residual + x``): the pre-norm transformer's only two uses of the sum."""
    residual = residual + x
    return rmsnorm(residual, weight, eps), residual


def rope(heads: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``heads`` [T, heads, D] by its ``positions`` [T]; element i pairs with i + D/2. ``cos``/``sin`` [positions, D/2].

    An int8 table holds round(127 · value): a quarter of the bytes, at most 1/254 off.
    """
    at = positions.long()
    wide = torch.promote_types(heads.dtype, torch.float32)
    c, s = cos[at].to(wide)[:, None, :], sin[at].to(wide)[:, None, :]
    if cos.dtype == torch.int8:
        c, s = c / 127, s / 127
    first, second = heads.to(wide).chunk(2, dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(heads.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) · up`` of the two halves of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def add_adapters(y: Tensor, x: Tensor, a: Tensor, b: Tensor, widths: tuple[int, ...], adapters: Tensor) -> None:
    """Add to ``y`` [T, outputs], in place, what the LoRA adapter of each row makes of ``x`` [T, inputs] (Hu et al. 2021).

    ``adapters`` [T] are slots, -1: none. Slot s holds A = ``a[s]`` [parts · rank, inputs] and B = ``b[s]`` [outputs, rank]; part p, the p-th of ``widths``
    outputs, adds its rows of B times its rows of A times x.
    """
    rank = b.shape[2]
    if len(adapters) <= FEW_ROWS:  # every row brings its own factors
        slots = adapters.clamp(min=0).long()
        low = torch.bmm(_wide(a[slots]), _wide(x)[:, :, None])
        parts = zip(low.split(rank, dim=1), _wide(b[slots]).split(widths, dim=1))
        added = torch.cat([torch.bmm(factor, one) for one, factor in parts], dim=1)[:, :, 0]
        y += added.masked_fill(adapters[:, None] < 0, 0).to(y.dtype)
        return
    for slot in adapters.unique().tolist():
        if slot < 0:
            continue
        rows = (adapters == slot).nonzero()[:, 0]
        low = _wide(x[rows]) @ _wide(a[slot]).T
        parts = zip(low.split(rank, dim=1), _wide(b[slot]).split(widths))
        y[rows] = (_wide(y[rows]) + torch.cat([one @ factor.T for one, factor in parts], dim=1)).to(y.dtype)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, share: Tensor, *, fixed: bool) -> Tensor:
    """Sum over each row's ``chosen`` experts [T, k] (-1: dropped, not computed) of their SwiGLU of ``x`` [T, hidden] times ``share`` [T, k].

    ``gate_up`` [E, 2·I, hidden], ``down`` [E, hidden, I]. ``fixed``: all experts compute all rows, so that shapes do not depend on the choice, as a captured graph needs.
    """
    if fixed:
        out = torch.matmul(silu_mul(torch.matmul(x[None], gate_up.transpose(1, 2))), down.transpose(1, 2))
        weight = torch.zeros(x.shape[0], len(down), dtype=x.dtype, device=x.device)
        weight.scatter_add_(1, chosen.clamp(min=0), share.masked_fill(chosen < 0, 0))
        return torch.einsum("eth,te->th", out, weight)
    out = torch.zeros_like(x)
    for expert in range(len(down)):
        token, rank = (chosen == expert).nonzero(as_tuple=True)
        if token.numel():
            value = F.linear(silu_mul(F.linear(x[token], gate_up[expert])), down[expert])
            out = out.index_add(0, token, value * share[token, rank, None])
    return out


def kv_write(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store ``keys`` and ``values`` [T, K, D] at ``slots`` [T]; a slot is block · block_tokens + offset. In place."""
    at = slots.long()
    if not isinstance(key_cache, Tensor):  # narrow pages
        key_cache.store(keys, at)
        value_cache.store(values, at)
        return
    key_cache.view(-1, *key_cache.shape[2:])[at] = keys.to(key_cache.dtype)
    value_cache.view(-1, *value_cache.shape[2:])[at] = values.to(value_cache.dtype)


def _gather(cache: Tensor, table: Tensor, tokens: int) -> Tensor:
    """Return the first ``tokens`` entries of each sequence, [S, tokens, K, D]."""
    blocks = -(-tokens // cache.shape[1])
    pages = cache.index_select(0, table[:, :blocks].reshape(-1).long())
    return pages.view(table.shape[0], blocks * cache.shape[1], *cache.shape[2:])[:, :tokens]


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of q [S, Q, H, D] over k, v [S, L, K, D] where ``allowed`` [S, Q, L]; ``bias`` [S, H, Q, L] is added."""
    mask = allowed[:, None]
    if bias is not None:
        mask = bias.masked_fill(~mask, float("-inf")).to(q.dtype)
    grouped = k.shape[2] != q.shape[2]
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _visible(query_positions: Tensor, tokens: int, window: int) -> Tensor:
    """Return which of ``tokens`` keys each query position sees: its own and earlier ones, at most ``window`` of them if not 0."""
    keys = torch.arange(tokens, device=query_positions.device)
    seen = keys <= query_positions[..., None]
    if window:
        seen &= keys > query_positions[..., None] - window
    return seen


def _alibi(slopes: Tensor | None, query_positions: Tensor, tokens: int) -> Tensor | None:
    """Return slope · (key position − query position), [S, H, Q, tokens] (Press et al. 2022), or None."""
    if slopes is None:
        return None
    distance = torch.arange(tokens, device=query_positions.device) - query_positions[..., None]
    return slopes[None, :, None, None] * distance[:, None].to(slopes.dtype)


def decode_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, context: Tensor, *, max_context: int, scale: float, window: int = 0, slopes: Tensor | None = None
) -> Tensor:
    """Attend one query per sequence, ``q`` [S, H, D], to its ``context`` [S] cached tokens (its own included); return [S, H, D]."""
    positions = (context.long() - 1)[:, None]
    k, v = _gather(key_cache, table, max_context), _gather(value_cache, table, max_context)
    allowed = _visible(positions, max_context, window)
    return _attend(q[:, None], k.to(q.dtype), v.to(q.dtype), allowed, _alibi(slopes, positions, max_context), scale)[:, 0]


def prefill_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, table_row: Tensor, before: int, *, scale: float, window: int = 0, slopes: Tensor | None = None
) -> Tensor:
    """Attend one chunk ``q`` [Q, H, D], the tokens after ``before`` cached ones, causally to the pages; return [Q, H, D]."""
    tokens = before + q.shape[0]
    positions = torch.arange(before, tokens, device=q.device)[None]
    k, v = _gather(key_cache, table_row[None], tokens), _gather(value_cache, table_row[None], tokens)
    return _attend(q[None], k.to(q.dtype), v.to(q.dtype), _visible(positions, tokens, window), _alibi(slopes, positions, tokens), scale)[0]


def whole_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, slopes: Tensor | None = None) -> Tensor:
    """Attend a whole sequence, ``q`` [L, H, D] to ``k``, ``v`` [L, K, D], causally; return [L, H, D]."""
    tokens = q.shape[0]
    positions = torch.arange(tokens, device=q.device)[None]
    return _attend(q[None], k[None], v[None], _visible(positions, tokens, window), _alibi(slopes, positions, tokens), scale)[0]
