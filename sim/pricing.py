"""The latency model of one replica: the one its scenario names, with what the scenario adds to a step around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hwmodels import latency
from hwmodels.adapted import Adapted
from hwmodels.compiled import Compiled, Compiler, Recompile, SharedCache
from hwmodels.drafting import Drafting
from hwmodels.early_exit import EarlyExit
from hwmodels.expert_load import busiest_rank
from hwmodels.group_links import GroupLinks
from hwmodels.latency import LatencyModel
from hwmodels.mixed_precision import MixedPrecision
from hwmodels.roofline import Roofline
from hwmodels.sealed import Sealed
from hwmodels.weight_streaming import WeightStreaming, streamed_layers
from serving.catalog import Gpu, load_llm
from serving.errors import InputError
from serving.layout import Layout
from serving.llm import Llm
from serving.policies import load as load_policy
from serving.rng import stream
from serving.scenario import Scenario
from sim.held_weights import kept_layers, layer_bytes

Build = Callable[[Llm, str | None], LatencyModel]  # of an LLM with weights of a dtype; None: its own


def price(scenario: Scenario, llm: Llm, gpu: Gpu, layout: Layout, links: GroupLinks | None) -> LatencyModel:
    """Build it for a replica joined by ``links``. Raises InputError for what the latency model cannot price."""
    cluster, cache, weights = scenario.cluster, scenario.kv_cache, scenario.weights

    def build(network: Llm, dtype: str | None) -> LatencyModel:
        return latency.build(
            scenario.latency.name, scenario.latency.options, llm=network, gpu=gpu, layout=layout, links=links,
            imbalance=busiest_rank(cluster.experts, llm, layout, stream(scenario.seed, "experts")),
            weight_dtype=dtype, kv_dtype="bf16" if cache.dtype == "auto" else cache.dtype, where=scenario.latency.where,
        )  # fmt: skip

    if llm.kv_layers is not None and scenario.latency.name not in ("roofline", "recorded"):
        raise InputError("latency", f"'{scenario.latency.name}' was measured on layers that each keep their KV entries", "use roofline with kv_cache.layer_reuse")
    if scenario.latency.name == "recorded":
        return build(llm, None)  # what was measured includes drafts, adapters and all
    dtype = None if cluster.weight_dtype == "auto" else cluster.weight_dtype
    if scenario.compilation is not None:
        return _by_plans(build(llm, dtype), scenario, llm)
    if weights is None:
        model = build(llm, dtype)
    else:
        if layout.stages > 1:
            raise InputError("weights", "cannot be combined with pipeline stages", "set cluster.pipeline_parallel to 1")
        model = _trunk(scenario, llm, build, dtype)
        if weights.streaming is not None:
            model = _streamed(model, scenario, llm, gpu, layout)
    model, checks = _with_adapters(_with_drafts(model, scenario, gpu), scenario, llm, gpu, layout), scenario.integrity
    if checks is None or not (checks.step_s or checks.token_s):
        return model
    return Sealed(model, step_s=checks.step_s, token_s=checks.token_s)


def _by_plans(model: LatencyModel, scenario: Scenario, llm: Llm) -> LatencyModel:
    spec, batching = scenario.compilation, scenario.policy.batching
    if not isinstance(model, Roofline) or llm.moe is not None or llm.mla is not None:
        raise InputError("compilation", "needs the roofline without pipeline stages, and an LLM without experts or latents")
    for key, asked in (("weights", scenario.weights), ("speculation", scenario.speculation), ("adapters", scenario.adapters), ("integrity", scenario.integrity)):
        if asked is not None:
            raise InputError("compilation", f"cannot be combined with {key}")
    if batching.max_in_flight > 1 or batching.name == "two_streams":
        raise InputError("compilation", "prices one step after the other", "one plan in flight, on one stream")
    cache = SharedCache(spec.shared_cache_bytes, spec.shared_cache_bytes_per_s, spec.cross_share)
    compiler = Compiler(model.operators, cache, spec.recompile_s, batching.max_batch_tokens)

    def policy() -> Recompile:
        return load_policy("recompile", spec.policy.name, spec.policy.options, where=spec.policy.where)

    return Compiled(model, compiler, policy, spec.decode_tokens or batching.max_batch_seqs, spec.mixed_tokens or batching.max_batch_tokens)


def _trunk(scenario: Scenario, llm: Llm, build: Build, dtype: str | None) -> LatencyModel:
    mixed, leaving = scenario.weights.mixed, scenario.weights.early_exit
    if mixed and sum(part.layers for part in mixed) != llm.layers:
        raise InputError("weights.mixed", f"gives {sum(part.layers for part in mixed)} layers, {llm.name} has {llm.layers}")

    def trunk(network: Llm) -> LatencyModel:
        if not mixed:
            return build(network, dtype)
        return MixedPrecision([(part.layers / llm.layers, build(network, part.dtype)) for part in mixed])

    if leaving is None:
        return trunk(llm)
    if scenario.latency.name != "roofline" or llm.moe or llm.sliding_window or llm.kv_layers:
        raise InputError("weights.early_exit", "needs the roofline and an LLM of equal layers")
    if leaving.exits[-1].layer >= llm.layers:
        raise InputError("weights.early_exit.exits", f"{llm.name} has {llm.layers} layers: no exit at layer {leaving.exits[-1].layer}")
    exits = [(one.layer, one.share * leaving.acceptance) for one in leaving.exits]
    return EarlyExit(trunk(llm), trunk(replace(llm, layers=1)), llm.layers, exits)


def _streamed(model: LatencyModel, scenario: Scenario, llm: Llm, gpu: Gpu, layout: Layout) -> LatencyModel:
    spec, link = scenario.weights.streaming, gpu.pcie
    rate = spec.bytes_per_s or link.bytes_per_s * link.efficiency
    copies = streamed_layers(llm.layers, kept_layers(scenario, llm), spec.cache)
    return WeightStreaming(model, copies=copies, copy_s=link.latency_s + layer_bytes(scenario, llm, layout) / rate, prefetch=spec.prefetch)


def _with_drafts(model: LatencyModel, scenario: Scenario, gpu: Gpu) -> LatencyModel:
    """Add the price of draft tokens; the drafter runs on the first GPU of the replica alone."""
    spec = scenario.speculation
    if spec is None:
        return model
    if spec.draft_llm is None:
        return Drafting(model, fraction=spec.draft_step_fraction)
    drafter = latency.build("roofline", {}, llm=load_llm(spec.draft_llm, "speculation.draft_llm"), gpu=gpu, where="speculation.draft_llm")
    return Drafting(model, drafter=drafter)


def _with_adapters(model: LatencyModel, scenario: Scenario, llm: Llm, gpu: Gpu, layout: Layout) -> LatencyModel:
    spec = scenario.adapters
    if spec is None:
        return model
    return Adapted(model, llm, gpu, rank=spec.rank, tensor_parallel=layout.tensor_parallel, load_bytes_per_s=spec.load_bytes_per_s)
