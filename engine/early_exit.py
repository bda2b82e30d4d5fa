"""Token-gated depth: a token whose gate opens after a layer skips the layers that are left.

A gate is a probe of the normed hidden state: open where sigmoid(w·x + b) > 0.5. The hidden state of a token that left stands still; the keys and
values that later tokens look for in the layers it skipped are made of it there (Schuster et al. 2022), and nothing else of those layers is computed
for it. What a token does depends on its own state alone, so a text is the same in any batch and after a preemption.

Decodes that leave drop out of the batch, so the layers after cost less, or nothing once everybody has left. Tokens of a chunk that leave stand still
in their place: a chunk's queries must stay together. How many are left is read on the host, so steps with exits are never captured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.architecture import Architecture
from engine.attention.batch import AttentionBatch
from engine.checkpoint import Checkpoint
from engine.kv_cache import KvCache
from engine.model import Decoder
from serving.errors import InputError
from serving.scenario.weights import EarlyExit as Spec

FOLDER = "exit_gates"  # within the folder of the weights: exits.<layer>.weight [hidden], exits.<layer>.bias []


class Gate(NamedTuple):
    """A probe ``weight`` [hidden], float32 at least, and its bias."""

    weight: Tensor
    bias: float

    def open(self, x: Tensor) -> Tensor:
        """Which rows of ``x`` [T, hidden] leave: sigmoid(w·x + b) > 0.5."""
        return (x.to(self.weight.dtype) * self.weight).sum(-1) + self.bias > 0


class Rows(NamedTuple):
    """What is still in the batch: its tokens' places in the step, and their state."""

    at: Tensor
    x: Tensor
    residual: Tensor
    positions: Tensor
    batch: AttentionBatch


class EarlyExit:
    """Gates by the number of layers before them. ``rows`` and ``layers`` count the decodes and the layers that they ran."""

    def __init__(self, gates: dict[int, Gate]) -> None:
        self.gates = gates
        self.rows = self.layers = 0

    def report(self) -> dict[str, float | None]:
        """The ``early_exit`` part of summary.json."""
        return {"mean_layers": self.layers / self.rows if self.rows else None}

    def forward(self, decoder: Decoder, tokens: Tensor, positions: Tensor, batch: AttentionBatch, cache: KvCache) -> Tensor:
        """As ``Decoder.forward``, with exits."""
        weights, eps, ops = decoder.weights, decoder.shape.norm_eps, decoder.ops
        decoder.backend.begin(batch)
        residual = F.embedding(tokens, weights.embedding)
        final = torch.empty_like(residual)
        still = torch.zeros(len(tokens) - batch.decodes, dtype=torch.bool, device=tokens.device)  # chunk tokens that left
        rows = Rows(torch.arange(len(tokens), device=tokens.device), ops.rmsnorm(residual, weights.layers[0].attention_norm, eps), residual, positions, batch)
        self.rows += batch.decodes
        for index, layer in enumerate(weights.layers):
            self.layers += rows.batch.decodes
            before = rows.residual.clone() if still.any() else None
            x = decoder.attention(index, layer, rows.x, rows.residual, rows.positions, rows.batch, cache, None)
            x, residual = ops.add_rmsnorm(x, rows.residual, layer.mlp_norm, eps)
            following = weights.norm if index + 1 == len(weights.layers) else weights.layers[index + 1].attention_norm
            x, residual = ops.add_rmsnorm(decoder.mlp(index, layer, x, rows.batch), residual, following, eps)
            if before is not None:
                stays = F.pad(still, (rows.batch.decodes, 0))[:, None]
                x, residual = torch.where(stays, ops.rmsnorm(before, following, eps), x), torch.where(stays, before, residual)
            rows = rows._replace(x=x, residual=residual)
            gate = self.gates.get(index + 1)
            if gate is not None:
                leaves = gate.open(x)
                still = still | leaves[rows.batch.decodes :]
                rows = _without(decoder, index + 1, rows, leaves[: rows.batch.decodes], cache, final)
            if not len(rows.at):
                return final
        final[rows.at] = rows.x
        return final


def _without(decoder: Decoder, index: int, rows: Rows, leaves: Tensor, cache: KvCache, final: Tensor) -> Rows:
    """Take the decodes that leave before layer ``index`` out: their last state goes to ``final``, their keys and values to the layers they skip."""
    gone = leaves.nonzero()[:, 0]
    if not len(gone):
        return rows
    ops, eps, batch = decoder.ops, decoder.shape.norm_eps, rows.batch
    residual, slots, positions = rows.residual[gone], batch.slots[gone], rows.positions[gone]
    final[rows.at[gone]] = ops.rmsnorm(residual, decoder.weights.norm, eps)
    for later, layer in enumerate(decoder.weights.layers[index:], index):
        if decoder.shape.owner_of(later) != later:
            continue
        k, v = decoder.keys_values(layer, ops.rmsnorm(residual, layer.attention_norm, eps), positions)
        ops.kv_write(k, v, cache.keys[later], cache.values[later], slots)
    stay = torch.cat(((~leaves).nonzero()[:, 0], torch.arange(batch.decodes, len(rows.at), device=leaves.device)))
    seqs = torch.cat(((~leaves).nonzero()[:, 0], torch.arange(batch.decodes, len(batch.rows), device=leaves.device)))
    left = replace(batch, decodes=batch.decodes - len(gone), rows=batch.rows[seqs], context=batch.context[seqs], slots=batch.slots[stay])
    if len(stay):
        decoder.backend.begin(left)
    return Rows(rows.at[stay], rows.x[stay], rows.residual[stay], rows.positions[stay], left)


def random_gates(spec: Spec, shape: Architecture, seed: int, device: torch.device) -> EarlyExit:
    """Gates that open for about the shares of tokens that the scenario gives: of a normed state, w·x is nearly normal."""
    left, gates = 1.0, {}
    generator = torch.Generator().manual_seed(seed)
    for one in _checked(spec, shape):
        weight = torch.empty(shape.hidden).normal_(0.0, shape.hidden**-0.5, generator=generator)
        share = min(1.0, one.share * spec.acceptance / left) if left > 0 else 0.0
        bias = NormalDist().inv_cdf(share) if 0 < share < 1 else (share - 0.5) * float("inf")
        gates[one.layer] = Gate(weight.to(device), bias)
        left -= one.share * spec.acceptance
    return EarlyExit(gates)


def load_gates(spec: Spec, shape: Architecture, folder: Path, device: torch.device) -> EarlyExit:
    """Read the scenario's gates from ``exit_gates`` in a folder of weights. Raises InputError naming the tensor that is missing or misshapen."""
    checkpoint = Checkpoint(folder / FOLDER)
    gates = {}
    for one in _checked(spec, shape):
        names = f"exits.{one.layer}.weight", f"exits.{one.layer}.bias"
        for name, size in zip(names, ((shape.hidden,), ())):
            if name not in checkpoint.tensors or checkpoint.tensors[name].shape != size:
                raise InputError(str(folder / FOLDER), f"lacks the tensor '{name}' of shape {list(size)}")
        gates[one.layer] = Gate(checkpoint.read(names[0]).float().to(device), float(checkpoint.read(names[1])))
    return EarlyExit(gates)


def _checked(spec: Spec, shape: Architecture) -> tuple:
    if spec.exits[-1].layer >= shape.layers:
        raise InputError("weights.early_exit.exits", f"the network has {shape.layers} layers: no exit at layer {spec.exits[-1].layer}")
    return spec.exits
