"""Every measured run in a folder against the simulator: one table of errors, each row with what was fitted on what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from serving.errors import InputError
from validate.measured import mlperf, pd_ratio, routing_ladder, served, served_table, vllm_run
from validate.measured.row import NOTHING, STATISTICS, Progress, Row, row, statistics
from validate.measured.vllm_run import Times, VllmRun

JOBS = 2


def accuracy(root: Path | str, *, fit: bool = True, jobs: int = JOBS, sample: int | None = None, progress: Progress | None = None) -> list[Row]:
    """Replay every measured run under ``root`` and return the errors, with nothing fitted and, with ``fit``, fitted on one half of a
    run or table and judged on the other.

    ``sample`` takes so many rows of each group of a served table; ``jobs`` processes simulate them. ``progress`` is told how many
    simulations of the present data set are done. Raises InputError when there is no run or one cannot be replayed.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise InputError(str(folder), "is no folder")
    runs, submissions, ladders, tables = vllm_run.find(folder), mlperf.find(folder), routing_ladder.find(folder), served.find(folder)
    sweeps = pd_ratio.find(folder)
    if not (runs or submissions or ladders or sweeps or tables):
        hint = (
            "a run is a folder with requests.jsonl and meta.json, a served*.csv table, an MLPerf summary.txt, a *capacity.csv ladder "
            "or a results.csv over prefill-decode ratios"
        )
        raise InputError(str(folder), "holds no measured run that can be replayed", hint)
    rows: list[Row] = []
    for run in runs:
        rows += vllm_rows(run, fit=fit)
    for submission in submissions:
        rows += mlperf.rows(submission)
    for ladder in ladders:
        rows += routing_ladder.rows(ladder, progress)
    for sweep in sweeps:
        rows += pd_ratio.rows(sweep, progress)
    for table in tables:
        rows += served_table.rows(table, fit=fit, jobs=jobs, progress=progress, sample=sample)
    return rows


def vllm_rows(run: VllmRun, *, fit: bool) -> list[Row]:
    """Errors over all requests with nothing fitted; with ``fit``, host time fitted on the first half and judged on the second, beside the
    second half with nothing fitted: what the halving alone does."""
    unfitted = vllm_run.replay(run)
    rows = _rows(run, unfitted, NOTHING, slice(None))
    if fit:
        half = len(run.requests) // 2
        host_s = vllm_run.fit_host_s(run, slice(0, half))
        judged = slice(half, None)
        rows += _rows(run, unfitted, f"{NOTHING}; judged on requests {half + 1}-{len(run.requests)} only", judged)
        words = f"host time {host_s * 1e3:.2f} ms a step on requests 1-{half}, judged on the rest"
        rows += _rows(run, unfitted if host_s == 0 else vllm_run.replay(run, host_step_s=host_s), words, judged)
    return rows


def exceeding(rows: Sequence[Row], gate: float) -> list[Row]:
    """Return the rows whose error is larger than ``gate`` in either direction."""
    return [row for row in rows if abs(row.error) > gate]


def as_json(rows: Sequence[Row]) -> str:
    """Return the text that ``accuracy --json`` prints."""
    return json.dumps({"rows": [asdict(row) for row in rows]}, indent=2, allow_nan=False)


def _rows(run: VllmRun, simulated: Times, fitted_on: str, judged: slice) -> list[Row]:
    real = run.real.metrics(judged)
    facts = (run.folder.name, run.engine, f"table ({run.profile.parts[-4]} profile)" if len(run.profile.parts) > 4 else "table")
    rows = []
    for metric, values in simulated.metrics(judged).items():
        for statistic, ours, theirs in zip(STATISTICS, statistics(values), statistics(real[metric])):
            rows.append(row(*facts, metric, statistic, theirs, ours, fitted_on))
    if judged == slice(None):
        rows.append(row(*facts, "output_tokens_per_s", "mean", run.real.output_tokens_per_s, simulated.output_tokens_per_s, fitted_on))
    return rows
