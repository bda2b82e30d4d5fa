"""Every measured run in a folder against the simulator: one table of errors, each row with what was fitted on what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from serving.errors import InputError
from validate.measured import vllm_run
from validate.measured.vllm_run import Times, VllmRun

NOTHING = "nothing"
STATISTICS = ("mean", "p50", "p90", "p99")
LABELS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E", "output_tokens_per_s": "output tokens/s"}


@dataclass(frozen=True, slots=True)
class Row:
    """One statistic of one measured run: real and simulated value, error = (simulated - real)/real, and what was fitted on what."""

    dataset: str
    engine: str
    latency_model: str
    metric: str
    statistic: str
    real: float
    simulated: float
    error: float
    fitted_on: str


def accuracy(root: Path | str, *, fit: bool = True) -> list[Row]:
    """Replay every measured run under ``root`` and return the errors.

    Each run gives rows with nothing fitted over all requests, and (with ``fit``) rows with one constant a step fitted on the
    first half of its requests and judged on the second. Raises InputError when there is no run or one cannot be replayed.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise InputError(str(folder), "is no folder")
    runs = vllm_run.find(folder)
    if not runs:
        raise InputError(str(folder), "holds no measured run that can be replayed", "a run is a folder with requests.jsonl and meta.json")
    rows: list[Row] = []
    for run in runs:
        rows += _rows(run, vllm_run.replay(run), NOTHING, slice(None))
        if fit:
            half = len(run.requests) // 2
            offset_s = vllm_run.fit_offset(run, slice(0, half))
            words = f"{offset_s * 1e3:+.2f} ms a step on requests 1-{half}, judged on the rest"
            rows += _rows(run, vllm_run.replay(run, step_offset_s=offset_s), words, slice(half, None))
    return rows


def exceeding(rows: Sequence[Row], gate: float) -> list[Row]:
    """Return the rows whose error is larger than ``gate`` in either direction."""
    return [row for row in rows if abs(row.error) > gate]


def as_json(rows: Sequence[Row]) -> str:
    """Return the text that ``accuracy --json`` prints."""
    return json.dumps({"rows": [asdict(row) for row in rows]}, indent=2, allow_nan=False)


def print_rows(rows: Sequence[Row], gate: float | None, file: IO[str]) -> None:
    """Print one line per run, latency model and metric, with the error of each statistic in per cent."""
    from rich.markup import escape
    from rich.table import Table

    from sim.tables import console_for

    console = console_for(file)
    for heading, metrics in _grouped(rows).items():
        dataset, engine, latency_model, fitted_on = heading
        console.print(f"[bold]{escape(dataset)}[/bold]: {escape(engine)}, {escape(latency_model)}; fitted: {escape(fitted_on)}", highlight=False)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("error, %", min_width=18)
        for statistic in STATISTICS:
            table.add_column(statistic, justify="right", min_width=9)
        for metric, group in metrics.items():
            table.add_row(f"  {LABELS[metric]}", *(_cell(group.get(statistic), gate) for statistic in STATISTICS))
        console.print(table)
        console.print()


def _rows(run: VllmRun, simulated: Times, fitted_on: str, judged: slice) -> list[Row]:
    real = run.real.metrics(judged)
    rows = []
    for metric, values in simulated.metrics(judged).items():
        for statistic, ours, theirs in zip(STATISTICS, _statistics(values), _statistics(real[metric])):
            rows.append(_row(run, metric, statistic, theirs, ours, fitted_on))
    if judged == slice(None):
        rows.append(_row(run, "output_tokens_per_s", "mean", run.real.output_tokens_per_s, simulated.output_tokens_per_s, fitted_on))
    return rows


def _row(run: VllmRun, metric: str, statistic: str, real: float, simulated: float, fitted_on: str) -> Row:
    model = f"table ({run.profile.parts[-4]} profile)" if len(run.profile.parts) > 4 else "table"
    return Row(run.folder.name, run.engine, model, metric, statistic, real, simulated, (simulated - real) / real, fitted_on)


def _statistics(values: np.ndarray) -> list[float]:
    return [float(values.mean()), *(float(value) for value in np.percentile(values, [50, 90, 99]))]


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, str, str, str], dict[str, dict[str, Row]]]:
    """Return {(dataset, engine, latency model, fitted on): {metric: {statistic: row}}} in the order of ``rows``."""
    groups: dict[tuple[str, str, str, str], dict[str, dict[str, Row]]] = {}
    for row in rows:
        heading = (row.dataset, row.engine, row.latency_model, row.fitted_on)
        groups.setdefault(heading, {}).setdefault(row.metric, {})[row.statistic] = row
    return groups


def _cell(row: Row | None, gate: float | None) -> str:
    if row is None:
        return ""
    mark = " !" if gate is not None and abs(row.error) > gate else ""
    return f"{row.error * 100:+.2f}{mark}"

