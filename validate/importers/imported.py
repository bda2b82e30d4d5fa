"""What an importer makes of a file, and the run directory that it becomes. Nothing that was not measured is filled in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from serving.errors import InputError
from serving.metrics import ABORTED, COMPLETED, ERROR, FleetTotals, Metrics
from serving.records import RunWriter

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
NAN = math.nan


@dataclass(slots=True)
class Served:
    """One request as a client or an engine saw it; seconds on the run's clock, NaN what was not recorded."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    finish_s: float
    scheduled_s: float = NAN
    status: int = COMPLETED


@dataclass(slots=True)
class Imported:
    """A run that somebody measured. ``served`` and ``gaps_s`` are empty where the file only states statistics.

    ``stated`` holds what the file itself says, as {metric: {statistic: seconds}}; it becomes the summary where there are no
    requests, or fewer than there were. ``facts`` go to run.yaml; ``notes`` say how this import differs from a full record.
    """

    format: str
    source: Path
    served: list[Served] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    steps: list[tuple] = field(default_factory=list)
    stated: dict[str, dict[str, float]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # keys of the summary: output_tokens_per_s and its like
    counts: dict[str, int] = field(default_factory=dict)
    duration_s: float | None = None
    device: str = "unknown"
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kv_use: dict[str, float] | None = None
    seed: int = 0
    partial: bool = False


def write(run: Imported, out: Path) -> None:
    """Write the run directory. Raises InputError for times that run backwards or a directory that cannot be written."""
    for index, request in enumerate(run.served):
        _check(run, index, request)
    metrics = Metrics(("default",), lambda _: (math.inf,) * 3, keep_rows=bool(run.served))
    for index, request in enumerate(run.served):
        metrics.finish(_row(index, request))
        metrics.flush_if_full()
    if run.gaps_s:
        metrics.itl(run.gaps_s, [1] * len(run.gaps_s))
    summary = _summary(run, metrics)
    columns = None
    if run.served:
        columns = metrics.columns()
        columns["scheduled_s"] = np.array([request.scheduled_s for request in run.served])
    scenario = {
        "version": 1,
        "name": run.source.stem,
        "imported": {"format": run.format, "file": run.source.name, **run.facts, "stated": run.stated, "notes": run.notes},
    }
    device = f"real {run.device}"
    with RunWriter(out, steps=bool(run.steps)) as writer:
        for row in run.steps:
            writer.steps.append(row)
        writer.publish(
            scenario=scenario, seed=run.seed, device=device, summary=summary, requests=columns, class_names=("default",), partial=run.partial
        )


def _check(run: Imported, index: int, request: Served) -> None:
    if request.status == COMPLETED and not request.arrival_s <= request.first_token_s <= request.finish_s:
        times = f"arrival {request.arrival_s:g}, first token {request.first_token_s:g}, finish {request.finish_s:g}"
        raise InputError(str(run.source), f"request {index}: time runs backwards: {times} s")


def _row(index: int, request: Served) -> tuple:
    """A row for ``Metrics``; it wants a scheduled time, and what it makes of one that is not known is dropped afterwards."""
    scheduled_s = request.arrival_s if math.isnan(request.scheduled_s) else request.scheduled_s
    finish_s = request.arrival_s if math.isnan(request.finish_s) else request.finish_s
    return (index, 0, request.arrival_s, request.prompt_tokens, 0, request.output_tokens, scheduled_s, request.first_token_s, finish_s, 0, 0, request.status)


def _summary(run: Imported, metrics: Metrics) -> dict[str, Any]:
    end_s = max((request.finish_s for request in run.served if not math.isnan(request.finish_s)), default=0.0)
    duration_s = run.duration_s if run.duration_s is not None else end_s
    totals = FleetTotals(duration_s=max(duration_s, end_s), replicas=1, gpus=1, gpu_usd_per_h=None, busy_s=0.0, steps=0, events=0, kv_blocks=0,
                         kv_block_seconds=0.0, kv_max_fraction=0.0, preemptions=0, prompt_tokens=0, cached_tokens=0)  # fmt: skip
    summary = metrics.summary(scenario=run.source.stem, seed=run.seed, totals=totals)
    unknown = ["preemptions", "prefix_cache_hit_rate", "gpu_busy_fraction", "events", "goodput_rps", "slo_attainment"]
    summary.update(dict.fromkeys(unknown), kv_utilisation=run.kv_use, steps=len(run.steps) or None)
    summary["requests"]["preempted"] = None
    if not run.served:
        summary["requests"] = dict.fromkeys(summary["requests"])
        summary["duration_s"] = run.duration_s
        summary.update(dict.fromkeys(("prompt_tokens_per_s", "output_tokens_per_s", "requests_per_s")))
    elif all(math.isnan(request.scheduled_s) for request in run.served):
        summary["queue_s"] = dict.fromkeys(STATISTICS)
    if not run.served or run.partial:
        for metric in LATENCIES:
            known = run.stated.get(metric, {})
            summary[metric] = {statistic: known.get(statistic) for statistic in STATISTICS}
    if not run.served or run.partial or run.duration_s is not None:
        summary.update(run.rates)
        summary["requests"].update(run.counts)
    return summary


def rebase(served: Sequence[Served], origin_s: float) -> None:
    """Shift the clock of all requests so that ``origin_s`` becomes zero."""
    for request in served:
        request.arrival_s -= origin_s
        request.first_token_s -= origin_s
        request.finish_s -= origin_s
        request.scheduled_s -= origin_s


def failure(cancelled: bool) -> int:
    """Return the status of a request that did not complete."""
    return ABORTED if cancelled else ERROR
