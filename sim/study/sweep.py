"""A sweep: one simulation per point and seed, and one tidy table of what came out.

Common random numbers: every point of a seed sees the same arrivals and lengths, since each subsystem has a stream of its own
that depends on the seed alone. Differences between points are then the settings' doing.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.catalog import load_gpu, load_llm
from serving.errors import InputError, nearest
from serving.scenario import Scenario, from_mapping
from sim.study.executors import PoolInUse
from sim.study.points import Points, files_identity, key_of, replace_file
from sim.study.tasks import OK, REFUSED, Answer, Task, carry_out
from sim.study.vary import Setting, override

TABLES = ("sweep.parquet", "sweep.csv")
NOTE = "sweep.json"
_NOT_RUN = "not_run"  # column: why a point has no figures


@dataclass(frozen=True, slots=True)
class Point:
    """One setting under one seed."""

    setting: Setting
    seed: int
    scenario: dict[str, Any]  # resolved, as plain data
    key: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """What came out: rows in the order of the points, whoever computed them and when."""

    paths: list[str]
    rows: list[dict[str, Any]]
    failed: list[str] = field(default_factory=list)


def plain_at(data: Any, path: str) -> Any:
    """The value at a dotted path of plain data, or None."""
    for part in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict):
            data = data.get(part)
        else:
            return None
    return data


def points_of(base: Scenario, settings: Sequence[Setting], seeds: int, folder: Path | None = None) -> list[Point]:
    """Validate every setting before anything runs; ``seeds`` replications each, from the scenario's seed upwards.

    Raises InputError naming the varied path. Whether a setting *fits* its GPUs is only found out by its run: that is a row.
    """
    if seeds < 1:
        raise InputError("--seeds", "must be at least 1", f"got {seeds}")
    raw = base.resolved()
    raw.pop("plan", None)
    points = []
    for setting in settings:
        scenario = _with(raw, setting, folder).resolved()
        for seed in range(scenario["seed"], scenario["seed"] + seeds):
            resolved = {**scenario, "seed": seed}
            points.append(Point(setting, seed, resolved, key_of("sweep", resolved, files_identity(resolved))))
    return points


def _with(raw: dict[str, Any], setting: Setting, folder: Path | None) -> Scenario:
    try:
        scenario = from_mapping(raw, [override(path, value) for path, value in setting.items()], folder=folder)
        load_llm(scenario.llm)
        load_gpu(scenario.cluster.gpu)
        return scenario
    except InputError as error:
        where = error.where.replace("--set ", "--vary ")
        raise InputError(where if where.startswith("--vary") else f"--vary {' '.join(setting)}: {where}", error.problem, error.hint) from None


def check_paths(raw: dict[str, Any], paths: Sequence[str]) -> None:
    """Refuse paths whose first key no scenario has; deeper ones are the validation's business."""
    known = Scenario.model_fields
    for path in paths:
        first = path.split(".")[0].split("[")[0]
        if first not in known or first == "plan":
            raise InputError(f"--vary {path}", "unknown key", nearest(first, [name for name in known if name != "plan"]))


def run_point(resolved: dict[str, Any]) -> dict[str, Any]:
    """What a worker does for a point: the summary of its run."""
    from sim.run import simulate

    result = simulate(from_mapping(resolved), records=False)
    if result.partial:
        raise KeyboardInterrupt
    return result.summary


def run_sweep(points: Sequence[Point], use: PoolInUse, store: Points, progress: Callable[[int, int | None], None] | None = None) -> Sweep:
    """Compute what is not finished yet, and make the rows."""
    answers = carry_out([Task(point.key, run_point, (point.scenario,)) for point in points], use, store, progress)
    return gather(points, answers)


def finished(points: Sequence[Point], store: Points) -> Sweep:
    """The rows of the points that ``store`` has: what an interrupted sweep leaves."""
    return gather([point for point in points if point.key in store], {point.key: Answer(*store[point.key]) for point in points if point.key in store})


def gather(points: Sequence[Point], answers: Mapping[str, Answer]) -> Sweep:
    """Rows of varied paths and flattened summaries, in the order of the points."""
    paths = list(dict.fromkeys(path for point in points for path in point.setting))
    rows, failed = [], []
    for point in points:
        answer = answers[point.key]
        row: dict[str, Any] = {path: point.setting.get(path) for path in paths}
        row["seed"] = point.seed
        why = None
        if answer.kind == OK:
            row.update(flat(answer.value))
        else:
            why = str(InputError(**answer.value)) if answer.kind == REFUSED else f"{answer.kind}: {answer.value}"
        if answer.kind not in (OK, REFUSED):
            failed.append(f"{_named(point)}: {answer.value}")
        row[_NOT_RUN] = why
        rows.append(row)
    return Sweep(paths, rows, failed)


def _named(point: Point) -> str:
    return ", ".join(f"{path}={value}" for path, value in point.setting.items()) + f", seed {point.seed}"


def flat(summary: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one level, keys joined by dots."""
    row: dict[str, Any] = {}
    for key, value in summary.items():
        row.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return row


def columns_of(sweep: Sweep) -> dict[str, list]:
    """The table by columns, each of one type: whole numbers, numbers, truth values or text; None where there is nothing."""
    names = list(dict.fromkeys(name for row in sweep.rows for name in row))
    names = [name for name in names if name != _NOT_RUN] + [_NOT_RUN]
    return {name: _one_type([row.get(name) for row in sweep.rows]) for name in names}


def _one_type(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) <= 1 and not kinds & {dict, list}:
        return values
    return [None if value is None else value if isinstance(value, str) else json.dumps(value) for value in values]


def write_tables(sweep: Sweep, folder: Path, note: Mapping[str, Any]) -> None:
    """Write the table as Parquet and CSV, and what was asked as JSON: the same bytes for the same points. Raises InputError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = columns_of(sweep)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values()))
    sink = io.BytesIO()
    arrays = [pa.array(values, pa.string() if all(value is None for value in values) else None) for values in columns.values()]
    pq.write_table(pa.Table.from_arrays(arrays, names=list(columns)), sink, compression="zstd")
    replace_file(folder / "sweep.parquet", sink.getvalue())
    replace_file(folder / "sweep.csv", text.getvalue().encode())
    replace_file(folder / NOTE, (json.dumps(note, indent=2) + "\n").encode())
