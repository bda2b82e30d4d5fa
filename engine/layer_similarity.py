"""How alike the keys and values of neighbouring layers are: what ``kv_cache.layer_reuse`` asks for, measured on a network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.model import DecoderWeights
from engine.runner import Runner
from engine.step import SequenceInput, StepInput
from engine.whole_sequence import hidden_states


@torch.inference_mode()
def neighbour_cosines(runner: Runner, texts: Sequence[Sequence[int]]) -> list[float]:
    """Return, for each layer but the last, the cosine between its entry of a token and the next layer's, averaged over all tokens of ``texts``.

    An entry is a token's rotated keys and values of all heads as one vector; the rotation is the same in every layer and drops out of the keys' part.
    """
    width = runner.cache.block_tokens
    total, count = torch.zeros(runner.shape.layers - 1, dtype=torch.float64), 0
    for request_id, text in enumerate(texts):
        table = list(range(1, 1 - (-len(text) // width)))
        room = runner.options.max_batch_tokens
        for start in range(0, len(text), room):
            runner.execute(StepInput([SequenceInput(request_id, text[start : start + room], start, table, 0)]))
        runner.execute(StepInput([], (request_id,)))
        entries = [_entries(runner, layer, table, len(text)) for layer in range(runner.shape.layers)]
        total += torch.stack([torch.cosine_similarity(one, other, dim=-1).sum().double().cpu() for one, other in itertools.pairwise(entries)])
        count += len(text)
    return (total / count).tolist()


def state_cosines(shape: Architecture, weights: DecoderWeights, texts: Sequence[Sequence[int]]) -> list[float]:
    """Return, for each layer but the last, the cosine between the hidden state that enters it and the one that enters the next, averaged over all tokens.

    Neighbours may see nearly the same state and yet make unrelated keys of it: their projections have bases of their own.
    """
    total, count = torch.zeros(shape.layers - 1, dtype=torch.float64), 0
    for text in texts:
        states: list[Tensor] = []
        with torch.inference_mode():
            hidden_states(shape, weights, torch.tensor(text, device=weights.embedding.device), lambda layer, q, residual, kept=states: kept.append(residual.float()))
        total += torch.stack([torch.cosine_similarity(one, other, dim=-1).sum().double().cpu() for one, other in itertools.pairwise(states)])
        count += len(text)
    return (total / count).tolist()


def _entries(runner: Runner, layer: int, table: list[int], tokens: int) -> Tensor:
    """A layer's keys and values of one text, float32 [tokens, 2 · heads · D]."""
    blocks = torch.tensor(table, device=runner.device)
    parts = [pages.index_select(0, blocks).flatten(0, 1)[:tokens].flatten(1).float() for pages in (runner.cache.keys[layer], runner.cache.values[layer])]
    return torch.cat(parts, dim=1)
