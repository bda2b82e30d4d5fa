"""Which weights lie in GPU memory, the trunk and the adapter slots beside it, and what came and went."""

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


def resident_gib(scenario: Scenario, llm: Llm, layout: Layout) -> float | None:
    """GiB on the fullest GPU of a replica; None where they are the trunk's and nothing else."""
    cluster, adapters = scenario.cluster, scenario.adapters
    if adapters is None:
        return None
    trunk = layout.weight_bytes(llm, None if cluster.weight_dtype == "auto" else cluster.weight_dtype)
    return (trunk + adapters.slots * adapter_bytes(llm, adapters.rank, layout.tensor_parallel)) / GIB


def adapter_report(replicas: Iterable[Replica], priced_by: LatencyModel) -> dict[str, Any]:
    """The ``adapters`` part of summary.json: loads, the share of sequences that found theirs in a slot, seconds spent loading."""
    slots = [replica.scheduler.policies.adapters for replica in replicas]
    loads, hits = sum(one.loads for one in slots), sum(one.hits for one in slots)
    return {"loads": loads, "hit_rate": hits / (hits + loads) if hits + loads else None, "load_s": loads * priced_by.load_s}
