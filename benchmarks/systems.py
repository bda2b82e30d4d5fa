"""The figures of docs/systems.md: every system against its plain alternative, each by a scenario of the repository.

    python -m benchmarks.systems              all of them, a few minutes
    python -m benchmarks.systems A4 D4        some

Each line is a run of ``twinserve run SCENARIO --set ...`` and prints what the table quotes. Results are those of the seeds in the files.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from serving.scenario import load
from sim.run import simulate


@dataclass(frozen=True, slots=True)
class Effect:
    """One system: a scenario, what to print of its summary, and the settings to compare (none: the scenario as it is)."""

    scenario: str
    figures: tuple[str, ...]
    settings: dict[str, tuple[str, ...]]


LATENCY = ("ttft_s.mean", "ttft_s.p99", "tpot_s.mean", "output_tokens_per_s", "slo_attainment.overall")
BURST = "policy.admission={name: adaptive_burst, tokens_per_s: 20000, min_burst_tokens: 4000, max_burst_tokens: 60000}"
EFFECTS = {
    "A1": Effect("priority-preemption", ("slo_attainment.by_class", "preemptions", "load_factor"), {
        "as it is": (), "no classes": ("policy.ordering=fcfs",)}),
    "A2": Effect("qos-window", ("slo_attainment.overall", "slo_attainment.by_class.p0", "ttft_s.mean", "tpot_s.mean", "e2e_s.mean"), {
        "adaptive": (), "fixed, 16 or 0.2 s": ("policy.batching.window={name: fixed, size: 16, window_s: 0.2}",),
        "fixed, 4 or 0.2 s": ("policy.batching.window={name: fixed, size: 4, window_s: 0.2}",), "none": ("policy.batching.window=none",)}),
    "A3": Effect("rtt-window", LATENCY, {
        "adaptive": (), **{f"fixed, {ms} ms": (f"policy.batching.window={{name: fixed, size: 64, window_s: {ms / 1000}}}",) for ms in (50, 100, 200)},
        "none": ("policy.batching.window=none",)}),
    "A4": Effect("prefix-batching", (*LATENCY, "prefix_cache_hit_rate", "load_factor"), {
        "by shared prefix": (), "chunked prefill": ("policy.batching.name=chunked_prefill",)}),
    "A5": Effect("two-streams", ("ttft_s.p99", "itl_s.p99", "output_tokens_per_s", "load_factor"), {
        "two streams": (), "one stream": ("policy.batching={name: chunked_prefill, max_batch_tokens: 2048, max_batch_seqs: 256}",)}),
    "A6": Effect("pd-8xh200", LATENCY, {
        "apart": (), "together": ("cluster.pools=[]", "cluster.replicas=8")}),
    "A7": Effect("speculative", ("tpot_s.mean", "output_tokens_per_s", "speculation"), {
        "four drafts": (), "none": ("speculation=null",)}),
    "A8": Effect("reasoning", ("e2e_s.mean", "ttft_s.mean", "prefix_cache_hit_rate", "preemptions"), {
        "rounds reuse the prefix": (), "no prefix cache": ("kv_cache.prefix_caching=false",), "no thinking": ("workload.reasoning=null",)}),
    "A9": Effect("autoscaling", ("ttft_s.p99", "slo_attainment.overall", "cost_usd"), {
        "grows": (), "eight from the start": ("cluster.autoscaling=null", "cluster.replicas=8")}),
    "A10": Effect("bursts", ("ttft_s.mean", "ttft_s.p99", "goodput_rps", "slo_attainment.overall", "requests.rejected"), {
        label: ("workload.arrivals.pieces.1.load_factor=1.4", *settings) for label, settings in {
            "everybody is let in": (), "a queue of 16": ("policy.admission={name: fits, max_queue: 16}",),
            "token bucket": ("policy.admission={name: token_bucket, tokens_per_s: 20000, burst_tokens: 40000}",),
            "adaptive burst": (BURST,), "and clients try again": (BURST, "workload.retry={attempts: 3, backoff_s: 1.0, factor: 2.0, jitter: 0.1}"),
            "circuit breaker": ("policy.admission={name: burn_rate, sheds_from: 0}",)}.items()}),
    "A11": Effect("shared-gpu", ("itl_s.mean", "itl_s.p99", "ttft_s.p99"), {
        "in time": (), "with a context cache": ("cluster.tenancy.context_cache=true",), "in parts": ("cluster.tenancy.share=partition",),
        "alone": ("cluster.tenancy=null",)}),
    "A12": Effect("topology-routing", ("ingress.delivery_s.p99", "ingress.throughput_swing", "ttft_s.p99"), {
        "by topology": (), "random": ("policy.routing=random",), "by load": ("policy.routing=least_outstanding_tokens",)}),
    "A13": Effect("edge-to-centre", (*LATENCY, "gpu_busy_fraction", "sites.network_s.mean"), {
        "short prompts at the edge": (), "all at the centre": ("sites.routing=innermost",), "all at the edge": ("sites.routing=nearest",),
        "spill-over": ("sites.routing={name: spill_over, max_waiting: 0.5}",),
        "quickest": ("sites.routing={name: quickest, token_s: {edge: 1.0e-4, regional: 3.0e-5, central: 3.0e-5}, waiting_s: {edge: 0.1, regional: 0.03, central: 0.03}}",)}),
    "A15": Effect("adapters", ("ttft_s.mean", "output_tokens_per_s"), {
        "eight slots": (), "a blocked head blocks": ("adapters.max_bypasses=0",)}),
    "B1": Effect("chat-8b", ("kv_utilisation.mean", "kv_utilisation.max", "load_factor"), {
        label: (f"kv_cache.block_tokens={tokens}", "kv_cache.prefix_caching=false", "workload.requests=3000") for label, tokens in (
            ("pages of 16 tokens", 16), ("of 1", 1), ("of 256", 256), ("one of 16,384 a request", 16384))}),
    "B2": Effect("kv-offload", (*LATENCY, "prefix_cache_hit_rate"), {
        "host tier": (), "none": ("kv_cache.tiers=[]",), "never read back": ("policy.reload=never",)}),
    "B2-heat": Effect("page-heat", ("prefix_cache_hit_rate", "ttft_s.mean", "ttft_s.p99", "slo_attainment.overall"), {
        "by heat": (), "least recently used": ("kv_cache.eviction=lru",), "no tier": ("kv_cache.tiers=[]",),
        "64 GiB, by heat": ("kv_cache.tiers.0.gib=64.0",), "64 GiB, LRU": ("kv_cache.tiers.0.gib=64.0", "kv_cache.eviction=lru")}),
    "B3": Effect("stage-cache", ("stages.0.time_s.mean", "stages.0.time_s.p99", "stages.0.cache.hit_rate", "ttft_s.mean", "ttft_s.p99"), {
        "predicted": (), "always": ("stages.0.cache.branch=always",), "never": ("stages.0.cache.branch=never",)}),
    "B4": Effect("retrieval-cache", ("stages.0.time_s.mean", "stages.0.requests", "stages.0.served", *(f"stages.0.retrieval.{tier}.hit_rate" for tier in ("answers", "results", "texts")),
        "stages.0.retrieval.peak_bytes", "ttft_s.mean", "e2e_s.mean"), {
        "three tiers": (), "no answers": ("stages.0.retrieval.answers=null",),
        "documents only": ("stages.0.retrieval.answers=null", "stages.0.retrieval.results=null"),
        "none": tuple(f"stages.0.retrieval.{tier}=null" for tier in ("answers", "results", "texts"))}),
    "B5": Effect("coherence", ("prefix_cache_hit_rate", "ttft_s.mean", "coherence.messages", "coherence.bytes", "coherence.lag_s.mean"), {
        "every second": (), "told at once": ("policy.routing.period_s=0",), "every 10 s": ("policy.routing.period_s=10",), "every 60 s": ("policy.routing.period_s=60",),
        "never": ("policy.routing.period_s=null",), "never, quorum of 3": ("policy.routing.period_s=null", "policy.routing.f=1"),
        "never, quorum of 7": ("policy.routing.period_s=null", "policy.routing.f=3"), "one router": ("policy.routing=prefix_affinity",)}),
    "B6": Effect("kv-sharding", (*LATENCY, "kv_utilisation.max", "load_factor"), {
        "head": ("policy.sharding=head",), "layer": ("policy.sharding=layer",), "sequence": ("policy.sharding=sequence",)}),
    "B7": Effect("chat-8b", ("kv_utilisation.max", "tpot_s.mean", "e2e_s.mean"), {
        "bf16 pages": ("workload.requests=3000",), "fp8 pages": ("kv_cache.dtype=fp8", "workload.requests=3000")}),
    "B8": Effect("layer-reuse", ("ttft_s.mean", "tpot_s.mean", "e2e_s.mean", "kv_utilisation.mean", "load_factor", "slo_attainment.overall"), {
        f"{label}, {rate}/s": (*settings, f"workload.arrivals.rate_rps={rate}") for rate in (0.2, 1.3) for label, settings in (
            ("similar pairs", ()), ("pairs kept in the L2", ("latency.kv_reread_from_cache=1.0",)), ("none", ("kv_cache.layer_reuse=null",)))}),
    "B9": Effect("long-context", ("ttft_s.mean", "tpot_s.mean", "e2e_s.mean", "kv_utilisation.mean"), {
        "as it is": (), "everything kept": ("retention=null",)}),
    "B10": Effect("long-context", ("tpot_s.mean", "e2e_s.mean", "kv_utilisation.mean"), {
        "by entropy": ("retention.policy=entropy",), "everything kept": ("retention=null",)}),
    "B11": Effect("weight-streaming", ("output_tokens_per_s", "tpot_s.mean"), {
        "LRU-AP, prefetched": (), "without prefetch": ("weights.streaming.prefetch=false",), "LRU": ("weights.streaming.cache=lru",),
        "INT4, all resident": ("weights=null", "cluster.weight_dtype=int4")}),
    "B12": Effect("images", ("ttft_s.mean", "ttft_s.p99", "tpot_s.mean", "prefix_cache_hit_rate", "kv_utilisation.max", "stages.0.served"), {
        "outputs and pages kept": (), "pages only": ("stages.0.cache=null",), "outputs only": ("workload.images.shared_pages=false",),
        "neither": ("stages.0.cache=null", "workload.images.shared_pages=false")}),
    "C4": Effect("ring-attention", ("ttft_s.mean", "ttft_s.p99", "load_factor"), {
        "overlapped": (), "in turn": ("latency.ring_overlap=false",), "one GPU": ("cluster.sequence_parallel=1",)}),
    "D1": Effect("quickstart", ("queue_s.mean", "queue_s.p99", "ttft_s.mean", "ttft_s.p99", "tpot_s.mean", "tpot_s.p99"), {"as it is": ()}),
    "D2": Effect("quickstart", ("tpot_s.mean",), {
        "graphs": ("llm=qwen2.5-0.5b", "max_model_len=8192", "workload.requests=500"), "eager": ("llm=qwen2.5-0.5b", "max_model_len=8192", "latency={name: roofline, capture_sizes: []}", "workload.requests=500")}),
    "D3": Effect("chat-8b", ("tpot_s.mean", "load_factor"), {
        dtype: (f"cluster.weight_dtype={dtype}", "workload.requests=3000") for dtype in ("bf16", "fp8", "int4")}),
    "D3-layers": Effect("mixed-precision", ("tpot_s.mean", "output_tokens_per_s", "ttft_s.mean"), {
        f"{label}, {rate}/s": (*settings, f"workload.arrivals.rate_rps={rate}") for rate in (1.0, 40.0) for label, settings in (
            ("half FP8, half INT4", ()), *((dtype, ("weights=null", f"cluster.weight_dtype={dtype}")) for dtype in ("bf16", "fp8", "int4")))}),
    "D4": Effect("expert-parallel", ("tpot_s.mean", "output_tokens_per_s", "slo_attainment.overall", "load_factor"), {
        "drawn": (), "balanced": ("cluster.experts.placement=balanced",), "even": ("cluster.experts.zipf=0.0",)}),
    "D5": Effect("early-exit", ("tpot_s.mean", "e2e_s.mean"), {
        f"{label}, {rate}/s": (*settings, f"workload.arrivals.rate_rps={rate}") for rate in (0.3, 20.0) for label, settings in (
            ("exits", ()), ("all layers", ("weights=null",)))}),
    "D6": Effect("recompile", ("ttft_s.mean", "ttft_s.p99", "tpot_s.mean", "e2e_s.mean", "compilation.mixed.recompiles", "compilation.stalled_s"), {
        "drift, four steps": (), "drift, at once": ("compilation.policy.steps=1",), "static": ("compilation.policy=static",),
        "static, 512 and 64": ("compilation.policy=static", "compilation.mixed_tokens=512", "compilation.decode_tokens=64"),
        "always": ("compilation.policy=always",), "nothing fused": ("compilation.cross_share=0.0",), "no plans": ("compilation=null",)}),
    "E3": Effect("integrity", ("ttft_s.mean", "ttft_s.p99", "tpot_s.mean", "e2e_s.mean", "slo_attainment.overall", "stages.0.busy_fraction"), {
        "as measured": (), "unchecked": ("integrity=null",), "60 ms, one worker": ("integrity.request_s.value=0.06",),
        "60 ms, four workers": ("integrity.request_s.value=0.06", "integrity.workers=4")}),
    "F4": Effect("replica-loss", ("ttft_s.p99", "slo_attainment.overall", "fleet.faults"), {"as it is": ()}),
    "F6": Effect("canary", ("rollout.outcome", "rollout.reason", "rollout.ended_s", "tpot_s.p99", "slo_attainment.overall"), {
        "a quarter slower": (), "a release as good": ("rollout.candidate.step_time_factor=1.0",)}),
    "PP": Effect("pipeline", (*LATENCY, "load_factor"), {
        "steady": (), "flushed": ("latency.schedule=flush",), "tensor parallel": ("cluster.tensor_parallel=4", "cluster.pipeline_parallel=1")}),
}  # fmt: skip


def figure(summary: dict[str, Any], path: str) -> Any:
    """The value at a dotted path, rounded for print; None where the run has none."""
    value: Any = summary
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value.get(key) if isinstance(value, dict) else None
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", help=f"of {' '.join(EFFECTS)}; default: all")
    for name in parser.parse_args().systems or EFFECTS:
        effect = EFFECTS[name]
        for label, settings in effect.settings.items():
            summary = simulate(load(effect.scenario, settings)).summary
            print(f"{name:<4} {label:<22}", ", ".join(f"{path} {figure(summary, path)}" for path in effect.figures), flush=True)


if __name__ == "__main__":
    main()
