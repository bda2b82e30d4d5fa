"""Which resource holds a run back, in one sentence, from the numbers of its summary and the facts of its fleet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.policies.build import build_layout

if TYPE_CHECKING:
    from serving.catalog import Gpu
    from serving.llm import Llm
    from serving.scenario import Scenario, Slo

_FULL = 0.95  # a pool or a set of slots this full turns work away
_IDLE = 0.60  # a fleet busy for less than this waits for work, not work for it
_ROOM = 0.70  # a load factor below this leaves room to spare
_STALL = 3.0  # gaps between tokens that vary by more than this are stalls behind prompts
_WAITING = 0.10  # share of the end-to-end time in the queue from which waiting is worth naming


@dataclass(frozen=True, slots=True)
class Fleet:
    """Facts of the fleet that ran, one GPU's share where it says ``gpu``."""

    llm: str
    gpu: str
    replicas: int
    tensor_parallel: int
    gpus_per_replica: int
    max_batch_seqs: int  # of one replica
    closed_loop: bool  # users wait for their answer before they ask again
    active_parameters: int  # that one token touches
    attention_flops_per_token_pair: int  # of one query token against one cached token, over all layers
    gpu_weight_bytes: float  # read by a step (of experts, all: a step of any size touches most of them)
    gpu_kv_bytes_per_token: float
    gpu_flops: float  # peak, per second
    gpu_memory_bytes_per_s: float  # peak
    kv_tokens: int  # that one replica's pool holds


def fleet_of(scenario: Scenario, llm: Llm, gpu: Gpu, *, kv_tokens: int) -> Fleet:
    """Gather the facts of the fleet that a scenario describes; ``kv_tokens`` is what one replica's pool holds."""
    cluster = scenario.cluster
    layout = build_layout(cluster, scenario.policy, llm)
    weight_dtype = None if cluster.weight_dtype == "auto" else cluster.weight_dtype
    kv_dtype = "bf16" if scenario.kv_cache.dtype == "auto" else scenario.kv_cache.dtype
    return Fleet(
        llm=llm.name,
        gpu=gpu.name,
        replicas=cluster.replicas,
        tensor_parallel=cluster.tensor_parallel,
        gpus_per_replica=layout.gpus,
        max_batch_seqs=scenario.policy.batching.max_batch_seqs,
        closed_loop=scenario.workload.closed_loop is not None,
        active_parameters=llm.parameters().active,
        attention_flops_per_token_pair=4 * llm.layers * llm.heads * llm.head_dim,  # a multiply and an add, for QK and for PV
        gpu_weight_bytes=layout.weight_bytes(llm, weight_dtype),
        gpu_kv_bytes_per_token=layout.kv_bytes_per_token(llm, kv_dtype),
        gpu_flops=gpu.peak_flops(llm.dtype_of_weights(weight_dtype)),
        gpu_memory_bytes_per_s=gpu.memory_bytes_per_s,
        kv_tokens=kv_tokens,
    )


@dataclass(frozen=True, slots=True)
class Use:
    """How far each resource was used: fractions of its peak while steps ran, sequences in service per replica."""

    compute: float
    bandwidth: float
    running: float


def use(summary: Mapping[str, Any], fleet: Fleet) -> Use:
    """Estimate the use of compute and memory bandwidth from totals; recomputation after preemptions is not counted.

    Compute: 2 flops per active parameter and token (Kaplan et al. 2020, arXiv 2001.08361, eq. 2.2 without attention), plus attention
    over half the prompt. Bandwidth: each step reads the weights and the cache in use. Running: Little's law on the time in service.
    """
    busy_s = (summary["gpu_busy_fraction"] or 0.0) * summary["duration_s"] * fleet.replicas
    requests_per_s = summary["requests_per_s"] or 0.0
    if not busy_s or not requests_per_s:
        return Use(0.0, 0.0, 0.0)
    new_prompt_per_s = summary["prompt_tokens_per_s"] * (1 - (summary["prefix_cache_hit_rate"] or 0.0))
    half_prompt = summary["prompt_tokens_per_s"] / requests_per_s / 2
    flops_per_s = 2 * fleet.active_parameters * (new_prompt_per_s + summary["output_tokens_per_s"])
    flops_per_s += fleet.attention_flops_per_token_pair * new_prompt_per_s * half_prompt
    per_busy_gpu_s = summary["duration_s"] / busy_s
    cached_tokens = (summary["kv_utilisation"]["mean"] or 0.0) / summary["gpu_busy_fraction"] * fleet.kv_tokens
    step_bytes = fleet.gpu_weight_bytes + cached_tokens * fleet.gpu_kv_bytes_per_token
    in_service_s = (summary["e2e_s"]["mean"] or 0.0) - (summary["queue_s"]["mean"] or 0.0)
    return Use(
        compute=flops_per_s * per_busy_gpu_s / (fleet.gpu_flops * fleet.gpus_per_replica),
        bandwidth=summary["steps"] * step_bytes / busy_s / fleet.gpu_memory_bytes_per_s,
        running=requests_per_s * in_service_s / fleet.replicas,
    )


def bottleneck(summary: Mapping[str, Any], fleet: Fleet, slo: Slo) -> str:
    """Return one sentence that names what limits this run: clients, KV capacity, queueing, compute or memory bandwidth.

    A fleet with room to spare may still miss its objectives ``slo``; then the sentence says for want of what.
    """
    if not summary["requests"]["completed"]:
        return "Bottleneck: none to name, as no request completed."
    used = use(summary, fleet)
    busy = summary["gpu_busy_fraction"] or 0.0
    queue_share = (summary["queue_s"]["mean"] or 0.0) / (summary["e2e_s"]["mean"] or 1.0)
    waiting = queue_share >= _WAITING
    kv_max = summary["kv_utilisation"]["max"] or 0.0
    queue = f"requests spend {queue_share:.0%} of their time in the queue"
    if summary["preemptions"] or (waiting and kv_max >= _FULL):
        evicted = f" and {summary['preemptions']:,} preemptions had to recompute" if summary["preemptions"] else ""
        return f"Bottleneck: KV capacity - the cache was up to {kv_max:.0%} full{evicted}; {queue}."
    if waiting and used.running >= _FULL * fleet.max_batch_seqs:
        return f"Bottleneck: queueing for batch slots - {used.running:.0f} of {fleet.max_batch_seqs} sequences a replica run on average; {queue}."
    if fleet.closed_loop and not waiting:
        return f"Bottleneck: the clients - they keep only {used.running:.1f} requests a replica in flight, and hardly any of them waits."
    both = f"while steps run, about {used.compute:.0%} of peak compute and {used.bandwidth:.0%} of peak memory bandwidth are used"
    name = "compute" if used.compute > used.bandwidth else "memory bandwidth"
    load = summary["load_factor"]
    if load is not None and load < _ROOM and not waiting:
        missed = (summary["slo_attainment"]["overall"] or 0.0) < slo.attainment
        late = _late(summary, slo, f"{load:.0%} of what the fleet can serve") if missed else ""
        reason = f"{name} sets the pace of a token ({both})"
        return late or f"Bottleneck: none at this load, {load:.0%} of what the fleet can serve; {reason}."
    if busy < _IDLE:
        return f"Bottleneck: none - the GPUs are busy {busy:.0%} of the time and wait for work."
    return f"Bottleneck: {name} - the GPUs are busy {busy:.0%} of the time, and {both}."


def _late(summary: Mapping[str, Any], slo: Slo, load: str) -> str:
    """Return why objectives are missed although there is room: bursts, or steps that hold prompts; empty when it is neither."""
    targets = [slo.targets(name) for name in summary["slo_attainment"]["by_class"]]
    gap, first, queue = summary["itl_s"], summary["ttft_s"], summary["queue_s"]
    if (first["p99"] or 0.0) > min((target.ttft_s for target in targets), default=math.inf) and queue["p99"] > first["p99"] / 2:
        return f"Bottleneck: queueing in bursts - on average the load is {load}, but the slowest 1% queue for {queue['p99']:.2g} s or more."
    stalled = (gap["p99"] or 0.0) > _STALL * (gap["p50"] or 0.0)
    if (summary["tpot_s"]["p99"] or 0.0) > min((target.tpot_s for target in targets), default=math.inf) and stalled:
        stalls = f"tokens wait up to {gap['p99'] * 1e3:.0f} ms (p99) for steps that hold prompts; the median is {gap['p50'] * 1e3:.0f} ms"
        return f"Bottleneck: compute of prompts - the load is {load}, but {stalls}."
    return ""


def load_words(load_factor: float | None) -> str:
    """Return what a load factor (offered over saturated throughput) means for whoever plans with it."""
    if load_factor is None:
        return "closed loop: the users set the pace"
    if load_factor >= 1.0:
        return "OVERLOADED: more arrives than can be served, and the queue grows as long as it lasts"
    if load_factor >= 0.9:
        return "near saturation: a few per cent more load would multiply the waiting"
    if load_factor >= _ROOM:
        return "well used: bursts queue for a while"
    return "room to spare on average"
