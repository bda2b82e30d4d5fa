"""A latency model with the price of adapters: those in use are read beside the trunk, those that come are copied from the host."""

from __future__ import annotations

from hwmodels.latency import LatencyModel
from serving.adapters import adapter_bytes
from serving.catalog import Gpu
from serving.llm import Llm
from serving.plan import StepShape

KERNELS_PER_MATRIX = 2  # shrink and expand, each for all sequences of the step (Punica, arXiv 2310.18547)
MATRICES = 4  # qkv, output, gate and up, down


class Adapted:
    """Prices a step of ``target``; a step in which n adapters are used reads each once, with two kernels a matrix and layer for all.

    A load is waited for: the step that needs the adapter begins after it (``StepShape.adapter_loads`` of them, one after the other).
    """

    def __init__(self, target: LatencyModel, llm: Llm, gpu: Gpu, *, rank: int, tensor_parallel: int = 1, load_bytes_per_s: float | None = None) -> None:
        fit = gpu.kernels.gemm["bf16"]
        size = adapter_bytes(llm, rank, tensor_parallel)
        link = gpu.pcie
        self.read_s = size / (gpu.memory_bytes_per_s * fit.memory_efficiency)
        self.kernels_s = KERNELS_PER_MATRIX * MATRICES * llm.layers * fit.latency_s
        self.load_s = link.latency_s + size / (load_bytes_per_s or link.bytes_per_s * link.efficiency)
        self._target = target
        for name in ("path", "describe", "provenance"):
            if hasattr(target, name):
                setattr(self, name, getattr(target, name))

    def _extra_s(self, shape: StepShape) -> float:
        return (self.kernels_s + shape.adapters * self.read_s if shape.adapters else 0.0) + shape.adapter_loads * self.load_s

    def step_s(self, shape: StepShape) -> float:
        """Seconds of the step, adapters included."""
        return self._target.step_s(shape) + self._extra_s(shape)

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """As ``step_s`` for each step: the adapters in use do not change in a run."""
        extra_s = self._extra_s(shape)
        return [seconds + extra_s for seconds in self._target.run_s(shape, steps)]
