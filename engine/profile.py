"""A designed set of step shapes, and what was measured of it as a run directory that ``calibrate`` reads."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

from engine.accounts import query_key_pairs
from engine.measure import Case, Measured, blocks_of
from engine.run import Engine, resolved
from serving.metrics import FleetTotals, Metrics
from serving.records import RunWriter
from serving.scenario import Scenario


def designed_cases(scenario: Scenario, engine: Engine) -> list[Case]:
    """Prefill sizes and contexts, decode batches and contexts, and mixtures of both, as far as the limits and the pool allow."""
    batching, width = scenario.policy.batching, scenario.kv_cache.block_tokens
    tokens = min(batching.max_batch_tokens, engine.max_model_len)
    sizes = _powers(1, tokens, 2)
    contexts = [0, *_powers(width, engine.max_model_len // 2, 4)]
    batches = _powers(1, batching.max_batch_seqs, 2)
    cases = [Case(((size, context),)) for size in sizes for context in contexts if size > 1 or context]
    cases += [Case(((size, 0),) * count) for count in (2, 4) for size in sizes if size * count <= tokens]
    cases += [Case((), batch, context) for batch in batches for context in [max(1, width // 2), *contexts[1:]]]
    mixed_contexts = contexts[1::2] or contexts[:1]
    cases += [
        Case(((size, before),), batch, context)
        for size in sizes[1::2] for before in (0, mixed_contexts[0]) for batch in batches[::2] for context in mixed_contexts
        if size + batch <= tokens
    ]  # fmt: skip
    return [case for case in dict.fromkeys(cases) if _possible(case, scenario, engine)]


def _possible(case: Case, scenario: Scenario, engine: Engine) -> bool:
    batching = scenario.policy.batching
    if len(case.chunks) + case.decodes > batching.max_batch_seqs or blocks_of(case, scenario.kv_cache.block_tokens) > engine.blocks - 1:
        return False
    longest = max([new + before for new, before in case.chunks] + [case.context])
    return longest <= engine.max_model_len and all(new > 1 or before for new, before in case.chunks)


def _powers(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... and last itself."""
    values = [first * factor**n for n in range(64) if first * factor**n < last]
    return [*values, last] if last >= first else values


def write_run(scenario: Scenario, engine: Engine, measured: Measured, out: Path) -> None:
    """Write every measurement as a step of a run without requests: ``run.yaml``, ``steps.parquet``, ``engine_steps.parquet``."""
    metrics = Metrics(("default",), lambda _: (math.inf,) * 3)
    clock_s = 0.0
    with RunWriter(out, steps=True, engine_steps=True) as writer:
        for step, one in enumerate(measured.results):
            case = measured.cases[one.case]
            used = blocks_of(case, scenario.kv_cache.block_tokens)
            writer.steps.append(
                (
                    step, 0, clock_s, one.duration_s, sum(new for new, _ in case.chunks), len(case.chunks), case.decodes,
                    case.decodes * case.context, used, one.rows if one.path == "graph" else 0, 0, 1,
                )
            )  # fmt: skip
            writer.engine_steps.append(
                (
                    step, one.path, one.rows, query_key_pairs(case.chunks), sum(before for _, before in case.chunks),
                    len(case.chunks) + case.decodes, 0.0, one.prepare_s, one.launch_s, one.sample_s, one.post_s, one.device_s,
                    one.measured_s, one.reference_s, [],
                )
            )  # fmt: skip
            clock_s += one.duration_s
        totals = FleetTotals(
            duration_s=clock_s, replicas=1, gpus=1, gpu_usd_per_h=None, busy_s=clock_s, steps=len(measured.results), events=0,
            kv_blocks=engine.blocks - 1, kv_block_seconds=0.0, kv_max_fraction=0.0, preemptions=0, prompt_tokens=0, cached_tokens=0,
        )  # fmt: skip
        summary = metrics.summary(scenario=f"{scenario.name} (profile)", seed=scenario.seed, totals=totals)
        writer.publish(
            scenario=resolved(scenario, engine), seed=scenario.seed, device=engine.device, summary=summary, partial=measured.interrupted,
            versions=engine.versions, measured_on=today(),
        )  # fmt: skip


def today() -> str:
    """The date of a measurement, UTC."""
    return datetime.now(UTC).date().isoformat()
