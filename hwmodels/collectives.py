"""What collectives among the GPUs of one group cost: one-shot and two-shot kernels, and the library for large messages.

Each algorithm is an alpha-beta law, seconds = latency + (bytes one GPU sends) / (bytes per second), with constants fitted to
measurements (``hwmodels/measured/collectives-*.yaml``, made by ``python -m hwmodels.fit_collectives``). ``n`` is the number of
ranks and ``S`` the bytes of the whole vector (the gathered one for all-gather, the input for reduce-scatter and all-to-all):

    one-shot all-reduce          every rank reads all others' vectors               (n-1) S
    two-shot or ring all-reduce  reduce-scatter, then all-gather                    2 (n-1)/n S
    all-gather, reduce-scatter   a ring or direct exchange                          (n-1)/n S
    all-to-all                   every rank keeps its own share                     (n-1)/n S

(Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005.) ``hwmodels.patterns`` holds
the laws of groups that span two kinds of link, of ring attention and of broadcasts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from serving.errors import InputError, nearest
from serving.files import read_yaml

MEASURED = Path(__file__).resolve().parent / "measured"
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
FACT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, config=FACT)
class Kernel:
    """One custom kernel: seconds = latency + per_peer * (n-1) + sent bytes / rate."""

    latency_s: NonNegativeFloat
    per_peer_s: NonNegativeFloat
    bytes_per_s: PositiveFloat


@dataclass(frozen=True, slots=True, config=FACT)
class Segment:
    """A regime of the library over vectors of ``from_bytes`` to ``to_bytes``: seconds = latency + sent bytes * seconds_per_byte."""

    from_bytes: NonNegativeFloat
    to_bytes: NonNegativeFloat
    latency_s: NonNegativeFloat
    seconds_per_byte: NonNegativeFloat


@dataclass(frozen=True, slots=True, config=FACT)
class CollectiveFit:
    """A fitted file. ``kernels`` (one_shot, two_shot) serve all-reduce up to ``kernel_max_bytes``; the library all the rest."""

    name: str
    gpu: str
    source: str
    command: str
    data: list[dict[str, Any]]
    errors: dict[str, Any]
    library: dict[Operation, dict[PositiveInt, list[Segment]]]
    kernels: dict[Literal["one_shot", "two_shot"], Kernel] = field(default_factory=dict)
    kernel_max_bytes: PositiveInt = 4 << 20
    notes: str = ""


def sent_bytes(operation: str, algorithm: str, size_bytes: float, ranks: int) -> float:
    """Bytes that one GPU sends (and receives) for a vector of ``size_bytes``."""
    if operation == "all_reduce":
        return size_bytes * (ranks - 1) * (1.0 if algorithm == "one_shot" else 2.0 / ranks)
    return size_bytes * (ranks - 1) / ranks


class Collectives:
    """Seconds of collectives on one kind of GPU link. Results are cached by (bytes, ranks): a step model asks for few sizes."""

    def __init__(self, fit: CollectiveFit) -> None:
        """``fit`` must have library entries for every operation that is asked for."""
        self.fit = fit
        self._all_reduce: dict[tuple[float, int], float] = {}
        self._regimes = {
            (op, ranks): Regimes(op, ranks, parts) for op, by_ranks in fit.library.items() for ranks, parts in by_ranks.items()
        }

    def allreduce_s(self, size_bytes: float, ranks: int) -> float:
        """Seconds of an all-reduce of ``size_bytes`` per rank among ``ranks`` GPUs, by the algorithm that serves this size."""
        key = (size_bytes, ranks)
        seconds = self._all_reduce.get(key)
        if seconds is None:
            seconds = self._all_reduce[key] = self._cost_s("all_reduce", size_bytes, ranks)[0]
        return seconds

    def allgather_s(self, size_bytes: float, ranks: int) -> float:
        """Seconds until every rank holds the gathered vector of ``size_bytes``."""
        return self._cost_s("all_gather", size_bytes, ranks)[0]

    def reducescatter_s(self, size_bytes: float, ranks: int) -> float:
        """Seconds until every rank holds its share of the sum of vectors of ``size_bytes``."""
        return self._cost_s("reduce_scatter", size_bytes, ranks)[0]

    def alltoall_s(self, size_bytes: float, ranks: int) -> float:
        """Seconds until every rank has sent its ``size_bytes`` in equal shares to all ranks."""
        return self._cost_s("all_to_all", size_bytes, ranks)[0]

    def algorithm(self, operation: Operation, size_bytes: float, ranks: int) -> str:
        """The algorithm that serves this size: one_shot, two_shot or library."""
        return self._cost_s(operation, size_bytes, ranks)[1]

    def algorithm_s(self, algorithm: str, operation: Operation, size_bytes: float, ranks: int) -> float:
        """Seconds by a named algorithm, whatever the size. Raises InputError when this fit has none of that name."""
        if algorithm == "library":
            return self._library_s(operation, size_bytes, ranks)
        kernel = self.fit.kernels.get(algorithm) if operation == "all_reduce" else None
        if kernel is None:
            raise InputError(
                f"collectives {self.fit.name}",
                f"no algorithm '{algorithm}' for {operation}",
                nearest(algorithm, [*self.fit.kernels, "library"]),
            )
        return kernel.latency_s + kernel.per_peer_s * (ranks - 1) + sent_bytes(operation, algorithm, size_bytes, ranks) / kernel.bytes_per_s

    def switch_bytes(self, ranks: int) -> float:
        """Vector size up to which the kernels serve all-reduce: where the library gets cheaper, or their buffer ends."""
        size = 1024.0
        while size < self.fit.kernel_max_bytes:
            kernels = min(self.algorithm_s(name, "all_reduce", size, ranks) for name in self.fit.kernels)
            if self._library_s("all_reduce", size, ranks) < kernels:
                return size
            size *= 2
        return float(self.fit.kernel_max_bytes)

    def _cost_s(self, operation: Operation, size_bytes: float, ranks: int) -> tuple[float, str]:
        if ranks <= 1:
            return 0.0, "none"
        if operation == "all_reduce" and self.fit.kernels and size_bytes <= self.fit.kernel_max_bytes:
            return min((self.algorithm_s(name, operation, size_bytes, ranks), name) for name in self.fit.kernels)
        return self._library_s(operation, size_bytes, ranks), "library"

    def _library_s(self, operation: Operation, size_bytes: float, ranks: int) -> float:
        """The fit of the nearest measured number of ranks, asked for the vector that makes a GPU send as much."""
        measured = [n for op, n in self._regimes if op == operation]
        if not measured:
            raise InputError(
                f"collectives {self.fit.name}", f"has no measurement of {operation}", nearest(operation, sorted(self.fit.library))
            )
        near = min(measured, key=lambda n: (abs(math.log2(n / ranks)), -n))
        scale = sent_bytes(operation, "library", 1.0, ranks) / sent_bytes(operation, "library", 1.0, near)
        return self._regimes[operation, near].seconds(size_bytes * scale)


class Regimes:
    """Piecewise alpha-beta, linear between regimes, never falling; the first and the last regime extend beyond what was measured."""

    def __init__(self, operation: str, ranks: int, segments: list[Segment]) -> None:
        factor = sent_bytes(operation, "library", 1.0, ranks)
        self._laws = [(segment.latency_s, segment.seconds_per_byte * factor) for segment in segments]
        self._starts = [segment.from_bytes for segment in segments]
        self._ends = [segment.to_bytes for segment in segments]
        self._floors = [0.0]
        for i in range(len(segments) - 1):
            self._floors.append(max(self._floors[i], self._law_s(i, self._ends[i])))

    def _law_s(self, i: int, size_bytes: float) -> float:
        latency_s, slope = self._laws[i]
        return max(self._floors[i], latency_s + slope * size_bytes)

    def seconds(self, size_bytes: float) -> float:
        """Seconds for a vector of ``size_bytes``."""
        i = max(0, bisect_right(self._starts, size_bytes) - 1)
        if size_bytes <= self._ends[i] or i == len(self._starts) - 1:
            return self._law_s(i, size_bytes)
        low, high = self._ends[i], self._starts[i + 1]
        low_s, high_s = self._law_s(i, low), self._law_s(i + 1, high)
        return low_s + (high_s - low_s) * (size_bytes - low) / (high - low)


def names() -> list[str]:
    """Names of the fitted collectives, sorted."""
    return sorted(path.stem.removeprefix("collectives-") for path in MEASURED.glob("collectives-*.yaml"))


def load(name_or_path: str, where: str = "latency.collectives") -> Collectives:
    """Return fitted collectives by name (that of the GPU, for the default fit) or file. Raises InputError naming ``where``."""
    if name_or_path in names():
        return _load_file(MEASURED / f"collectives-{name_or_path}.yaml")
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise InputError(where, f"there are no fitted collectives '{name_or_path}'", nearest(name_or_path, names()))
    return _load_file(path)


@lru_cache(maxsize=64)
def _load_file(path: Path) -> Collectives:
    try:
        return Collectives(TypeAdapter(CollectiveFit).validate_python(read_yaml(path)))
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{path}:{'.'.join(str(step) for step in first['loc'])}", first["msg"]) from None


def from_link(name: str, bytes_per_s: float, latency_s: float, peer_to_peer: bool = True) -> Collectives:
    """Return unmeasured collectives of a link known only by its rate one way and its latency.

    Kernels that read peers' memory need ``peer_to_peer``; the library's ring pays the latency of its 2 (n-1) steps.
    """
    kernels = {
        "one_shot": Kernel(latency_s=2 * latency_s, per_peer_s=0.0, bytes_per_s=bytes_per_s),
        "two_shot": Kernel(latency_s=4 * latency_s, per_peer_s=0.0, bytes_per_s=bytes_per_s),
    }
    library = {
        operation: {
            ranks: [Segment(from_bytes=0.0, to_bytes=0.0, latency_s=steps * (ranks - 1) * latency_s, seconds_per_byte=1 / bytes_per_s)]
            for ranks in (2, 4, 8, 16, 32)
        }
        for operation, steps in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1))
    }
    fit = CollectiveFit(
        name=name,
        gpu="",
        source="link rate and latency; not measured",
        command="",
        data=[],
        errors={},
        library=library,
        kernels=kernels if peer_to_peer else {},
    )
    return Collectives(fit)
