"""What a run comes to: its verdict in a sentence, its headline figures, and its tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sim.bottleneck import load_words
from validate.explain import Cause
from validate.report.latency import NAMES, SHORT, slo_ms
from validate.run_data import RunData, find

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


class Card(NamedTuple):
    """One headline figure. ``tone`` is "", "good" or "bad"; ``note`` puts the figure in context."""

    label: str
    value: str
    unit: str
    note: str
    tone: str = ""


class Table(NamedTuple):
    """A table of text: ``words`` leading columns are words, and the last ``text`` ones sentences; the rest are right-aligned figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    text: int = 0


def number(value: float | None, digits: int = 3) -> str:
    """Return about three significant digits with thousands separated; a dash for nothing."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 4)}f}"


def milliseconds(value_s: float | None) -> str:
    """Return seconds as text in ms."""
    return number(None if value_s is None else value_s * 1e3)


def _duration(value_s: float | None) -> tuple[str, str]:
    if value_s is None:
        return "-", ""
    return (number(value_s), "s") if value_s >= 1 else (number(value_s * 1e3), "ms")


def percent(value: float | None, digits: int = 1) -> str:
    """Return a fraction as a percentage."""
    if value is None:
        return "-"
    text = f"{round(value * 100, digits) + 0.0:.{digits}f}"  # adding zero turns -0 into 0
    return (text.rstrip("0").rstrip(".") if "." in text and digits > 2 else text) + "%"


def worst_class(run: RunData) -> tuple[str, float] | None:
    """Name and attainment of the class that met its objectives least, or None without objectives."""
    met = {name: share for name, share in run.summary["slo_attainment"]["by_class"].items() if share is not None}
    if not met or not find(run.scenario, "slo"):
        return None
    return min(met.items(), key=lambda item: (item[1], item[0]))


def verdict(run: RunData, causes: Mapping[str, list[Cause]] | None = None) -> tuple[str, str]:
    """Return (tone, sentence): does the run meet its objectives, which class is worst, what slows first tokens, how near saturation."""
    requests, rho = run.summary["requests"], run.summary.get("load_factor")
    if requests["completed"] is None:
        return "", "The file that this run was imported from does not say how many requests completed."
    if not requests["completed"]:
        return "bad", f"No request completed: {requests['arrived']:,} arrived."
    worst, goal = worst_class(run), find(run.scenario, "slo.attainment", 1.0)
    near = f" The load is {rho:.2f} of saturation: {load_words(rho)}." if rho is not None and rho >= 0.9 else ""
    lost = (requests["rejected"] or 0) + (requests["failed"] or 0)
    if lost:
        near = f" {lost:,} of {requests['arrived']:,} requests were rejected or failed." + near
    if worst is None:
        return "", f"{requests['completed']:,} requests completed; the scenario states no objective to judge them by." + near
    share = run.summary["slo_attainment"]["overall"]
    if worst[1] >= goal:
        return "good", f"Meets its objectives: {percent(share, 2)} of requests are within target, where {percent(goal, 4)} was asked." + near
    several = len(run.summary["slo_attainment"]["by_class"]) > 1
    which = f"; class {worst[0]} does worst at {percent(worst[1], 2)}" if several else ""
    return "bad", f"Misses its objectives: {percent(share, 2)} of requests are within target, where {percent(goal, 4)} was asked{which}.{_blame(causes)}{near}"


def _blame(causes: Mapping[str, list[Cause]] | None) -> str:
    top = causes["ttft_s"][0] if causes else None
    if top is None or top.share < 0.3:
        return ""
    return f" The slowest first tokens lose most to {top.label} ({percent(top.share, 0)} of their delay)."


def cards(run: RunData) -> list[Card]:
    """Headline figures of one run, the ones that decide first."""
    summary, found = run.summary, []
    worst, goal = worst_class(run), find(run.scenario, "slo.attainment", 1.0)
    if worst is not None:
        share = summary["slo_attainment"]["overall"]
        found.append(Card("Within SLO", percent(share, 2), "", f"goal {percent(goal, 4)}", "good" if worst[1] >= goal else "bad"))
    for metric in ("ttft_s", "tpot_s", "e2e_s"):
        value, unit = _duration(summary[metric]["p99"])
        objective = slo_ms(run, metric)
        median, median_unit = _duration(summary[metric]["p50"])
        note = f"median {median} {median_unit}" + (f" · SLO {objective:g} ms" if objective else "")
        found.append(Card(f"{SHORT[metric]} p99", value, unit, note))
    if summary["goodput_rps"] is None:
        found.append(Card("Served", number(summary["requests_per_s"]), "req/s", "no objectives known"))
    else:
        found.append(Card("Goodput", number(summary["goodput_rps"]), "req/s", f"of {number(summary['requests_per_s'])} req/s served"))
    found.append(Card("Output", number(summary["output_tokens_per_s"]), "tok/s", f"and {number(summary['prompt_tokens_per_s'])} prompt tok/s"))
    rho = summary.get("load_factor")
    if rho is not None:
        found.append(Card("Load factor \u03c1", f"{rho:.2f}", "", load_words(rho).split(":")[0].lower(), "bad" if rho >= 0.95 else ""))
    if summary["kv_utilisation"]["max"] is not None:
        found.append(Card("KV cache", percent(summary["kv_utilisation"]["max"], 0), "peak", f"{percent(summary['kv_utilisation']['mean'], 0)} on average"))
    if summary["gpu_busy_fraction"] is not None:
        preempted = summary["preemptions"]
        found.append(Card("GPUs busy", percent(summary["gpu_busy_fraction"], 0), "", "" if preempted is None else f"{preempted:,} preemptions"))
    cost = summary.get("usd_per_million_output_tokens")
    if cost is not None:
        found.append(Card("Cost", f"${number(cost)}", "", "a million output tokens"))
    return found


def latency_table(run: RunData) -> Table:
    """Every latency of the summary by statistic, in milliseconds."""
    names = {"ttft_s": NAMES["ttft_s"], "tpot_s": NAMES["tpot_s"], "itl_s": "Between tokens", "e2e_s": NAMES["e2e_s"], "queue_s": NAMES["queue_s"]}
    rows = [[name, *(milliseconds(run.summary[key].get(s)) for s in STATISTICS)] for key, name in names.items()]
    return Table("Latencies, ms", ["", *STATISTICS], rows)


def cause_table(metric: str, causes: Sequence[Cause]) -> Table:
    """Ranked causes of one metric's slowest requests; those without effect are left out."""
    rows = [
        [row.label, milliseconds(row.typical_s), milliseconds(row.mean_s), milliseconds(row.excess_s), percent(row.share, 0), f"{row.requests:,}",
         "-" if row.worst_request < 0 else str(row.worst_request)]
        for row in causes
        if abs(row.share) >= 0.0005
    ]  # fmt: skip
    columns = ["cause", "typical", "slowest", "excess", "share", "requests", "worst id"]
    return Table(f"{NAMES[metric]}, ms: what the slowest requests lost their time to", columns, rows)


def difference_table(base: RunData, other: RunData) -> Table:
    """Statistic by statistic, ``other`` against ``base``: (other - base) / base."""
    rows = []
    for metric in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        for statistic in ("mean", "p50", "p90", "p99"):
            old, new = base.summary[metric].get(statistic), other.summary[metric].get(statistic)
            if old is not None and new is not None:
                rows.append([SHORT[metric], statistic, f"{milliseconds(old)} ms", f"{milliseconds(new)} ms", difference(old, new)])
    for key, name, unit in (("output_tokens_per_s", "Output", "tok/s"), ("requests_per_s", "Served", "req/s"), ("goodput_rps", "Goodput", "req/s")):
        old, new = base.summary.get(key), other.summary.get(key)
        if old is not None and new is not None:
            rows.append([name, "", f"{number(old)} {unit}", f"{number(new)} {unit}", difference(old, new)])
    return Table("Figure by figure", ["metric", "statistic", base.label, other.label, "difference"], rows, words=2)


def difference(old: float, new: float) -> str:
    """Return the relative difference as signed text; a dash where it is undefined."""
    return "-" if not old else f"{(new - old) / old:+.1%}"


def runs_table(runs: Sequence[RunData]) -> Table:
    """Several runs side by side, a row each."""
    columns = ["run", "TTFT p99 ms", "TPOT p99 ms", "E2E p99 ms", "output tok/s", "goodput req/s", "within SLO", "$ per M output"]
    rows = []
    for run in runs:
        s = run.summary
        rows.append([run.label, *(milliseconds(s[m]["p99"]) for m in ("ttft_s", "tpot_s", "e2e_s")), number(s["output_tokens_per_s"]),
                     number(s["goodput_rps"]), percent(s["slo_attainment"]["overall"], 2), number(s.get("usd_per_million_output_tokens"))])  # fmt: skip
    return Table("Runs", columns, rows)
