"""Logits processors: functions of a row's logits and its last token, applied before sampling, by name.

They keep no state and treat each row alone, so a batch's composition cannot change a request's output.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from serving.errors import InputError, nearest


class LogitsProcessor(Protocol):
    """Changes logits [rows, vocab] given the last token of each row, int64 [rows]; returns new logits of the same shape."""

    def __call__(self, logits: Tensor, last_tokens: Tensor) -> Tensor: ...


class EntropyRescale:
    """Multiply a row by e^(−β·H), H the entropy of its softmax in nats: the less certain a row, the flatter it becomes."""

    def __init__(self, vocab: int, beta: float = 0.3) -> None:
        self._beta = beta

    def __call__(self, logits: Tensor, last_tokens: Tensor) -> Tensor:
        wide = logits.float()
        entropy = torch.special.entr(wide.softmax(-1)).sum(-1, keepdim=True)
        # A forbidden token stays forbidden: −inf times a positive factor.
        return wide * torch.exp(-self._beta * entropy)


class ConfidenceFilter:
    """Keep of the ``width`` most probable candidates those with at least ``min_probability``; the best one always stays."""

    def __init__(self, vocab: int, width: int = 4, min_probability: float = 0.05) -> None:
        if not 1 <= width <= vocab:
            raise InputError("processors.confidence_filter.width", f"{width} is outside 1 to {vocab} (the vocabulary)")
        if not 0.0 <= min_probability <= 1.0:
            raise InputError("processors.confidence_filter.min_probability", f"{min_probability} is outside 0 to 1")
        self._width = width
        self._min = min_probability

    def __call__(self, logits: Tensor, last_tokens: Tensor) -> Tensor:
        probability, token = logits.float().softmax(-1).topk(self._width, dim=-1)
        kept = probability >= self._min
        kept[:, 0] = True
        allowed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, token, kept)
        return logits.masked_fill(~allowed, float("-inf"))


class PosteriorReweight:
    """Multiply the probability of chosen tokens by a bias factor ≥ 0 (0 forbids), then renormalise: logits + log(factor)."""

    def __init__(self, vocab: int, factors: Mapping[int, float]) -> None:
        self._tokens = _token_ids(factors, vocab, "processors.posterior_reweight.factors")
        if any(not 0.0 <= factor < math.inf for factor in factors.values()):
            raise InputError("processors.posterior_reweight.factors", "a factor is negative or not finite")
        self._shift = torch.tensor([math.log(factor) if factor else -math.inf for factor in factors.values()])

    def __call__(self, logits: Tensor, last_tokens: Tensor) -> Tensor:
        tokens = torch.tensor(self._tokens, device=logits.device)
        return logits.index_add(-1, tokens, self._shift.to(logits).expand(logits.shape[0], -1))


class SuccessorMask:
    """Allow only the successors of the last token in a directed graph; a token without an entry is unconstrained."""

    def __init__(self, vocab: int, successors: Mapping[int, Sequence[int]]) -> None:
        where = "processors.successor_mask.successors"
        nodes = _token_ids(successors, vocab, where)
        self._row = torch.zeros(vocab, dtype=torch.long)
        self._allowed = torch.zeros(len(nodes) + 1, vocab, dtype=torch.bool)
        self._allowed[0] = True
        for row, (node, following) in enumerate(zip(nodes, successors.values()), 1):
            if not following:
                raise InputError(where, f"token {node} has no successor, so nothing could be sampled after it")
            self._row[node] = row
            self._allowed[row, _token_ids(following, vocab, where)] = True

    def __call__(self, logits: Tensor, last_tokens: Tensor) -> Tensor:
        # The graph lives on the CPU until the device of the first call is known.
        self._row, self._allowed = self._row.to(logits.device), self._allowed.to(logits.device)
        return logits.masked_fill(~self._allowed[self._row[last_tokens]], float("-inf"))


def _token_ids(tokens: Any, vocab: int, where: str) -> list[int]:
    found = [int(token) for token in tokens]
    for token in found:
        if not 0 <= token < vocab:
            raise InputError(where, f"token {token} is outside the vocabulary of {vocab}")
    return found


def build(specs: Sequence[str | Mapping[str, Any]], vocab: int, where: str = "processors") -> tuple[LogitsProcessor, ...]:
    """Build processors from names or ``{name: ..., options}``; ``module:Class`` takes a third party's. Raises InputError for an unknown name or option."""
    built = []
    for index, spec in enumerate(specs):
        options = {"name": spec} if isinstance(spec, str) else dict(spec)
        name = options.pop("name", "")
        at = f"{where}[{index}]"
        factory = PROCESSORS.get(name) or _import(name, at)
        try:
            built.append(factory(vocab, **options))
        except TypeError as error:
            raise InputError(at, f"'{name}' does not take these options: {error}") from None
    return tuple(built)


def _import(name: str, where: str) -> Callable[..., LogitsProcessor]:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise InputError(where, f"'{name}' is no logits processor", nearest(name, [*PROCESSORS, "module:Class"]))
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(where, f"'{name}' cannot be loaded: {error}") from None


PROCESSORS: dict[str, Callable[..., LogitsProcessor]] = {
    "entropy_rescale": EntropyRescale,
    "confidence_filter": ConfidenceFilter,
    "posterior_reweight": PosteriorReweight,
    "successor_mask": SuccessorMask,
}
