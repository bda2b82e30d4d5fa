"""Questions about a network that need whole sequences and no cache: attribution by gradient, and the error that a change makes layer by layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.attention import AttentionBatch, geometry
from engine.attention.dense_backend import DenseAttention
from engine.kernels import reference
from engine.kv_cache import KvCache
from engine.model import Decoder, DecoderWeights, Observer


def hidden_states(shape: Architecture, weights: DecoderWeights, tokens: Tensor, observe: Observer | None = None) -> Tensor:
    """Return the normed hidden states [L, hidden] of one sequence ``tokens`` int64 [L], differentiable in the weights."""
    device, length = tokens.device, tokens.shape[0]
    decoder = Decoder(shape, weights, DenseAttention(geometry(shape, 0, device)), reference)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    batch = AttentionBatch(decodes=0, rows=nothing, context=nothing, starts=nothing, slots=nothing, table=nothing, chunks=((length, 0),))
    unused = KvCache(shape, blocks=2, block_tokens=1, dtype=weights.embedding.dtype, device=device)
    return decoder.forward(tokens, torch.arange(length, device=device), batch, unused, observe)


def gradient_attribution(shape: Architecture, weights: DecoderWeights, tokens: Tensor, target: int) -> Tensor:
    """Return how much each token of ``tokens`` [L] speaks for ``target`` coming next: gradient × input of its logit, float [L]."""
    # Each position looks up a row of its own, so that the gradient is by position and not by token.
    rows = weights.embedding[tokens].detach().requires_grad_()
    hidden = hidden_states(shape, replace(weights, embedding=rows), torch.arange(tokens.shape[0], device=tokens.device))
    (gradient,) = torch.autograd.grad(hidden[-1] @ weights.lm_head[target], rows)
    return (gradient * rows.detach()).sum(-1)


@torch.inference_mode()
def layer_errors(exact: Architecture, cheap: Architecture, weights: DecoderWeights, tokens: Tensor) -> list[float]:
    """Return, after each layer, ‖cheap − exact‖ / ‖exact‖ of the hidden states of one sequence; the last entry is after the final norm.

    For changes that leave the weights alone: INT8 rotary tables (``rope_table``), a narrower ALiBi band or window (``window``).
    """
    runs = []
    for shape in (exact, cheap):
        seen: list[Tensor] = []

        def keep(layer: int, q: Tensor, residual: Tensor, seen: list[Tensor] = seen) -> None:
            seen.append(residual.clone())

        seen.append(hidden_states(shape, weights, tokens, keep))
        runs.append(seen[1:])  # what enters the first layer is the embedding, equal in both
    return [float((b - a).norm() / a.norm()) for a, b in zip(*runs)]
