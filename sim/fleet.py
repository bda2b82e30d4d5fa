"""From a scenario to the parts of a simulation: catalogue facts, memory, latency model, replicas."""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels import latency
from hwmodels.latency import LatencyModel
from serving.catalog import Gpu, load_gpu, load_llm
from serving.errors import InputError
from serving.kv_pool import KVPool
from serving.llm import Llm
from serving.memory import KvCapacity, kv_capacity
from serving.metrics import Metrics
from serving.policies.build import build_policies, build_routing
from serving.recording import Recording
from serving.rng import stream
from serving.scenario import Scenario
from serving.scheduler import Scheduler
from sim.cluster import Cluster
from sim.environment import Environment
from sim.replica import Replica


@dataclass(frozen=True, slots=True)
class Parts:
    """What a scenario resolves to. ``max_model_len`` is the scenario's, or as much of the catalogue's as the pool can hold."""

    scenario: Scenario
    llm: Llm
    gpu: Gpu
    capacity: KvCapacity
    latency: LatencyModel
    max_model_len: int


def resolve(scenario: Scenario) -> Parts:
    """Look everything up and check that it can work at all. Raises InputError naming the binding limit."""
    cluster, cache, batching = scenario.cluster, scenario.kv_cache, scenario.policy.batching
    llm, gpu = load_llm(scenario.llm), load_gpu(cluster.gpu)
    weight_dtype = None if cluster.weight_dtype == "auto" else cluster.weight_dtype
    kv_dtype = "bf16" if cache.dtype == "auto" else cache.dtype
    if cluster.pipeline_parallel != 1:
        raise InputError("cluster.pipeline_parallel", "only 1 stage of layers can be simulated")
    if scenario.max_model_len is not None and scenario.max_model_len > llm.max_model_len:
        raise InputError("max_model_len", f"{scenario.max_model_len} tokens exceed what {llm.name} was made for", f"{llm.max_model_len} at most")
    capacity = kv_capacity(
        llm,
        gpu,
        tensor_parallel=cluster.tensor_parallel,
        memory_fraction=cache.memory_fraction,
        block_tokens=cache.block_tokens,
        max_model_len=scenario.max_model_len or 1,
        max_batch_tokens=batching.max_batch_tokens,
        max_batch_seqs=batching.max_batch_seqs,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        blocks=cache.blocks,
    )
    if not capacity.fits or capacity.usable_blocks < 1:
        where = "max_model_len" if capacity.usable_blocks > 0 else "cluster"
        raise InputError(where, f"{llm.name} does not fit on {cluster.tensor_parallel} x {gpu.name}", capacity.binding_limit)
    model = latency.build(
        scenario.latency.name,
        scenario.latency.options,
        llm=llm,
        gpu=gpu,
        tensor_parallel=cluster.tensor_parallel,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        where=scenario.latency.where,
    )
    longest = scenario.max_model_len or min(llm.max_model_len, capacity.usable_blocks * cache.block_tokens)
    return Parts(scenario, llm, gpu, capacity, model, longest)


def build_cluster(
    parts: Parts, metrics: Metrics, *, replicas: int | None = None, stepwise: bool = False, audit: float = 0.0, recording: Recording | None = None
) -> Cluster:
    """Build the fleet (``replicas`` overrides its size) on a new environment. Raises InputError for a mistake in a policy."""
    scenario = parts.scenario
    cache, policy = scenario.kv_cache, scenario.policy
    if policy.batching.max_in_flight > 2:
        raise InputError("policy.batching.max_in_flight", "at most 2 plans in flight can be simulated")
    built = []
    for index in range(replicas or scenario.cluster.replicas):
        pool = KVPool(parts.capacity.blocks, cache.block_tokens, prefix_caching=cache.prefix_caching)
        scheduler = Scheduler(pool, build_policies(policy), max_in_flight=policy.batching.max_in_flight)
        auditor = stream(scenario.seed, f"audit.{index}") if audit else None
        built.append(
            Replica(
                index, scheduler, parts.latency, metrics, stepwise=stepwise, audit=auditor, audit_share=audit, recording=recording
            )
        )  # fmt: skip
    return Cluster(Environment(), built, build_routing(policy), stepwise=stepwise)


def new_metrics(scenario: Scenario, *, keep_rows: bool = False) -> Metrics:
    """Metrics for the scenario's classes and objectives."""
    names = [row.name for row in scenario.workload.classes] or ["default"]
    measure = scenario.measure
    return Metrics(names, scenario.slo.targets, warmup_s=measure.warmup_s, cooldown_s=measure.cooldown_s, keep_rows=keep_rows)
