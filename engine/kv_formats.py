"""KV pages narrower than the activations: what is stored for a token's key or value, and what attention reads back.

| format | a head's D values | bytes |
|---|---|---|
| fp8  | E4M3, saturating at ±448, no scale | D |
| int8 | round(x / s), s = max abs x / 127, one bf16 scale | D + 2 |
| int4 | round(x / s), s = max abs x / 7 for each group of 64, two values a byte, one bf16 scale a group | D/2 + 2·⌈D/64⌉ |

Attention computes in the activations' dtype: pages are widened as they are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serving.errors import InputError, nearest

GROUP = 64
FORMATS = ("fp8", "int8", "int4")


class NarrowPages:
    """The pages of one layer's keys or values, ``[blocks, block_tokens, kv_heads, head_dim]`` to whoever reads, as a plain tensor would be."""

    def __init__(self, kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """``dtype`` is what reads return. Raises InputError for a format that is not there, or a head dimension it cannot split."""
        if kind not in FORMATS:
            raise InputError("kv_cache.dtype", f"the engine has no KV format '{kind}'", nearest(kind, FORMATS))
        blocks, width, heads, dim = shape
        if kind == "int4" and dim % 2:
            raise InputError("kv_cache.dtype", f"int4 packs pairs, heads have {dim} values")
        self.kind, self.shape, self.dtype, self.device = kind, torch.Size(shape), dtype, device
        self._group = min(GROUP, dim) if kind == "int4" else dim
        stored = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}[kind]
        self._codes = torch.zeros((blocks, width, heads, dim // 2 if kind == "int4" else dim), dtype=stored, device=device)
        scales = (blocks, width, heads, -(-dim // self._group))
        self._scales = None if kind == "fp8" else torch.zeros(scales, dtype=torch.bfloat16, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes stored, scales included."""
        return self._codes.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def data_ptr(self) -> int:
        """Address of the codes."""
        return self._codes.data_ptr()

    def store(self, x: Tensor, slots: Tensor) -> None:
        """Write ``x`` [T, K, D] at ``slots`` int64 [T]."""
        codes, scales = self._narrow(x.float())
        self._codes.view(-1, *self._codes.shape[2:])[slots] = codes
        if scales is not None:
            self._scales.view(-1, *self._scales.shape[2:])[slots] = scales

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Read whole pages, [n, block_tokens, K, D], widened."""
        codes = self._codes.index_select(dim, index)
        return self._widen(codes, None if self._scales is None else self._scales.index_select(dim, index))

    def __getitem__(self, blocks: Tensor) -> Tensor:
        return self.index_select(0, blocks)

    def raw(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Pages as they are stored, for whoever moves them elsewhere."""
        parts = (self._codes,) if self._scales is None else (self._codes, self._scales)
        return tuple(part.index_select(0, blocks) for part in parts)

    def put_raw(self, blocks: Tensor, parts: tuple[Tensor, ...]) -> None:
        """Write back what ``raw`` returned."""
        self._codes[blocks] = parts[0]
        if self._scales is not None:
            self._scales[blocks] = parts[1]

    def _narrow(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.kind == "fp8":
            return x.clamp(-448, 448).to(torch.float8_e4m3fn), None
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % self._group))
        groups = padded.unflatten(-1, (-1, self._group))
        largest = 127 if self.kind == "int8" else 7
        scales = (groups.abs().amax(-1) / largest).to(torch.bfloat16)
        safe = torch.where(scales == 0, torch.ones_like(scales), scales).float()[..., None]
        codes = (groups / safe).round().clamp(-largest, largest).flatten(-2)[..., : x.shape[-1]]
        if self.kind == "int8":
            return codes.to(torch.int8), scales
        nibbles = (codes + 8).to(torch.uint8)
        return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scales

    def _widen(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        if self.kind == "int4":
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
        wide = codes.float()
        if scales is not None:
            wide = wide * scales.float().repeat_interleave(self._group, dim=-1)[..., : wide.shape[-1]]
        return wide.to(self.dtype)


