"""Which weights lie in GPU memory, the trunk's layers and the adapter slots beside them, and what came and went."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hwmodels.latency import LatencyModel
from serving.adapters import adapter_bytes
from serving.layout import Layout
from serving.llm import Llm
from serving.memory import GIB
from serving.scenario import Scenario
from sim.replica import Replica

BUFFERS = 2  # layers that are under way or in use while others are streamed


def resident_gib(scenario: Scenario, llm: Llm, layout: Layout) -> float | None:
    """GiB on the fullest GPU of a replica; None where they are the trunk's and nothing else."""
    adapters, weights = scenario.adapters, scenario.weights
    if adapters is None and weights is None:
        return None
    held = _trunk_bytes(scenario, llm, layout)
    if weights is not None and weights.streaming is not None:
        away = max(0, llm.layers - kept_layers(scenario, llm) - BUFFERS)
        held -= away * layer_bytes(scenario, llm, layout)
    if adapters is not None:
        held += adapters.slots * adapter_bytes(llm, adapters.rank, layout.tensor_parallel)
    return held / GIB


def kept_layers(scenario: Scenario, llm: Llm) -> int:
    """Layers that stay on the GPU where the others are streamed."""
    return round(llm.layers * scenario.weights.streaming.resident)


def layer_bytes(scenario: Scenario, llm: Llm, layout: Layout) -> float:
    """Bytes of one layer on each GPU, on average; embedding and LM head stay where they are."""
    vocabulary = 2 * (llm.vocab * llm.hidden * (1 if llm.tied_embeddings else 2) // layout.tensor_parallel)
    return (_trunk_bytes(scenario, llm, layout) - vocabulary) / llm.layers


def _trunk_bytes(scenario: Scenario, llm: Llm, layout: Layout) -> float:
    dtype = None if scenario.cluster.weight_dtype == "auto" else scenario.cluster.weight_dtype
    mixed = scenario.weights.mixed if scenario.weights is not None else ()
    if not mixed:
        return layout.weight_bytes(llm, dtype)
    return sum(part.layers / llm.layers * layout.weight_bytes(llm, part.dtype) for part in mixed)


def adapter_report(replicas: Iterable[Replica], priced_by: LatencyModel) -> dict[str, Any]:
    """The ``adapters`` part of summary.json: loads, the share of sequences that found theirs in a slot, seconds spent loading."""
    slots = [replica.scheduler.policies.adapters for replica in replicas]
    loads, hits = sum(one.loads for one in slots), sum(one.hits for one in slots)
    return {"loads": loads, "hit_rate": hits / (hits + loads) if hits + loads else None, "load_s": loads * getattr(priced_by, "load_s", 0.0)}
