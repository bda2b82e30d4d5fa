"""MLPerf LoadGen's mlperf_log_summary.txt of an LLM benchmark, server or offline."""

from __future__ import annotations

import re

from serving.errors import InputError
from validate.importers.imported import Imported
from validate.importers.source import Source

NAME = "mlperf-loadgen"
_TITLE = "MLPerf Results Summary"
_LINE = re.compile(r"^\s*(?P<key>[^:]*?)\s*:\s*(?P<value>\S.*?)\s*$")
_PERCENTILE = re.compile(r"^([\d.]+) percentile (latency|first token latency|time to output token)")
_SIMPLE = re.compile(r"^(Mean|Max) (latency|first token latency|time to output token)", re.IGNORECASE)
_METRICS = {"latency": "e2e_s", "first token latency": "ttft_s", "time to output token": "tpot_s"}
_RATES = {"Completed tokens per second": "output_tokens_per_s", "Tokens per second": "output_tokens_per_s",
          "Completed samples per second": "requests_per_s", "Samples per second": "requests_per_s"}  # fmt: skip
_FACTS = ("SUT name", "Scenario", "Mode", "Result is", "Scheduled samples per second", "target_qps", "performance_sample_count")


def matches(source: Source) -> bool:
    """Whether the summary's title is in the head of the file."""
    return _TITLE in source.text[:400]


def read(source: Source, select: int | None = None) -> Imported:
    """Read the statistics, given in nanoseconds. Raises InputError for a summary without LLM figures or an invalid number."""
    run = Imported(NAME, source.path)
    for line, text in enumerate(source.text.splitlines(), 1):
        found = _LINE.match(text)
        if not found:
            continue
        key, value = found["key"], found["value"]
        where = f"{source.path}:{line}"
        statistic = _statistic(key)
        if statistic:
            run.stated.setdefault(statistic[0], {})[statistic[1]] = _number(value, where) * 1e-9
        elif key in _RATES:
            run.rates[_RATES[key]] = _number(value, where)
        elif key in _FACTS:
            run.facts[key.lower().replace(" ", "_")] = value
    if "output_tokens_per_s" not in run.rates:
        raise InputError(str(source.path), "states no tokens per second", "is it the summary of an LLM benchmark?")
    run.notes.append("the file states statistics only; there is no table of requests")
    if run.facts.get("result_is") not in (None, "VALID"):
        run.notes.append(f"LoadGen calls this result {run.facts['result_is']}")
    return run


def _statistic(key: str) -> tuple[str, str] | None:
    """Return (metric, statistic) of a line's key, or None. The unit in brackets is always nanoseconds."""
    bare = re.sub(r"\s*\(ns\)$", "", key).lower()
    found = _PERCENTILE.match(bare)
    if found and found[1] in ("50.00", "90.00", "95.00", "99.00"):
        return _METRICS[found[2]], f"p{found[1][:2]}"
    found = _SIMPLE.match(bare)
    return (_METRICS[found[2]], found[1]) if found else None


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(where, f"'{text}' is not a number") from None
