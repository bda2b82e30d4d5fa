"""Memory-bound Triton kernels: RMSNorm with the residual addition, RoPE, SwiGLU's product and the KV write.

One program per token row; a row's bytes are read once and written once. Meanings and shapes: ``engine.kernels.reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rmsnorm_kernel(x, residual, weight, out, eps, width, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if ADD:
        # The sum is rounded to the residual's type before it is squared, as the stored residual is what later layers see.
        value = (value.to(tl.float32) + tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + row + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row + at, (normed * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(heads, positions, cos, sin, token_stride, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, INT8: tl.constexpr):
    token = tl.program_id(0)
    position = tl.load(positions + token).to(tl.int64)
    pair = tl.arange(0, HALF_PAD)
    head = tl.arange(0, HEADS_PAD)
    c = tl.load(cos + position * HALF + pair, mask=pair < HALF, other=0).to(tl.float32)
    s = tl.load(sin + position * HALF + pair, mask=pair < HALF, other=0).to(tl.float32)
    if INT8:
        c = c / 127.0
        s = s / 127.0
    at = heads + token.to(tl.int64) * token_stride + head[:, None] * (2 * HALF) + pair[None, :]
    inside = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = heads.dtype.element_ty
    tl.store(at, (first * c[None, :] - second * s[None, :]).to(kind), mask=inside)
    tl.store(at + HALF, (second * c[None, :] + first * s[None, :]).to(kind), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * width + at, (activated * up).to(kind), mask=inside)


@triton.jit
def kv_write_kernel(keys, values, key_cache, value_cache, slots, key_stride, value_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    k = tl.load(keys + token * key_stride + at, mask=inside, other=0.0)
    v = tl.load(values + token * value_stride + at, mask=inside, other=0.0)
    tl.store(key_cache + slot * WIDTH + at, k.to(key_cache.dtype.element_ty), mask=inside)
    tl.store(value_cache + slot * WIDTH + at, v.to(value_cache.dtype.element_ty), mask=inside)


def _row_warps(elements: int) -> int:
    return 8 if elements >= 4096 else 4 if elements >= 1024 else 2


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    grid = (x.numel() // width,)
    rmsnorm_kernel[grid](x, x if residual is None else residual, weight, out, eps, width, ADD=residual is not None, BLOCK=block, num_warps=_row_warps(block))
    return out


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of ``x`` over its last axis."""
    return _norm(x, None, weight, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add ``x`` to ``residual`` in place; return (its RMSNorm, ``residual``)."""
    return _norm(x, residual, weight, eps), residual


def rope(heads: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``heads`` [T, heads, D] (a view with contiguous rows is fine) in place and return it."""
    tokens, count, dim = heads.shape
    half = dim // 2
    rope_kernel[(tokens,)](
        heads, positions, cos, sin, heads.stride(0), HEADS=count, HEADS_PAD=triton.next_power_of_2(count), HALF=half, HALF_PAD=triton.next_power_of_2(half),
        INT8=cos.dtype == torch.int8, num_warps=4,
    )  # fmt: skip
    return heads


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) · up`` of the two halves of the last axis."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    silu_mul_kernel[(out.numel() // width, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


def kv_write(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store ``keys`` and ``values`` [T, K, D] (rows may be strided) at ``slots`` [T] of the caches, in place."""
    width = keys.shape[1] * keys.shape[2]
    block = triton.next_power_of_2(width)
    kv_write_kernel[(keys.shape[0],)](keys, values, key_cache, value_cache, slots, keys.stride(0), values.stride(0), WIDTH=width, BLOCK=block, num_warps=_row_warps(block))
