"""Steps that run by a plan compiled for one number of tokens: a static partition of the work, operators fused, recompiled when it drifts.

A plan for m tokens runs n of them in ceil(n / m) passes, each as long as m take: too large a plan pads, too small a one reads the
weights again. Decode-only steps have a plan of their own beside that of steps with prompts. How long tensors live follows from the
tokens: the residual stream lives through the whole step, so the drift is the difference between what n and m tokens take.

At a boundary between two matrix products the pass over memory is fused away where the intermediate fits in the cache that
the cores share and handing it over there costs less than a share of the computation around it; that is decided when compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hwmodels.latency import LatencyModel
from hwmodels.operators import ACTIVATION_BYTES, Cost, Operators
from serving.plan import StepShape


class Recompile(Protocol):
    """When to compile again; of kind ``recompile`` in serving.policies."""

    drift_above_s: float

    def recompile(self, drifted_steps: int) -> bool: ...


class SharedCache(NamedTuple):
    """The cache through which cores hand over what is fused: its size, its rate, and the share of computing that this may cost."""

    size_bytes: float
    bytes_per_s: float
    cross_share: float = 0.3


class Boundary(NamedTuple):
    """Between two operators, all layers: bytes of one layer's intermediate, seconds that fusing takes away, that handing over and computing take."""

    name: str
    intermediate_bytes: float
    saved_s: float
    cross_s: float
    compute_s: float

    def fuses(self, cache: SharedCache) -> bool:
        """Whether a compiler fuses here."""
        return self.intermediate_bytes <= cache.size_bytes and self.cross_s < cache.cross_share * self.compute_s


def boundaries(operators: Operators, tokens: int, cache: SharedCache) -> list[Boundary]:
    """Where a step of ``tokens`` tokens could fuse: activation into the MLP's products, rotation into the query-key-value product."""
    llm, costs = operators.llm, operators.dense(tokens)
    up, down = llm.mlp_matrices(llm.intermediate, operators.tensor_parallel)
    qkv = llm.attention_matrices(operators.tensor_parallel)[0]
    rotation: Cost = costs["rope_and_kv_write"]

    def boundary(name: str, width: int, saved_s: float, compute_s: float) -> Boundary:
        size_bytes = float(tokens * width * ACTIVATION_BYTES)
        return Boundary(name, size_bytes, saved_s, llm.layers * size_bytes / cache.bytes_per_s, compute_s)

    return [
        boundary("activation", up.outputs + down.inputs, costs["activation"].seconds, costs["mlp_up"].seconds + costs["mlp_down"].seconds),
        # The rotated keys and values are written all the same; what goes away is reading them, and the kernel.
        boundary("rotation", qkv.outputs, rotation.memory_s / 2 + rotation.launch_s, costs["qkv"].seconds),
    ]


@dataclass(slots=True)
class Plan:
    """What one kind of step is compiled for, and what it has met since."""

    tokens: int
    drifted_steps: int = 0
    most_tokens: int = 0  # in those
    recompiles: int = 0


class Compiler:
    """Facts of compiled steps on one GPU of a replica: what n tokens take planned for, and what compiling takes.

    ``recompile_s`` is for a plan of one token and of ``largest`` tokens; between them it grows in proportion.
    """

    def __init__(self, operators: Operators, cache: SharedCache, recompile_s: tuple[float, float], largest: int) -> None:
        self._operators, self._cache = operators, cache
        self._recompile_s, self._largest = recompile_s, largest
        self._planned: dict[int, tuple[float, float]] = {}

    def dense_s(self, tokens: int) -> float:
        """Seconds of the work that depends on the tokens only, not fused."""
        return self._of(tokens)[0]

    def planned_s(self, tokens: int) -> float:
        """Seconds of the same by a plan made for it."""
        return self._of(tokens)[1]

    def recompile_s(self, tokens: int) -> float:
        """Seconds for which a replica stands while a plan for ``tokens`` is compiled."""
        low, high = self._recompile_s
        return low + (high - low) * min(1.0, tokens / self._largest)

    def _of(self, tokens: int) -> tuple[float, float]:
        if tokens not in self._planned:
            dense_s = sum(cost.seconds for cost in self._operators.dense(tokens).values())
            fused = [one for one in boundaries(self._operators, tokens, self._cache) if one.fuses(self._cache)]
            self._planned[tokens] = dense_s, dense_s - sum(one.saved_s - one.cross_s for one in fused)
        return self._planned[tokens]


class Compiled:
    """Prices the steps of one replica one after the other: what a step costs depends on the plans that the steps before it left.

    Call it exactly once for each step that runs; ``run_s`` prices only the first of a run, so that each step is planned for itself.
    """

    def __init__(self, target: LatencyModel, compiler: Compiler, policy: Callable[[], Recompile], decode_tokens: int, mixed_tokens: int) -> None:
        self._arguments = target, compiler, policy, decode_tokens, mixed_tokens
        self._target, self._compiler, self._policy = target, compiler, policy()
        self.decode, self.mixed = Plan(decode_tokens), Plan(mixed_tokens)
        self.stalled_s = 0.0
        for name in ("path", "describe", "provenance"):
            if hasattr(target, name):
                setattr(self, name, getattr(target, name))

    def for_replica(self) -> Compiled:
        """Another one, with the plans of the start."""
        return Compiled(*self._arguments)

    def step_s(self, shape: StepShape) -> float:
        """Seconds of the next step, recompilation included."""
        plan = self.mixed if shape.chunks else self.decode
        tokens = shape.decodes + sum(new for new, _ in shape.chunks)
        stalled_s = self._met(plan, tokens)
        passes = -(-tokens // plan.tokens)
        compiler = self._compiler
        return self._target.step_s(shape) - compiler.dense_s(tokens) + passes * compiler.planned_s(plan.tokens) + stalled_s

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """The first of them alone."""
        return [self.step_s(shape)]

    def _met(self, plan: Plan, tokens: int) -> float:
        """Note a step of ``tokens`` tokens; returns the seconds of a recompilation before it."""
        compiler, policy = self._compiler, self._policy
        if abs(compiler.dense_s(tokens) - compiler.dense_s(plan.tokens)) <= policy.drift_above_s:
            plan.drifted_steps = plan.most_tokens = 0
            return 0.0
        plan.drifted_steps += 1
        plan.most_tokens = max(plan.most_tokens, tokens)
        if not policy.recompile(plan.drifted_steps):
            return 0.0
        plan.tokens = plan.most_tokens
        plan.drifted_steps = plan.most_tokens = 0
        plan.recompiles += 1
        seconds = compiler.recompile_s(plan.tokens)
        self.stalled_s += seconds
        return seconds
