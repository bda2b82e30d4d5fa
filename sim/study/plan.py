"""A capacity plan: the cheapest fleets that meet the objectives of a scenario, what they leave in hand, and what breaks first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.catalog import load_llm
from serving.errors import InputError
from serving.scenario import Scenario
from sim.study.advice import break_even
from sim.study.candidates import Candidate, enumerate_candidates, short_name, varied
from sim.study.executors import PoolInUse
from sim.study.load import is_recorded, measure
from sim.study.operating import operating_points
from sim.study.points import Points, files_identity, key_of
from sim.study.search import BROKEN, DOMINATED, FOUND, MISSED, RULED_OUT, Fate, Search, quotas_for, run_search
from sim.study.tasks import OK, Task, carry_out
from sim.study.verdict import attainment, t_reach

FILE = "plan.json"
_COMPARED = ("gpu", "llm", "tensor_parallel", "weight_dtype", "kv_dtype")
_DETAILED = 3  # fleets whose head-room is looked for
_NEAR = 0.9  # peak load, at the pessimistic end of the capacity, from which a latency is a range
_ORDER = (FOUND, DOMINATED, MISSED, RULED_OUT, BROKEN)
Progress = Callable[[int, int | None], None]


def make_plan(base: Scenario, use: PoolInUse, store: Points, *, top: int | None = None, progress: Progress | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Return the plan as plain data (the object of ``plan --json``); ``plans`` are ranked, those that meet the objectives first.

    Raises InputError for objectives that contradict each other and for candidates that are mistakes.
    """
    candidates = enumerate_candidates(base, folder)
    check_objectives(base)
    plan = base.plan
    load = measure(base, base.max_model_len or load_llm(base.llm).max_model_len)
    compared = [key for key in varied(plan) if key in _COMPARED or key in plan.candidates.other]

    def search_over(chosen: Sequence[Candidate], quotas: Mapping[tuple[str, str], int]) -> Search:
        return Search(plan, load, base.slo.attainment, [Fate(candidate) for candidate in chosen], quotas)

    if plan.search.method == "optuna":
        from sim.study.sampling import sample
        from sim.study.search import run_screens

        tried = sample(candidates, plan.search.trials, seed=base.seed, cost_of=lambda chosen: run_screens(search_over(chosen, {}), use, store))
        candidates = [candidates[index] for index in tried]
    search = search_over(candidates, quotas_for(plan, candidates, compared, top or plan.top))
    run_search(search, use, store, progress)
    ranked = _ranked(search)
    detail = _detail(ranked[:_DETAILED], plan.capacity_error, use, store)
    keys = varied(plan)
    rows = [_row(fate, base, keys, detail.get(fate.candidate.index)) for fate in ranked]
    points = operating_points(rows, plan.select)
    return {
        "scenario": base.name, "confidence": plan.confidence, "attainment": base.slo.attainment, "objective": plan.objective,
        "load": {"requests": load.requests, "mean_rps": load.mean_rps, "peak_rps": load.peak_rps, "peak_s": list(load.slice_s)},
        "searched": _searched(search, candidates), "headline": _headline(base, search, rows), "plans": rows,
        "breaks_first": [_breaks(row) for row in rows if row["feasible"] and row["breaks_first"]],
        "advice": break_even(ranked, rows, compared), "operating_points": points, "operating_point_lines": [each["words"] for each in points.values()],
        "rest": _rest(ranked),
    }  # fmt: skip


def check_objectives(base: Scenario) -> None:
    """Refuse objectives that no fleet could miss, that none could be shown to meet, or that contradict each other."""
    slo = base.slo
    stated = {"slo.default": slo.default, **{f"slo.classes.{name}": each for name, each in slo.classes.items()}}
    if all(limit is None for each in stated.values() for limit in (each.ttft_ms, each.tpot_ms, each.e2e_ms)):
        raise InputError("slo", "states no objective: every fleet would meet it", "give slo.default.ttft_ms, tpot_ms or e2e_ms")
    if slo.attainment == 0:
        raise InputError("slo.attainment", "of 0 is met by every fleet")
    if slo.attainment == 1 and not is_recorded(base.workload):
        raise InputError("slo.attainment", "of 1 cannot be shown by any number of random requests", "give 0.999, or replay a trace")
    for where, each in stated.items():
        ttft_ms, e2e_ms = each.ttft_ms or slo.default.ttft_ms, each.e2e_ms or slo.default.e2e_ms
        if ttft_ms is not None and e2e_ms is not None and e2e_ms < ttft_ms:
            raise InputError(where, f"contradicts itself: the last token within {e2e_ms:g} ms, the first one only within {ttft_ms:g} ms")


def _ranked(search: Search) -> list[Fate]:
    def rank(fate: Fate) -> tuple:
        cost = _usd_per_million(fate) if search.plan.objective == "usd_per_million_output_tokens" and fate.result else fate.cost
        spare = -(fate.replica_rps or 0.0) * fate.replicas
        return _ORDER.index(fate.status), cost if cost is not None else math.inf, spare, fate.candidate.index

    return sorted(search.fates, key=rank)


def _detail(ranked: Sequence[Fate], error: float, use: PoolInUse, store: Points) -> dict[int, dict[str, Any]]:
    from sim.study.evaluate import headroom

    tasks = {}
    for fate in ranked:
        if fate.status == FOUND:
            arguments = (fate.candidate.scenario, fate.replicas, fate.replica_rps, error)
            tasks[fate.candidate.index] = Task(key_of("headroom", *arguments, files_identity(fate.candidate.scenario)), headroom, arguments)
    answers = carry_out(tasks.values(), use, store)
    return {index: answers[task.key].value for index, task in tasks.items() if answers[task.key].kind == OK}


def _usd_per_million(fate: Fate) -> float | None:
    summary = fate.result["summary"]
    tokens_per_s = summary["output_tokens_per_s"]
    return fate.cost / 3600 / tokens_per_s * 1e6 if tokens_per_s else None


def _row(fate: Fate, base: Scenario, keys: list[str], detail: Mapping[str, Any] | None) -> dict[str, Any]:
    candidate = fate.candidate
    limit = fate.limit
    if fate.status == DOMINATED:
        limit = f"cost: at least ${fate.cost:,.2f} an hour, no cheaper than fleets that were found"
    row = {
        "name": short_name(candidate.config, fate.replicas if fate.status in (FOUND, DOMINATED) else None, keys),
        "config": {**candidate.config, "replicas": fate.replicas}, "feasible": fate.status == FOUND, "status": fate.status, "binding_limit": limit or None,
        "cost_per_hour_usd": fate.cost or None, "gpus": fate.replicas * candidate.gpus_per_replica, "quality": candidate.quality, "low_confidence_facts": list(candidate.doubts), "fleets_simulated": fate.runs,
        "usd_per_million_output_tokens": None, "goodput_rps": None, "load_factor": None,
    }  # fmt: skip
    if fate.status == FOUND:
        row |= {"settings": candidate.settings, **_figures(fate, base, row["gpus"]), **_spare(fate, base, detail)}
    return row


def _figures(fate: Fate, base: Scenario, gpus: int) -> dict[str, Any]:
    """Measured figures of a confirmed fleet: those of its first seed, the attained share over all of them."""
    candidate, result = fate.candidate, fate.result
    summary, usd = result["summary"], _usd_per_million(fate)
    rate = summary["requests_per_s"]
    tokens = fate.replica_rps * fate.replicas * summary["output_tokens_per_s"] / rate if fate.replica_rps and rate else None
    intervals = [attainment([tuple(each[name]) for each in result["counts"]], base.plan.confidence) for name in result["counts"][0]]
    worst = min(intervals, key=lambda each: each.low)
    return {
        "usd_per_million_output_tokens": usd, "output_tokens_per_usd": 1e6 / usd if usd else None,
        "goodput_rps": summary["goodput_rps"], "goodput_rps_per_gpu": summary["goodput_rps"] / gpus,
        "slo_attainment": worst.estimate, "slo_attainment_interval": [worst.low, worst.high], "replications": result["replications"],
        "ttft_p99_s": summary["ttft_s"]["p99"], "tpot_p99_s": summary["tpot_s"]["p99"], "e2e_p99_s": summary["e2e_s"]["p99"],
        "saturated_rps": fate.replica_rps * fate.replicas if fate.replica_rps else None, "output_tokens_per_s": tokens,
        "output_tokens_per_terabyte_moved": tokens / (candidate.memory_bytes_per_s * fate.replicas / 1e12) if tokens else None,
        "output_tokens_per_petaflop": tokens / (candidate.flops * fate.replicas / 1e15) if tokens else None,
        "kv_tokens": candidate.kv_tokens * fate.replicas, "gpu_busy_fraction": summary["gpu_busy_fraction"],
    }  # fmt: skip


def _spare(fate: Fate, base: Scenario, detail: Mapping[str, Any] | None) -> dict[str, Any]:
    """Load, with the interval that sampling and the stated error of the capacity leave, and what the head-room search found."""
    error, result = base.plan.capacity_error, fate.result
    loads = [each for each in result["load_factors"] if each is not None]
    load = math.fsum(loads) / len(loads) if loads else None
    reach = t_reach(loads, (1 + base.plan.confidence) / 2) if len(loads) > 1 else 0.0
    peak = result["peak_load_factor"]
    near = peak is not None and peak / (1 - error) >= _NEAR
    found = detail or {}
    return {
        "load_factor": load, "load_factor_interval": None if load is None else [max(0.0, load - reach) / (1 + error), (load + reach) / (1 - error)],
        "peak_load_factor": peak, "ttft_p99_range_s": found.get("ttft_p99_range_s") if near else None,
        "headroom": found["scale"] - 1 if found else None, "breaks_at_load": found.get("breaks_at"), "breaks_first": found.get("why") or None,
        "bottleneck_then": found.get("bottleneck") or None,
    }  # fmt: skip


def _breaks(row: Mapping[str, Any]) -> str:
    return f"{row['name']}: from {row['breaks_at_load']:.2f} times the load, {row['breaks_first']}. {row['bottleneck_then']}"


def _searched(search: Search, candidates: Sequence[Candidate]) -> dict[str, int]:
    by_status = Counter(fate.status for fate in search.fates)
    return {"candidates": len(candidates), **{status: by_status.get(status, 0) for status in _ORDER}, "evaluations": search.tasks,
            "fleets_simulated": sum(fate.runs for fate in search.fates)}  # fmt: skip


def _headline(base: Scenario, search: Search, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    sure = "on this trace" if is_recorded(base.workload) else f"at {base.plan.confidence:.0%} confidence"
    asked = f"{base.slo.attainment:.4g} of requests within their objectives {sure}"
    counts = Counter(fate.status for fate in search.fates)
    tally = ", ".join(f"{counts[status]} {word}" for status, word in ((FOUND, "worked out"), (DOMINATED, "dearer by their lower bound"), (MISSED, "miss the objectives"),
                                                                     (RULED_OUT, "refused before any run"), (BROKEN, "failed")) if counts[status])  # fmt: skip
    if not rows or not rows[0]["feasible"]:
        return [f"{base.name}: no fleet keeps {asked}", f"{len(rows)} candidates: {tally}"]
    best = rows[0]
    doubts = sorted({doubt for fate in search.found for doubt in fate.candidate.doubts})
    lines = [f"{base.name}: {best['name']} is the cheapest fleet that keeps {asked}: ${best['cost_per_hour_usd']:,.2f} an hour", f"{len(rows)} candidates: {tally}"]
    return lines + ([f"Not highly confident facts in the catalogue: {', '.join(doubts)}. Calibrate before you buy."] if doubts else [])


def _rest(ranked: Sequence[Fate]) -> list[str]:
    """Why the others were not chosen, by limit, with one example each."""
    groups: dict[tuple[str, str], list[Fate]] = {}
    for fate in ranked:
        if fate.status in (MISSED, RULED_OUT, BROKEN):
            groups.setdefault((fate.status, fate.limit.split(": ")[0]), []).append(fate)
    lines = []
    for (status, limit), fates in groups.items():
        config = fates[0].candidate.config
        example = f"{config['llm']} on {config['gpu']} TP{config['tensor_parallel']} {config['weight_dtype']}"
        lines.append(f"{len(fates)} {status}, {limit}; such as {example}: {fates[0].limit.split(': ', 1)[-1]}")
    dominated = [fate.cost for fate in ranked if fate.status == DOMINATED]
    if dominated:
        lines.append(f"{len(dominated)} cost at least ${min(dominated):,.2f} to ${max(dominated):,.2f} an hour: not simulated over the whole workload")
    return lines
