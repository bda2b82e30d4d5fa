"""From logits to tokens: greedy, temperature, top-k, top-p; random numbers that depend on the request alone.

A row's token is a function of its logits, its parameters and one uniform number drawn from (seed, position). Nothing of the rest of the
batch enters, so a request samples the same tokens alone, in any batch, and again after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.logits import LogitsProcessor
from serving.errors import InputError

#: What ``sample`` returns for a row whose logits are not finite.
NOT_FINITE = -1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request samples. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep all tokens (top-k is applied first).

    ``seed`` None derives one from the engine's seed and the request id. ``processors`` change the logits first, in order.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise InputError("sampling.temperature", f"{self.temperature} is outside 0 to 100")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError("sampling.top_p", f"{self.top_p} is outside (0, 1]")
        if self.top_k < 0:
            raise InputError("sampling.top_k", f"{self.top_k} is negative", "0 keeps all tokens")


GREEDY = SamplingParams()

#: Streams of random numbers: a token's own, a draft's, whether the draft is accepted, what comes in its stead.
PLAIN, DRAFTS, ACCEPTANCE, INSTEAD = range(4)
_STREAMS = np.array([0, 0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B], dtype=np.uint64)  # fractions of square roots of primes


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood 2014) on uint64, wrapping."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def request_seeds(engine_seed: int, request_ids: Sequence[int], seeds: Sequence[int | None]) -> np.ndarray:
    """Return the uint64 seed of each request: its own, or one of (engine seed, request id)."""
    base = np.array([engine_seed & (2**64 - 1)], dtype=np.uint64)
    derived = _mix(_mix(base) ^ np.array([request_id & (2**64 - 1) for request_id in request_ids], dtype=np.uint64))
    own = np.array([0 if seed is None else seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
    return np.where([seed is None for seed in seeds], derived, own)


def uniforms(seeds: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """Return one number in [0, 1 − 2⁻³²] per (seed, position), float64: a counter-based stream, the same on every device.

    Numbers of different ``stream``s have nothing to do with each other.
    """
    bits = _mix(_mix(seeds.astype(np.uint64) ^ _STREAMS[stream]) ^ positions.astype(np.uint64))
    return (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32


def sample(logits: Tensor, params: Sequence[SamplingParams], draws: np.ndarray) -> Tensor:
    """Return the token of each row of ``logits`` [R, vocab], int64 [R]; ``NOT_FINITE`` where a row's largest logit is not finite.

    ``draws`` [R]: the row's uniform number. Each row is treated by a method that its own parameters choose, so rows do not influence each other.
    """
    tokens = logits.argmax(-1)
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    full = [row for row in drawn if params[row].top_p == 1.0 and params[row].top_k == 0]
    cut = [row for row in drawn if params[row].top_p < 1.0 or params[row].top_k > 0]
    for rows, method in ((full, _sample_full), (cut, _sample_cut)):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            chosen = [params[row] for row in rows]
            heat = _column([p.temperature for p in chosen], logits.device)
            tokens[index] = method(logits[index].double() / heat, chosen, _column(draws[rows].tolist(), logits.device))
    return torch.where(torch.isfinite(logits.amax(-1)), tokens, NOT_FINITE)


def _column(values: list, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the probabilities that each row of ``logits`` [R, vocab] samples by, float64; its temperature is not 0."""
    scaled = logits.double() / _column([p.temperature for p in params], logits.device)
    if all(p.top_p == 1.0 and p.top_k == 0 for p in params):
        return scaled.softmax(-1)
    probabilities, order = _cut(scaled, params)
    return torch.zeros_like(scaled).scatter_(-1, order, probabilities / probabilities.sum(-1, keepdim=True))


def sample_against(logits: Tensor, params: Sequence[SamplingParams], drafts: Tensor, proposed: Tensor, draws: np.ndarray, instead: np.ndarray) -> Tensor:
    """Return for each row its draft, or what comes in its stead, so that tokens are distributed as if there had been no drafts.

    A draft x from probabilities q, here ``proposed`` [R, vocab], is accepted with probability min(1, p(x)/q(x)), else the token is drawn from
    the positive part of p − q (Leviathan et al. 2023). ``draws`` and ``instead`` [R] are uniform numbers. A token drawn instead is never the draft.
    """
    p, q, at = distribution(logits, params), proposed.double(), drafts[:, None]
    chance = (p.gather(-1, at) / q.gather(-1, at))[:, 0]
    rest = (p - q).clamp(min=0)
    some = rest.sum(-1, keepdim=True) > 0  # where p is q nothing is left, and the draft is accepted for certain
    other = _inverse_cdf(torch.where(some, rest, p), _column(instead.tolist(), logits.device))[:, 0]
    return torch.where(_column(draws.tolist(), logits.device)[:, 0] < chance, drafts, other)


def _inverse_cdf(probabilities: Tensor, draws: Tensor) -> Tensor:
    """Return the first index whose cumulative probability exceeds ``draws`` · total: never one of probability 0."""
    cumulative = probabilities.cumsum(-1)
    at = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return at.clamp_(max=probabilities.shape[-1] - 1)


def _sample_full(scaled: Tensor, params: list[SamplingParams], draws: Tensor) -> Tensor:
    return _inverse_cdf(scaled.softmax(-1), draws)[:, 0]


def _sample_cut(scaled: Tensor, params: list[SamplingParams], draws: Tensor) -> Tensor:
    probabilities, order = _cut(scaled, params)
    return order.gather(-1, _inverse_cdf(probabilities, draws))[:, 0]


def _cut(scaled: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return each row's probabilities by falling order, 0 beyond top-k and top-p (they sum to less than 1 then), and the order."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    vocab = scaled.shape[-1]
    limit = _column([p.top_k or vocab for p in params], scaled.device)
    ordered = ordered.masked_fill(torch.arange(vocab, device=scaled.device) >= limit, float("-inf"))
    probabilities = ordered.softmax(-1)
    # A token stays while those before it hold less than top_p: the first always does.
    before = probabilities.cumsum(-1) - probabilities
    return probabilities * (before < _column([p.top_p for p in params], scaled.device)), order
