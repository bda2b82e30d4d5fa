"""A scenario served by the engine, into the same run directory that the simulator writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.accounts import Accounts
from engine.clocks import Clock
from engine.drafting import Proposer
from engine.drafting.prompt_lookup import PromptLookup
from engine.loop import Loop, StepRunner
from engine.prompts import Prompts
from serving.catalog import load_gpu, load_llm
from serving.clients import start_clients
from serving.errors import InputError
from serving.kv_pool import KVPool
from serving.kv_tiers import LowerTiers, build_tiers
from serving.layer_reuse import reusing
from serving.metrics import Metrics
from serving.policies.build import policies_of
from serving.recording import Recording
from serving.records import RunWriter
from serving.scenario import Scenario
from serving.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.images import VisualTokens


@dataclass(frozen=True, slots=True)
class Engine:
    """A runner and what a scenario must know of it. ``blocks`` includes the reserved one; ``device`` and ``versions`` go to run.yaml."""

    runner: StepRunner
    blocks: int
    max_model_len: int
    vocab: int
    device: str
    gpu_usd_per_h: float | None = None
    versions: Mapping[str, str] | None = None
    proposer: Callable[[], Proposer] | None = None  # makes what drafts for one loop; None: prompt look-up
    reports: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # parts of summary.json that the runner knows
    images: VisualTokens | None = None  # of the workload's images


@dataclass(frozen=True, slots=True)
class EngineRun:
    """``summary`` is the contents of summary.json; ``partial`` marks a run that was interrupted."""

    summary: dict[str, Any]
    partial: bool


def check_servable(scenario: Scenario) -> None:
    """Raise InputError for what is simulated but not done by one engine."""
    if scenario.cluster.replicas != 1:
        raise InputError("cluster.replicas", f"one engine is one replica, not {scenario.cluster.replicas}", "set it to 1")
    weights = scenario.weights
    for where, asked in (("cluster.pools", scenario.cluster.pools), ("faults", scenario.faults), ("weights.streaming", weights and weights.streaming),
                         ("weights.mixed", weights and weights.mixed), ("rollout", scenario.rollout), ("cluster.autoscaling", scenario.cluster.autoscaling),
                         ("workload.retry", scenario.workload.retry), ("sites", scenario.sites), ("stages", scenario.stages), ("integrity", scenario.integrity),
                         ("compilation", scenario.compilation)):  # fmt: skip
        if asked:
            raise InputError(where, "the engine does not do this; the simulator does", "leave it out")


def build_loop(scenario: Scenario, engine: Engine, clock: Clock, **options: Any) -> Loop:
    """A loop for the scenario's policies on a pool with named blocks; ``options`` are those of ``Loop``. Raises InputError."""
    check_servable(scenario)
    cache, batching = scenario.kv_cache, scenario.policy.batching
    if batching.max_in_flight > 2:
        raise InputError("policy.batching.max_in_flight", "the engine plans at most one step ahead", "1 or 2")
    if scenario.speculation is not None:
        if batching.max_in_flight > 1:
            raise InputError("policy.batching.max_in_flight", "with speculation the next step needs this one's tokens", "1 at most")
        options["proposer"] = engine.proposer() if engine.proposer is not None else PromptLookup()
    pool = KVPool(engine.blocks, cache.block_tokens, prefix_caching=cache.prefix_caching, named=True, lower=tiers_of(scenario))
    scheduler = Scheduler(pool, policies_of(scenario), max_in_flight=batching.max_in_flight)
    return Loop(scheduler, engine.runner, clock, Prompts(scenario.seed, engine.vocab, cache.block_tokens, engine.images), **options)


def tiers_of(scenario: Scenario) -> LowerTiers | None:
    """The lower KV tiers of an engine on one GPU, in pages of the scenario's KV dtype; None without any. Raises InputError."""
    cache = scenario.kv_cache
    if not cache.tiers:
        return None
    return build_tiers(cache, load_gpu(scenario.cluster.gpu), reusing(load_llm(scenario.llm), cache.layer_reuse).kv_bytes_per_token("bf16" if cache.dtype == "auto" else cache.dtype))


def serve_scenario(
    scenario: Scenario, engine: Engine, clock: Clock, *, out: Path | None = None, prepare: Callable[[Loop], None] | None = None,
    progress: Callable[[int], None] | None = None, measured_on: str | None = None,
) -> EngineRun:  # fmt: skip
    """Replay ``scenario`` (its arrivals at their times, its lengths pinned) and return what its users saw; ``out`` keeps every step and plan.

    ``prepare(loop)`` may put more on the timeline, aborts for instance; ``progress(requests that have left)`` is called now and then;
    ``measured_on`` dates the run directory.
    Raises InputError for a scenario that a single engine cannot serve, before anything is written. Ctrl-C ends the run early.
    """
    check_servable(scenario)
    metrics = Metrics(
        [row.name for row in scenario.workload.classes] or ["default"], scenario.slo.targets,
        warmup_s=scenario.measure.warmup_s, cooldown_s=scenario.measure.cooldown_s, keep_rows=out is not None,
    )  # fmt: skip
    with _writer(out) as writer:
        accounts = Accounts(metrics, Recording(writer.steps, writer.plans, path=lambda plan: accounts.path) if writer else None,
                            writer.engine_steps if writer else None, progress)  # fmt: skip
        loop = build_loop(scenario, engine, clock, observer=accounts)
        start_clients(
            loop, scenario.workload, seed=scenario.seed, block_tokens=scenario.kv_cache.block_tokens, max_model_len=engine.max_model_len,
            prefix_caching=scenario.kv_cache.prefix_caching, slo=scenario.slo,
        )  # fmt: skip
        if prepare is not None:
            prepare(loop)
        partial = False
        try:
            loop.run()
        except KeyboardInterrupt:
            partial = True
        totals = accounts.totals(loop.scheduler, gpus=scenario.cluster.tensor_parallel, gpu_usd_per_h=engine.gpu_usd_per_h)
        summary = metrics.summary(scenario=scenario.name, seed=scenario.seed, totals=totals)
        if scenario.speculation is not None:
            summary["speculation"] = accounts.drafts()
        summary |= {name: report() for name, report in engine.reports.items()}
        slots = loop.scheduler.policies.adapters
        if slots is not None:
            summary["adapters"] = {"loads": slots.loads, "hit_rate": slots.hits / (slots.hits + slots.loads) if slots.hits + slots.loads else None}
        if writer is not None:
            writer.publish(
                scenario=resolved(scenario, engine), seed=scenario.seed, device=engine.device, summary=summary, requests=metrics.columns(),
                class_names=metrics.class_names, partial=partial, versions=engine.versions, measured_on=measured_on,
            )  # fmt: skip
    return EngineRun(summary, partial)


def resolved(scenario: Scenario, engine: Engine) -> dict[str, Any]:
    """The scenario as plain data, with the pool and the longest sequence that the engine really had."""
    cache = scenario.kv_cache.model_copy(update={"blocks": engine.blocks})
    return scenario.model_copy(update={"kv_cache": cache, "max_model_len": engine.max_model_len}).resolved()


def longest_sequence(scenario: Scenario, blocks: int, llm_max: int) -> int:
    """The scenario's ``max_model_len``, or as much of the network's as the pool of ``blocks`` holds; as the simulator has it."""
    return scenario.max_model_len or min(llm_max, max(1, blocks - 1) * scenario.kv_cache.block_tokens)


@contextlib.contextmanager
def _writer(out: Path | None) -> Iterator[RunWriter | None]:
    if out is None:
        yield None
        return
    with RunWriter(out, steps=True, plans=True, engine_steps=True) as writer:
        yield writer


