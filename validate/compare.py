"""Real against simulated, metric by metric: error = (simulated - real) / real, beside the noise between repeats of the real run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from serving.errors import InputError
from serving.records import Run, open_run
from validate.stats import t_interval

LATENCIES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "itl_s": "Inter-token latency", "e2e_s": "End to end"}
SCALARS = {"output_tokens_per_s": "Output tokens/s"}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
UNGATED = "max"  # a single request: no gate should hang on it


class Difference(NamedTuple):
    """One statistic of one metric, in the metric's own unit.

    ``error`` is a fraction, None when the real value is zero and the simulated one is not. ``noise`` is the half-width of the 95 %
    interval of the mean over repeats, as a fraction of it; None with fewer than two repeats.
    """

    real: float
    simulated: float
    error: float | None
    noise: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences as {metric: {statistic: Difference}}, and what a reader should know before believing them."""

    real: tuple[Path, ...]
    simulated: Path
    metrics: dict[str, dict[str, Difference]]
    notes: tuple[str, ...]

    def exceeding(self, gate: float) -> list[str]:
        """Names of ``metric.statistic`` whose error is larger than ``gate``, in either direction; the maximum is not gated."""
        return [
            f"{metric}.{statistic}"
            for metric, rows in self.metrics.items()
            for statistic, row in rows.items()
            if statistic != UNGATED and (row.error is None or abs(row.error) > gate)
        ]

    def as_json(self, gate: float | None = None) -> dict[str, Any]:
        """Return the object that ``compare --json`` prints."""
        metrics = {metric: {statistic: row._asdict() for statistic, row in rows.items()} for metric, rows in self.metrics.items()}
        return {
            "real": [str(path) for path in self.real],
            "simulated": str(self.simulated),
            "metrics": metrics,
            "notes": list(self.notes),
            "gate": gate,
            "exceeded": self.exceeding(gate) if gate is not None else [],
        }


def compare(real: Sequence[Path | str], simulated: Path | str) -> Comparison:
    """Compare a simulated run with one or more repeats of a real one.

    Raises InputError for a directory that is no run, and when the two sides have no statistic in common.
    """
    if not real:
        raise InputError("REAL_DIR", "no real run to compare with")
    real_runs, simulated_run = [open_run(path) for path in real], open_run(simulated)
    metrics: dict[str, dict[str, Difference]] = {}
    for metric in LATENCIES:
        for statistic in STATISTICS:
            add_difference(metrics, metric, statistic, [_value(run, metric, statistic) for run in real_runs], _value(simulated_run, metric, statistic))
    for metric in SCALARS:
        add_difference(metrics, metric, "mean", [run.summary.get(metric) for run in real_runs], simulated_run.summary.get(metric))
    for statistic in ("mean", "max"):
        values = [_value(run, "kv_utilisation", statistic) for run in real_runs]
        add_difference(metrics, "kv_utilisation", statistic, values, _value(simulated_run, "kv_utilisation", statistic))
    if not metrics:
        raise InputError(str(simulated), "has no statistic in common with the real side", "was either run too short to finish a request?")
    notes = tuple(_notes(real_runs, simulated_run))
    return Comparison(tuple(run.path for run in real_runs), simulated_run.path, metrics, notes)


def add_difference(
    metrics: dict[str, dict[str, Difference]], metric: str, statistic: str, real: Sequence[float | None], simulated: float | None
) -> None:
    """Add the difference to ``metrics`` unless a side does not know the statistic."""
    known = [float(value) for value in real if value is not None]
    if len(known) < len(real) or simulated is None:
        return
    mean = sum(known) / len(known)
    noise = t_interval(known).half_width / mean if len(known) > 1 and mean else None
    error = (simulated - mean) / mean if mean else (0.0 if simulated == 0 else None)
    metrics.setdefault(metric, {})[statistic] = Difference(mean, float(simulated), error, noise)


def print_comparison(comparison: Comparison, gate: float | None, file: IO[str]) -> None:
    """Print the table (latencies in milliseconds) and the notes."""
    from rich.markup import escape
    from rich.table import Table

    from sim.tables import console_for

    console = console_for(file)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, justify in (("Metric", "left"), ("", "left"), ("real", "right"), ("simulated", "right"), ("error", "right"), ("noise", "right")):
        table.add_column(title, justify=justify)
    exceeded = set(comparison.exceeding(gate)) if gate is not None else set()
    for metric, rows in comparison.metrics.items():
        label = LATENCIES.get(metric) or SCALARS.get(metric) or "KV cache in use"
        for statistic, row in rows.items():
            mark = " !" if f"{metric}.{statistic}" in exceeded else ""
            values = [_number(metric, value) for value in (row.real, row.simulated)]
            error = "-" if row.error is None else f"{row.error:+.1%}"
            table.add_row(label, statistic, *values, error + mark, "-" if row.noise is None else f"+-{row.noise:.1%}")
            label = ""
    console.print(table)
    for note in comparison.notes:
        console.print(escape(f"note: {note}"), highlight=False)
    if gate is not None:
        verdict = f"outside the gate of {gate:.1%}: {', '.join(sorted(exceeded))}" if exceeded else f"all within the gate of {gate:.1%}"
        console.print(escape(verdict), highlight=False)


def _value(run: Run, metric: str, statistic: str) -> float | None:
    block = run.summary.get(metric)
    return block.get(statistic) if isinstance(block, Mapping) else None


def _number(metric: str, value: float) -> str:
    if metric == "kv_utilisation":
        return f"{value:.1%}"
    return f"{value * 1e3:,.2f} ms" if metric in LATENCIES else f"{value:,.1f}"


def _notes(real: Sequence[Run], simulated: Run) -> list[str]:
    notes = [f"{run.path} was interrupted: its tables end early" for run in (*real, simulated) if run.partial]
    notes += [f"{run.path} is itself a simulation" for run in real if str(run.info["device"]).startswith("simulated")]
    counts = {str(run.path): (run.summary.get("requests") or {}).get("completed") for run in (*real, simulated)}
    if len({count for count in counts.values() if count is not None}) > 1:
        notes.append("the sides completed different numbers of requests: " + ", ".join(f"{path} {count}" for path, count in counts.items()))
    for run in real:
        theirs, ours = run.summary.get("prefix_cache_hit_rate"), simulated.summary.get("prefix_cache_hit_rate")
        if theirs is not None and ours is not None and abs(theirs - ours) > 0.05:
            notes.append(f"prefix cache hits differ: {theirs:.0%} in {run.path}, {ours:.0%} simulated")
    if len(real) == 1:
        notes.append("one real run: how much it varies from run to run is not known; give several directories for the noise")
    return notes
