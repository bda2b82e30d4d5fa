"""Weights that do not fit: layers stay in host memory and cross the link in every step, ahead of their use or not.

With two buffers and an asynchronous copy stream, transfers and layers proceed side by side, so a step takes the longer of the
two: max(T, n s), T the step without streaming, n layers to copy of s seconds each. Without prefetch every copy is waited for:
T + n s. Layers to copy lie evenly among those that stay, so neither waits for the other longer than that (a test runs the
pipeline copy by copy).
"""

from __future__ import annotations

from hwmodels.latency import LatencyModel
from serving.plan import StepShape

LOCALITY = (0.1, 0.9)  # bounds of the factor, near to far
PASSES = 32  # over all layers until the cache has settled


class LayerCache:
    """Which layers stay on the GPU, ``capacity`` of them.

    ``lru`` keeps the latest used. ``lru_ap`` gives way by age x locality, where locality moves halfway to 0.1 with each use that
    finds the layer here and halfway to 0.9 with each that does not; a layer that comes in is weighed with the age at which it came
    back, and is streamed through without being kept if it scores highest itself.
    """

    def __init__(self, capacity: int, policy: str) -> None:
        self.capacity = capacity
        self._by_score = policy == "lru_ap"
        self._used: dict[int, int] = {}  # layers on the GPU, by the time of their last use
        self._seen: dict[int, int] = {}
        self._locality: dict[int, float] = {}
        self._now = 0

    def use(self, layer: int) -> bool:
        """Use a layer; returns whether it was on the GPU."""
        self._now += 1
        hit = layer in self._used
        near, far = LOCALITY
        self._locality[layer] = (self._locality.get(layer, far) + (near if hit else far)) / 2
        before, self._seen[layer] = self._seen.get(layer, 0), self._now
        if not hit and len(self._used) >= self.capacity and not self._make_room(layer, self._now - before):
            return False
        if self.capacity:
            self._used[layer] = self._now
        return hit

    def _make_room(self, layer: int, came_back_after: int) -> bool:
        if not self.capacity:
            return False
        if not self._by_score:
            del self._used[min(self._used, key=self._used.__getitem__)]
            return True
        victim = max(self._used, key=lambda other: (self._score(other), -other))
        if came_back_after * self._locality[layer] >= self._score(victim):
            return False
        del self._used[victim]
        return True

    def _score(self, layer: int) -> float:
        return (self._now - self._used[layer]) * self._locality[layer]


def streamed_layers(layers: int, capacity: int, policy: str) -> float:
    """Layers to copy in each step once the cache has settled, which every step reads from first to last."""
    cache = LayerCache(capacity, policy)
    hits = [sum(cache.use(layer) for layer in range(layers)) for _ in range(PASSES)]
    settled = hits[PASSES // 2 :]
    return layers - sum(settled) / len(settled)


class WeightStreaming:
    """Prices a step of ``target`` whose replica copies ``copies`` layers of ``copy_s`` seconds each in every step."""

    def __init__(self, target: LatencyModel, *, copies: float, copy_s: float, prefetch: bool) -> None:
        self.stream_s = copies * copy_s
        self._target = target
        self._prefetch = prefetch
        for name in ("path", "describe", "provenance"):
            if hasattr(target, name):
                setattr(self, name, getattr(target, name))

    def step_s(self, shape: StepShape) -> float:
        """Seconds of the step with its copies."""
        seconds = self._target.step_s(shape)
        return max(seconds, self.stream_s) if self._prefetch else seconds + self.stream_s

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """As ``step_s`` for each step."""
        durations = self._target.run_s(shape, steps)
        if self._prefetch:
            return [max(seconds, self.stream_s) for seconds in durations]
        return [seconds + self.stream_s for seconds in durations]
