"""Sweeps: how a figure moves with what was varied, and which points nothing else beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from serving.errors import InputError
from sim.study.pareto import front
from validate.report.figure import SERIES, Figure, axis, duration_axis
from validate.report.fleets import PLAN_FILE, plan_page
from validate.report.headline import Table, number
from validate.report.page import Page, Section

SWEEP_FILES = ("sweep.parquet", "sweep.csv")
METRICS: Mapping[str, tuple[str, float, str]] = {  # column -> heading, factor from its unit, unit shown
    "ttft_s.p99": ("TTFT p99", 1e3, "ms"), "tpot_s.p99": ("TPOT p99", 1e3, "ms"), "e2e_s.p99": ("E2E p99", 1e3, "ms"),
    "goodput_rps": ("Goodput", 1, "req/s"), "output_tokens_per_s": ("Output", 1, "tok/s"), "slo_attainment.overall": ("Within SLO", 100, "%"),
    "kv_utilisation.max": ("KV cache peak", 100, "%"), "usd_per_million_output_tokens": ("Cost", 1, "$ per M output tokens"),
}  # fmt: skip
_PLOTTED = ("ttft_s.p99", "tpot_s.p99", "goodput_rps", "output_tokens_per_s", "slo_attainment.overall", "usd_per_million_output_tokens")
_FRONTS = (("output_tokens_per_s", False, "ttft_s.p99", True), ("usd_per_million_output_tokens", True, "ttft_s.p99", True))
_ROWS = 400


def is_study(folder: Path) -> bool:
    """Whether the folder holds a sweep or a plan."""
    return any((folder / name).is_file() for name in (*SWEEP_FILES, PLAN_FILE))


def page(folder: Path) -> Page:
    """Make the page of a sweep or a plan; raises InputError when its table is broken."""
    return plan_page(folder) if (folder / PLAN_FILE).is_file() else sweep_page(folder)


def read_sweep(folder: Path) -> dict[str, list]:
    """Read the sweep's table as columns; raises InputError when it cannot be read or is empty."""
    import pandas as pd

    path = next(folder / name for name in SWEEP_FILES if (folder / name).is_file())
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(str(path), f"cannot be read: {str(error).splitlines()[0]}") from error
    if not len(frame):
        raise InputError(str(path), "holds no finished point")
    return {str(name): frame[name].tolist() for name in frame.columns}


def varied(columns: Mapping[str, list]) -> list[str]:
    """Names of the dotted scenario paths that took more than one value, in the table's order."""
    metrics = {"ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s", "requests", "slo_attainment", "kv_utilisation", "scenario", "interval"}
    paths = [name for name in columns if ("." in name or name in ("llm", "seed")) and name.split(".")[0] not in metrics]
    return [name for name in paths if len({str(value) for value in columns[name]}) > 1]


def _series(columns: Mapping[str, list], metric: str) -> np.ndarray:
    factor = METRICS[metric][1]
    return np.array([float("nan") if value is None else float(value) * factor for value in columns[metric]])


def _plain(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def _heading(metric: str) -> str:
    title, _, unit = METRICS[metric]
    return f"{title}, {unit}"


def _moves(columns: Mapping[str, list], along: str, by: str | None, metric: str) -> Figure:
    """One metric along the first varied path, a line per value of the second; points that share both are averaged over the rest."""
    values, groups = _series(columns, metric), columns[by] if by else [""] * len(columns[along])
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in columns[along])
    order = sorted({*columns[along]}) if numeric else list(dict.fromkeys(map(str, columns[along])))
    position = [order.index(value if numeric else str(value)) for value in columns[along]]
    data = []
    for index, group in enumerate(dict.fromkeys(map(str, groups))):
        mine = np.array([str(value) == group for value in groups])
        sums, counts = np.zeros(len(order)), np.zeros(len(order))
        for at, value in zip(np.array(position)[mine], values[mine]):
            if np.isfinite(value):
                sums[at], counts[at] = sums[at] + value, counts[at] + 1
        mean = np.divide(sums, counts, out=np.full(len(order), np.nan), where=counts > 0)
        name = f"{by.split('.')[-1]} {group}" if by else METRICS[metric][0]
        data.append({"type": "scatter", "mode": "lines+markers", "name": name, "x": order, "y": _plain(mean), "showlegend": bool(by),
                     "line": {"color": SERIES[index % len(SERIES)], "width": 2}, "marker": {"size": 6}})  # fmt: skip
    spread = values[np.isfinite(values) & (values > 0)]
    log = len(spread) > 0 and spread.max() > 30 * spread.min() and METRICS[metric][2] == "ms"
    up = duration_axis("", float(spread.min()), float(spread.max())) if log else axis(_heading(metric), rangemode="tozero")
    layout = {"xaxis": axis(along, **({} if numeric else {"type": "category"})), "yaxis": up}
    return Figure(f"moves-{metric.replace('.', '-')}", METRICS[metric][0], "", data, layout, height_px=300)


def _front(columns: Mapping[str, list], names: Sequence[str], x: str, x_small: bool, y: str, y_small: bool) -> Figure | None:
    """Every point by two metrics, and the Pareto front through those that nothing beats."""
    if x not in columns or y not in columns:
        return None
    xs, ys = _series(columns, x), _series(columns, y)
    best = front(np.stack([xs, ys], axis=1), [x_small, y_small])
    if best.sum() < 1 or len(xs) < 3:
        return None
    text = ["<br>".join(f"{name} {columns[name][i]}" for name in names) for i in range(len(xs))]
    order = np.flatnonzero(best)[np.argsort(xs[best], kind="stable")]
    dots = {"type": "scatter", "mode": "markers", "name": "points", "x": _plain(xs), "y": _plain(ys), "text": text, "hovertemplate": "%{text}<br>%{x:,.4~g} · %{y:,.4~g}<extra></extra>",
            "marker": {"color": "$grey", "size": 7, "opacity": 0.55}}  # fmt: skip
    edge = {"type": "scatter", "mode": "lines+markers", "name": "nothing beats these", "x": _plain(xs[order]), "y": _plain(ys[order]), "text": [text[i] for i in order],
            "line": {"color": "$vermillion", "width": 2, "shape": "hv" if x_small == y_small else "vh"}, "marker": {"size": 9, "symbol": "diamond"},
            "hovertemplate": "%{text}<br>%{x:,.4~g} · %{y:,.4~g}<extra></extra>"}  # fmt: skip
    known = ys[np.isfinite(ys) & (ys > 0)]
    layout = {"xaxis": axis(_heading(x)), "yaxis": duration_axis(METRICS[y][0], float(known.min()), float(known.max()))}
    note = f"{'Left' if x_small else 'Right'} and down is better."
    return Figure(f"front-{x.split('.')[0]}", f"{METRICS[x][0]} against {METRICS[y][0]}", note, [dots, edge], layout, height_px=360)


def sweep_page(folder: Path) -> Page:
    """The page of a sweep: each metric along what was varied, the fronts, and the table."""
    columns = read_sweep(folder)
    names, count = varied(columns), len(next(iter(columns.values())))
    shown = [metric for metric in METRICS if metric in columns and np.isfinite(_series(columns, metric)).any()]
    by = names[1] if len(names) > 1 and len(set(map(str, columns[names[1]]))) <= len(SERIES) else None
    moves = [_moves(columns, names[0], by, metric) for metric in _PLOTTED if metric in shown] if names else []
    fronts = [figure for spec in _FRONTS if spec[0] in shown and (figure := _front(columns, names, *spec))]
    rows = [[*(str(columns[name][i]) for name in names), *(number(float(_series(columns, metric)[i])) for metric in shown)] for i in range(min(count, _ROWS))]
    table = Table(f"{count} points" + (f", the first {_ROWS}" if count > _ROWS else ""), [*names, *(_heading(m) for m in shown)], rows, words=len(names))
    sections = [Section("moves", "What moves", moves), Section("front", "Trade-offs", fronts), Section("points", "Points", [table])]
    scenario = str(columns["scenario"][0]) if "scenario" in columns else folder.resolve().name
    return Page("sweep", scenario, f"{count} points over {', '.join(names) or 'one configuration'}", _sweep_sentence(columns, names, shown), "", [], sections,
                {"study directory": folder.resolve().name})  # fmt: skip


def _sweep_sentence(columns: Mapping[str, list], names: Sequence[str], shown: Sequence[str]) -> str:
    for metric, best, words in (("goodput_rps", np.nanargmax, "Most goodput"), ("output_tokens_per_s", np.nanargmax, "Most output"), ("ttft_s.p99", np.nanargmin, "Lowest TTFT p99")):
        if metric in shown:
            at = int(best(_series(columns, metric)))
            chosen = ", ".join(f"{name} = {columns[name][at]}" for name in names)
            return f"{words}: {number(float(_series(columns, metric)[at]))} {METRICS[metric][2]}" + (f" at {chosen}." if chosen else ".")
    return f"{len(next(iter(columns.values())))} points."
