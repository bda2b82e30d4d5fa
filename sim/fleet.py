"""From a scenario to the parts of a simulation: catalogue facts, memory, latency model, replicas."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from hwmodels import latency
from hwmodels.latency import LatencyModel
from serving.catalog import Gpu, load_gpu, load_llm
from serving.errors import InputError
from serving.kv_pool import KVPool
from serving.kv_tiers import LowerTiers, TierSpec
from serving.llm import Llm
from serving.memory import KvCapacity, kv_capacity
from serving.metrics import Metrics
from serving.policies.build import build_policies, build_routing
from serving.recording import Recording
from serving.rng import stream
from serving.scenario import Scenario
from serving.scheduler import Scheduler
from serving.topology import load_topology
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.environment import Environment
from sim.network import Network
from sim.replica import Replica
from sim.topology import LinkGraph


@dataclass(frozen=True, slots=True)
class Parts:
    """What a scenario resolves to. ``max_model_len`` is the scenario's, or as much of the catalogue's as the pool can hold."""

    scenario: Scenario
    llm: Llm
    gpu: Gpu
    capacity: KvCapacity
    latency: LatencyModel
    max_model_len: int

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.scenario.cluster.replicas * self.scenario.cluster.tensor_parallel


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


def pool_scenario(scenario: Scenario, role: str) -> Scenario:
    """The scenario of one pool of a disaggregated fleet, as if it were a fleet of its own."""
    cluster, batching = scenario.cluster, scenario.policy.batching
    pool = cluster.pool(role)
    own = {"replicas": pool.replicas, "gpu": pool.gpu or cluster.gpu, "tensor_parallel": pool.tensor_parallel or cluster.tensor_parallel, "pools": ()}
    limits = {key: getattr(pool, key) for key in ("max_batch_tokens", "max_batch_seqs") if getattr(pool, key) is not None}
    policy = scenario.policy.model_copy(update={"batching": batching.model_copy(update=limits)})
    return scenario.model_copy(update={"cluster": cluster.model_copy(update=own), "policy": policy})


def build_fleet(
    scenario: Scenario, parts: dict[str, Parts], metrics: Metrics, *, stepwise: bool = False, audit: float = 0.0, recording: Recording | None = None
) -> Cluster | Disaggregated:
    """Build the whole fleet of ``scenario`` on a new environment; ``parts`` are those of ``resolve_fleet``.

    Raises InputError for a mistake in a policy, or for pools that the topology cannot hold or join.
    """
    options = {"stepwise": stepwise, "audit": audit, "recording": recording}
    if not scenario.cluster.pools:
        scaling = scenario.cluster.autoscaling
        return build_cluster(parts["replicas"], metrics, replicas=scaling.maximum if scaling is not None else None, **options)
    prefill = build_cluster(parts["prefill"], metrics, **options)
    decode = build_cluster(parts["decode"], metrics, env=prefill.env, first_label=len(prefill.replicas), **options)
    graph = LinkGraph(load_topology(scenario.cluster.topology, nodes=scenario.cluster.nodes))
    gpus = place(graph, [parts["prefill"], parts["decode"]])
    per_token = max(part.capacity.kv_bytes_per_token * part.scenario.cluster.tensor_parallel for part in parts.values())
    return Disaggregated(prefill, decode, Network(graph, prefill.env), lambda replica: gpus[replica.label], per_token)


def place(graph: LinkGraph, pools: list[Parts]) -> list[list[str]]:
    """GPU names of every replica of ``pools``, in order: consecutive GPUs of the topology. Raises InputError when they run out."""
    gpus = iter(graph.gpus)
    placed = [
        list(itertools.islice(gpus, part.scenario.cluster.tensor_parallel)) for part in pools for _ in range(part.scenario.cluster.replicas)
    ]
    wanted = sum(part.scenario.cluster.tensor_parallel * part.scenario.cluster.replicas for part in pools)
    if wanted > len(graph.gpus):
        raise InputError("cluster.pools", f"need {wanted} GPUs; the topology has {len(graph.gpus)}", "raise cluster.nodes or use fewer replicas")
    return placed


def resolve_fleet(scenario: Scenario) -> dict[str, Parts]:
    """Resolve each pool by its role, or the one kind of replica as ``replicas``. Raises InputError naming the binding limit."""
    if not scenario.cluster.pools:
        return {"replicas": resolve(scenario)}
    if scenario.policy.batching.max_in_flight != 1:
        raise InputError("policy.batching.max_in_flight", "with pools only 1 plan in flight can be simulated")
    return {role: resolve(pool_scenario(scenario, role)) for role in ("prefill", "decode")}


def build_cluster(
    parts: Parts,
    metrics: Metrics,
    *,
    replicas: int | None = None,
    env: Environment | None = None,
    first_label: int = 0,
    stepwise: bool = False,
    audit: float = 0.0,
    recording: Recording | None = None,
) -> Cluster:
    """Build identical replicas (``replicas`` overrides their number) behind a router, on ``env`` or a new environment.

    ``first_label`` numbers them in records. Raises InputError for a mistake in a policy.
    """
    scenario = parts.scenario
    policy = scenario.policy
    if policy.batching.max_in_flight > 2:
        raise InputError("policy.batching.max_in_flight", "at most 2 plans in flight can be simulated")
    built = []
    for index in range(replicas or scenario.cluster.replicas):
        label = first_label + index
        auditor = stream(scenario.seed, f"audit.{label}") if audit else None
        built.append(
            Replica(
                index, new_scheduler(parts), parts.latency, metrics, label=label, stepwise=stepwise, audit=auditor, audit_share=audit, recording=recording
            )
        )  # fmt: skip
    return Cluster(env or Environment(), built, build_routing(policy), stepwise=stepwise)


def new_scheduler(parts: Parts) -> Scheduler:
    """An empty scheduler for one replica. Raises InputError for a mistake in a policy."""
    cache, policy = parts.scenario.kv_cache, parts.scenario.policy
    pool = KVPool(parts.capacity.blocks, cache.block_tokens, prefix_caching=cache.prefix_caching, lower=lower_tiers(parts))
    return Scheduler(pool, build_policies(policy), max_in_flight=policy.batching.max_in_flight)


def lower_tiers(parts: Parts) -> LowerTiers | None:
    """The KV tiers below one replica's GPUs; None without any. Raises InputError for a tier smaller than a page."""
    cache, link = parts.scenario.kv_cache, parts.gpu.pcie
    if not cache.tiers:
        return None
    if not cache.prefix_caching:
        raise InputError("kv_cache.tiers", "keep pages by their content, which needs kv_cache.prefix_caching")
    block_bytes = cache.block_tokens * parts.capacity.kv_bytes_per_token
    specs = []
    for index, tier in enumerate(cache.tiers):
        blocks = int(tier.gib * 2**30 // block_bytes)
        if blocks < 1:
            raise InputError(f"kv_cache.tiers[{index}].gib", f"{tier.gib} GiB hold no page of {block_bytes} bytes")
        read = tier.read_bytes_per_s or link.bytes_per_s * link.efficiency
        latency_s = link.latency_s if tier.latency_s is None else tier.latency_s
        specs.append(TierSpec(tier.name, blocks, read, tier.write_bytes_per_s or read, latency_s))
    return LowerTiers(specs, block_bytes)


def new_metrics(scenario: Scenario, *, keep_rows: bool = False) -> Metrics:
    """Metrics for the scenario's classes and objectives."""
    names = [row.name for row in scenario.workload.classes] or ["default"]
    measure, faults = scenario.measure, scenario.faults
    return Metrics(
        names, scenario.slo.targets, warmup_s=measure.warmup_s, cooldown_s=measure.cooldown_s, keep_rows=keep_rows,
        timeline_s=faults.window_s if faults is not None else None,
    )  # fmt: skip


def tier_report(replicas: list[Replica]) -> list[dict[str, Any]]:
    """What the lower KV tiers of a fleet moved, for its summary."""
    pools = [replica.scheduler.pool for replica in replicas]
    first = pools[0].lower
    return [
        {
            "name": spec.name,
            "capacity_blocks": spec.blocks * len(pools),
            "used_blocks": sum(pool.lower.pages(tier) for pool in pools),
            "stored_blocks": sum(pool.lower.stored[tier] for pool in pools),
            "loaded_blocks": sum(pool.lower.loaded[tier] for pool in pools),
            "loaded_bytes": sum(pool.lower.loaded[tier] for pool in pools) * first.block_bytes,
        }
        for tier, spec in enumerate(first.specs)
    ]
