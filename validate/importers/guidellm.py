"""guidellm reports (0.2 to 0.8), one benchmark of them at a time.

guidellm's ``time_per_output_token_ms`` is not our TPOT: from 0.3 on it divides the whole latency, TTFT included, by all
output tokens; in 0.2 the time after the first token by all of them. Its ``inter_token_latency_ms`` is (last - first) /
(output - 1), which is our TPOT, and is what is read. Its distribution weighs a request by its tokens where ours does not,
so it is exact only with requests of equal output length, or from the request records.
"""

from __future__ import annotations

from typing import Any

from serving.errors import InputError
from validate.importers.imported import NAN, Imported, Served, failure, rebase
from validate.importers.source import Source, number

NAME = "guidellm"
_METRICS = {"time_to_first_token_ms": ("ttft_s", 1e-3), "inter_token_latency_ms": ("tpot_s", 1e-3), "request_latency": ("e2e_s", 1.0)}
_RATES = {"requests_per_second": "requests_per_s", "output_tokens_per_second": "output_tokens_per_s"}
_STARTS = (("start_time",), ("request_start_time",), ("info", "timings", "request_start"), ("scheduler_info", "request_timings", "request_start"))


def matches(source: Source) -> bool:
    """Whether the file is one JSON object with a list of benchmarks that hold metrics."""
    benchmarks = (source.document or {}).get("benchmarks")
    return isinstance(benchmarks, list) and all(isinstance(item, dict) and "metrics" in item for item in benchmarks)


def read(source: Source, select: int | None = None) -> Imported:
    """Read benchmark ``select`` (from 0), which may be left out when there is only one. Raises InputError naming what is missing."""
    benchmarks, where = (source.document or {}).get("benchmarks", []), str(source.path)
    if select is None and len(benchmarks) != 1:
        kinds = ", ".join(f"{i}: {_strategy(item)}" for i, item in enumerate(benchmarks))
        raise InputError(where, f"holds {len(benchmarks)} benchmarks", f"choose one with --select: {kinds}")
    index = select or 0
    if not 0 <= index < len(benchmarks):
        raise InputError("--select", f"{index} is not one of the {len(benchmarks)} benchmarks in {where}")
    benchmark, where = benchmarks[index], f"{where}: benchmarks[{index}]"
    run = Imported(NAME, source.path)
    run.facts = {"benchmark": index, "strategy": _strategy(benchmark), "model_id": _model(benchmark)}
    totals = benchmark.get("request_totals") or benchmark["metrics"].get("request_totals") or {}
    run.counts = {"arrived": totals.get("total"), "completed": totals.get("successful"), "failed": totals.get("errored")}
    run.counts = {key: int(value) for key, value in run.counts.items() if value is not None}
    run.duration_s = number(benchmark, "duration", where)
    _add_stated(run, benchmark["metrics"], where)
    requests = benchmark.get("requests") or {}
    for kind in ("successful", "errored", "incomplete"):
        for position, record in enumerate(requests.get(kind) or []):
            run.served.append(_served(record, kind, f"{where}.requests.{kind}[{position}]"))
    if run.served:
        rebase(run.served, min(request.arrival_s for request in run.served))
        run.served.sort(key=lambda request: request.arrival_s)
    completed = run.counts.get("completed", 0)
    if len(requests.get("successful") or []) < completed:
        run.served.clear()
        run.notes.append("the file holds statistics and no records of all requests: TPOT is guidellm's ITL, weighted by tokens")
    return run


def _add_stated(run: Imported, metrics: dict[str, Any], where: str) -> None:
    for key, (metric, scale) in _METRICS.items():
        block = (metrics.get(key) or {}).get("successful")
        if not block:
            raise InputError(f"{where}.metrics", f"lacks '{key}'", "was the run streamed?")
        percentiles = block.get("percentiles") or {}
        values = {"mean": block.get("mean"), "p50": percentiles.get("p50", block.get("median")), "max": block.get("max")}
        values |= {name: percentiles.get(name) for name in ("p90", "p95", "p99")}
        run.stated[metric] = {name: float(value) * scale for name, value in values.items() if value is not None}
    for key, rate in _RATES.items():
        block = (metrics.get(key) or {}).get("successful") or {}
        if block.get("mean") is not None:
            run.rates[rate] = float(block["mean"])
    del run.rates["output_tokens_per_s"]  # a mean over bursts of single tokens, not tokens per second of the run
    output = (metrics.get("output_token_count") or {}).get("successful") or {}
    if output.get("total_sum") is not None and run.duration_s:
        run.rates["output_tokens_per_s"] = float(output["total_sum"]) / run.duration_s


def _served(record: dict[str, Any], kind: str, where: str) -> Served:
    start_s = _start(record, where)
    prompt = int(record.get("prompt_tokens") or 0)
    if kind != "successful":
        return Served(start_s, prompt, 0, NAN, NAN, status=failure(cancelled=kind == "incomplete"))
    output = int(number(record, "output_tokens", where))
    first_s = start_s + number(record, "time_to_first_token_ms", where) / 1e3
    gap_s = number(record, "inter_token_latency_ms", where) / 1e3 if output > 1 else 0.0
    return Served(start_s, prompt, output, first_s, first_s + gap_s * (output - 1))


def _start(record: dict[str, Any], where: str) -> float:
    for path in _STARTS:
        value: Any = record
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return float(value)
    raise InputError(where, "has no start time", "looked for " + ", ".join(".".join(path) for path in _STARTS))


def _strategy(benchmark: dict[str, Any]) -> str:
    strategy = (benchmark.get("config") or benchmark.get("args") or {}).get("strategy") or {}
    details = [f"{key} {strategy[key]}" for key in ("rate", "streams") if strategy.get(key) is not None]
    return " ".join([str(strategy.get("type_", "unknown")), *details])


def _model(benchmark: dict[str, Any]) -> str | None:
    backend = (benchmark.get("config") or {}).get("backend") or {}
    return backend.get("model") or (benchmark.get("worker") or {}).get("backend_model")
