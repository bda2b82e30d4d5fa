"""The decoder transformer: embedding, layers of attention and (routed) SwiGLU, final norm, LM head.

Tokens of all sequences lie flattened, [T]; attention over pages goes through a back end, the pointwise steps through ``ops``
(``engine.kernels.reference`` or ``engine.kernels.pointwise``). Everything above those two is the same on CPU and CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.architecture import Architecture
from engine.attention import AttentionBackend
from engine.attention.batch import AttentionBatch
from engine.kernels import reference
from engine.kv_cache import KvCache
from engine.lora.slots import LoraSlots

#: Called after each layer's attention with (layer, rotated q [T, H, D], residual before the layer [T, hidden]); the cache holds this step's keys.
Observer = Callable[[int, Tensor, Tensor], None]


@dataclass(slots=True)
class ExpertWeights:
    """Routed experts: ``router`` [E, hidden], ``gate_up`` [E, 2·I, hidden], ``down`` [E, hidden, I]; a shared expert with its gate, or None."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None


@dataclass(slots=True)
class LayerWeights:
    """One layer: ``qkv`` [(H + 2·K)·D, hidden] fused, ``gate_up`` [2·I, hidden] fused; either the dense pair or ``experts``."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor | None
    down: Tensor | None
    experts: ExpertWeights | None = None


@dataclass(slots=True)
class DecoderWeights:
    """All weights; ``lm_head`` is the same tensor as ``embedding`` [vocab, hidden] when they are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: Tensor


def rope_tables(shape: Architecture, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [max_model_len, head_dim/2], float32 (or int8: round(127 · value)), computed in float64.

    Frequencies θ^(−2i/D) (Su et al. 2021); ``llama3`` and ``linear`` scaling as ``RopeScaling`` says.
    """
    inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    scaling = shape.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        inverse = inverse / scaling.factor
    elif scaling is not None:
        turns = scaling.original_max * inverse / (2 * math.pi)
        kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        inverse = inverse / scaling.factor * (1 - kept) + inverse * kept
    angles = torch.outer(torch.arange(shape.max_model_len, dtype=torch.float64), inverse)
    tables = angles.cos(), angles.sin()
    if shape.rope_table == "int8":
        return tuple((127 * table).round().to(torch.int8).to(device) for table in tables)
    return tuple(table.to(torch.float32).to(device) for table in tables)


class Decoder:
    """Weights and the forward pass. Holds no cache and no sequence state."""

    def __init__(
        self, shape: Architecture, weights: DecoderWeights, backend: AttentionBackend, ops: Any, reduce: Callable[[Tensor], Tensor] | None = None,
        lora: LoraSlots | None = None, chosen: Any = reference, skip_experts_below: float = 0.0,
    ) -> None:  # fmt: skip
        """``chosen`` computes experts; those with less than ``skip_experts_below`` of the largest share of a token are left out. ``reduce`` sums a tensor over the ranks that share every layer, in place; None: there is one. ``lora`` holds the adapters that batches name."""
        self.shape = shape
        self.weights = weights
        self.backend = backend
        self.ops = ops
        self.reduce = reduce
        self._lora = lora
        self._chosen = chosen
        self._skip_below = skip_experts_below
        self.device = weights.embedding.device
        self._rope = rope_tables(shape, self.device) if shape.positions == "rope" else None

    def forward(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, cache: KvCache, observe: Observer | None = None) -> Tensor:
        """Return the normed hidden states [T, hidden] of ``tokens`` [T] at ``positions`` [T]; writes their keys and values to the cache."""
        ops, weights, eps = self.ops, self.weights, self.shape.norm_eps
        self.backend.begin(batch)
        residual = F.embedding(tokens, weights.embedding)
        x = ops.rmsnorm(residual, weights.layers[0].attention_norm, eps)
        for index, layer in enumerate(weights.layers):
            x = self.attention(index, layer, x, residual, positions, batch, cache, observe)
            x = x if self.reduce is None else self.reduce(x)
            x, residual = ops.add_rmsnorm(x, residual, layer.mlp_norm, eps)
            x = self.mlp(index, layer, x, batch)
            x = x if self.reduce is None else self.reduce(x)
            last = index + 1 == len(weights.layers)
            x, residual = ops.add_rmsnorm(x, residual, weights.norm if last else weights.layers[index + 1].attention_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab] of hidden states [rows, hidden]."""
        return F.linear(hidden, self.weights.lm_head)

    def attention(
        self, index: int, layer: LayerWeights, x: Tensor, residual: Tensor, positions: Tensor, batch: AttentionBatch, cache: KvCache, observe: Observer | None
    ) -> Tensor:
        """What the attention of layer ``index`` adds to the residual, for its normed state ``x`` [T, hidden]; writes keys and values to the cache."""
        shape = self.shape
        heads, kv_heads = shape.heads, shape.kv_heads
        if shape.owner_of(index) != index:
            return self._attend_earlier(index, layer, x, residual, positions, batch, cache, observe)
        qkv = self._adapted(F.linear(x, layer.qkv, layer.qkv_bias), x, index, "qkv", batch).view(-1, heads + 2 * kv_heads, shape.head_dim)
        rotated, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None:
            q, k = rotated.split((heads, kv_heads), dim=1)
            rotated = torch.cat((self.ops.rmsnorm(q, layer.q_norm, shape.norm_eps), self.ops.rmsnorm(k, layer.k_norm, shape.norm_eps)), dim=1)
        if self._rope is not None:
            rotated = self.ops.rope(rotated, positions, *self._rope)
        q, k = rotated[:, :heads], rotated[:, heads:]
        out = self.backend.attend(q, k, v, cache.keys[index], cache.values[index], batch, shape.window_of(index))
        if observe is not None:
            observe(index, q, residual)
        out = out.reshape(-1, heads * shape.head_dim)
        return self._adapted(F.linear(out, layer.output), out, index, "output", batch)

    def _attend_earlier(
        self, index: int, layer: LayerWeights, x: Tensor, residual: Tensor, positions: Tensor, batch: AttentionBatch, cache: KvCache, observe: Observer | None
    ) -> Tensor:
        """As ``attention`` where the keys and values are an earlier layer's: queries alone are projected, nothing is written."""
        shape = self.shape
        width = shape.heads * shape.head_dim
        q = F.linear(x, layer.qkv[:width], None if layer.qkv_bias is None else layer.qkv_bias[:width]).view(-1, shape.heads, shape.head_dim)
        if layer.q_norm is not None:
            q = self.ops.rmsnorm(q, layer.q_norm, shape.norm_eps)
        if self._rope is not None:
            q = self.ops.rope(q, positions, *self._rope)
        out = self.backend.attend(q, None, None, cache.keys[index], cache.values[index], batch, shape.window_of(index))
        if observe is not None:
            observe(index, q, residual)
        return F.linear(out.reshape(-1, width), layer.output)

    def keys_values(self, layer: LayerWeights, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The keys, rotated, and values [T, K, D] that ``attention`` would write for ``x``; no adapter has a part in them."""
        shape = self.shape
        first = shape.heads * shape.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[first:]
        k, v = F.linear(x, layer.qkv[first:], bias).view(-1, 2, shape.kv_heads, shape.head_dim).unbind(1)
        if layer.k_norm is not None:
            k = self.ops.rmsnorm(k, layer.k_norm, shape.norm_eps)
        return k if self._rope is None else self.ops.rope(k, positions, *self._rope), v

    def _adapted(self, y: Tensor, x: Tensor, index: int, matrix: str, batch: AttentionBatch) -> Tensor:
        """``y``, the product of ``x`` and a matrix, with what each row's adapter adds to it."""
        return y if batch.adapters is None else self._lora.add(y, x, index, matrix, batch.adapters)

    def mlp(self, index: int, layer: LayerWeights, x: Tensor, batch: AttentionBatch) -> Tensor:
        """What the feed-forward block of layer ``index`` adds to the residual, for its normed state ``x`` [T, hidden]."""
        if layer.experts is None:
            wide = self.ops.silu_mul(self._adapted(F.linear(x, layer.gate_up), x, index, "gate_up", batch))
            return self._adapted(F.linear(wide, layer.down), wide, index, "down", batch)
        chosen, share = self._route(layer.experts, x, batch)
        # With torch's products a decode batch on a GPU computes every expert for every row: a captured graph needs shapes that do not depend on the
        # routing, and such a batch reads almost every expert's weights anyway.
        out = self._chosen.experts(x, layer.experts.gate_up, layer.experts.down, chosen, share, fixed=x.is_cuda and not batch.chunks)
        if layer.experts.shared_gate_up is not None:
            shared = F.linear(self.ops.silu_mul(F.linear(x, layer.experts.shared_gate_up)), layer.experts.shared_down)
            out = out + shared * torch.sigmoid(F.linear(x, layer.experts.shared_gate))
        return out

    def _route(self, experts: ExpertWeights, x: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their shares, [T, experts per token] each; -1 where one is dropped: of padding, and for too small a share."""
        wide = torch.promote_types(x.dtype, torch.float32)
        share, chosen = F.linear(x, experts.router).to(wide).softmax(-1).topk(self.shape.experts_per_token, dim=-1)
        if self._skip_below:
            dropped = share < self._skip_below * share[:, :1]
            chosen, share = chosen.masked_fill(dropped, -1), share.masked_fill(dropped, 0)
        if self.shape.normalise_router:
            share = share / share.sum(-1, keepdim=True)
        if batch.decodes:  # padding has the table's row of nobody
            chosen[: batch.decodes].masked_fill_(batch.rows[: batch.decodes, None] == 0, -1)
        return chosen, share.to(x.dtype)
