"""Token-gated depth: decodes whose gate opens after a layer skip the layers that are left.

A layer runs while any sequence of the batch still needs it, for as many as do. With s the share of tokens that go beyond an
exit, a batch of B tokens runs the layers behind it with probability 1 - (1 - s)^B, for B s / (1 - (1 - s)^B) tokens on average.
So a large batch saves work but hardly any reading of weights. The step's cost is taken as linear in layers between the
target and the same network of one layer; embedding, LM head and host are paid once, and prompts use all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from hwmodels.latency import LatencyModel
from serving.plan import StepShape


class EarlyExit:
    """Prices steps of ``target``, of ``layers`` layers; ``shallow`` prices the same network cut to one layer.

    ``exits`` are (layer, share of all tokens that leave after it), shallow to deep.
    """

    def __init__(self, target: LatencyModel, shallow: LatencyModel, layers: int, exits: Iterable[tuple[int, float]]) -> None:
        self._target, self._shallow, self._layers = target, shallow, layers
        self._segments: list[tuple[int, float]] = []  # layers, share of tokens that run them
        first, share = 0, 1.0
        for layer, leaving in [*exits, (layers, 0.0)]:
            if layer > first:
                self._segments.append((layer - first, share))
            first, share = layer, max(0.0, share - leaving)
        self.mean_depth = sum(count * part for count, part in self._segments)
        for name in ("path", "provenance"):
            if hasattr(target, name):
                setattr(self, name, getattr(target, name))

    def step_s(self, shape: StepShape) -> float:
        """Expected seconds of the step."""
        if shape.chunks or not shape.decodes:
            return self._target.step_s(shape)
        return self._decode_s(shape.decodes, shape.decode_context_tokens, shape.query_tokens_per_decode)

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """As ``step_s`` for each step."""
        count, first = shape.decodes, shape.decode_context_tokens
        return [self._decode_s(count, first + step * count, shape.query_tokens_per_decode) for step in range(steps)]

    def _decode_s(self, count: int, context: int, queries: int) -> float:
        whole = StepShape((), count, context, count, queries)
        shallow_s = self._shallow.step_s(whole)
        seconds = shallow_s - (self._target.step_s(whole) - shallow_s) / (self._layers - 1)
        for layers, share in self._segments:
            runs = 1.0 - (1.0 - share) ** count
            if not runs:
                continue
            left = math.ceil(count * share / runs)
            part = StepShape((), left, context * left // count, left, queries)
            seconds += runs * layers * (self._target.step_s(part) - self._shallow.step_s(part)) / (self._layers - 1)
        return seconds
