"""Tensor parallelism: every rank holds some heads of every layer and a slice of every feed-forward block (Shoeybi et al. 2019).

```
qkv      rows of this rank's query and KV heads      output   columns of its query heads    -> partial sums, all-reduced
gate_up  rows of its slice of both halves            down     columns of its slice          -> partial sums, all-reduced
embedding, LM head, norms, router: the same on every rank
```
KV pages hold this rank's KV heads only. All ranks run the same steps on the same block tables and sample the same tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.model import DecoderWeights, ExpertWeights, LayerWeights
from serving.errors import InputError


def local_shape(shape: Architecture, size: int) -> Architecture:
    """What one of ``size`` ranks computes. Raises InputError for heads or widths that do not divide."""
    for what, count in (("KV heads", shape.kv_heads), ("heads", shape.heads), ("feed-forward columns", shape.intermediate)):
        if count % size:
            raise InputError("cluster.tensor_parallel", f"{size} does not divide the {count} {what}")
    width = shape.expert_intermediate
    if width % size or shape.shared_intermediate % size:
        raise InputError("cluster.tensor_parallel", f"{size} does not divide the experts' {width} columns")
    if shape.positions != "rope":
        raise InputError("cluster.tensor_parallel", "only rotary positions are split over ranks", "slopes of ALiBi depend on the head")
    return replace(
        shape, heads=shape.heads // size, kv_heads=shape.kv_heads // size, intermediate=shape.intermediate // size,
        expert_intermediate=width // size, shared_intermediate=shape.shared_intermediate // size,
    )  # fmt: skip


def shard(shape: Architecture, weights: DecoderWeights, rank: int, size: int) -> DecoderWeights:
    """The weights of ``rank`` of ``size``; ``shape`` is the whole network's. What is not split is shared with ``weights``."""
    return replace(weights, layers=[_layer(shape, layer, rank, size) for layer in weights.layers])


def _layer(shape: Architecture, layer: LayerWeights, rank: int, size: int) -> LayerWeights:
    heads = [part.chunk(size)[rank] for part in layer.qkv.split([count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)])]
    bias = layer.qkv_bias
    if bias is not None:
        bias = torch.cat([part.chunk(size)[rank] for part in bias.split([count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)])])
    return replace(
        layer, qkv=torch.cat(heads), qkv_bias=bias, output=_columns(layer.output, rank, size),
        gate_up=None if layer.gate_up is None else _halves(layer.gate_up, rank, size),
        down=None if layer.down is None else _columns(layer.down, rank, size),
        experts=None if layer.experts is None else _experts(layer.experts, rank, size),
    )  # fmt: skip


def _experts(experts: ExpertWeights, rank: int, size: int) -> ExpertWeights:
    shared = experts.shared_gate_up is not None
    return replace(
        experts, gate_up=_halves(experts.gate_up, rank, size), down=_columns(experts.down, rank, size),
        shared_gate_up=_halves(experts.shared_gate_up, rank, size) if shared else None,
        shared_down=_columns(experts.shared_down, rank, size) if shared else None,
    )  # fmt: skip


def _columns(matrix: Tensor, rank: int, size: int) -> Tensor:
    return matrix.chunk(size, dim=-1)[rank].contiguous()


def _halves(matrix: Tensor, rank: int, size: int) -> Tensor:
    """This rank's rows of gate and of up, [.., 2 I, hidden] -> [.., 2 I / size, hidden]."""
    return torch.cat([half.chunk(size, dim=-2)[rank] for half in matrix.chunk(2, dim=-2)], dim=-2).contiguous()
