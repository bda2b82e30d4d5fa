"""Replays a sweep over ratios of prefill to decode servers: results.csv of a client, settings.yaml beside it; asks which ratio is best.

The best ratio of a shape at a concurrency makes the most output tokens per second and GPU. It is right when the simulated best is, as
measured, within 5 % of the measured best.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import catalog
from serving.errors import InputError, nearest
from validate.importers.source import Source, number
from validate.measured.pd_replay import Deployment, Load, replay
from validate.measured.row import NOTHING, Progress, Row, row

COLUMNS = ("prefill", "decode", "isl", "osl", "date", "num_prompts", "max_concurrency", "completed", "total_input_tokens",
           "total_output_tokens", "output_throughput", "mean_ttft_ms", "mean_tpot_ms")  # fmt: skip
TIE = 0.05
LEFT_OUT = "runs in which requests failed"
_PART = re.compile(r"(\d+:\d+) on (\d+) GPUs")


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run."""

    prefill: int
    decode: int
    shape: tuple[int, int]  # prompt and most output tokens that were asked for
    date: str
    load: Load
    failed: int
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float

    @property
    def ratio(self) -> str:
        """Prefill to decode servers."""
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """The measured runs, and the host and servers that its settings describe."""

    folder: Path
    engine: str
    llm: str
    gpu: str
    topology: str
    gpus: int
    tensor_parallel: int
    runs: tuple[Run, ...]

    def deployments(self, ratio: tuple[int, int]) -> list[Deployment]:
        """Servers at ``ratio`` as the settings have them, and, where that leaves GPUs of the host idle, on all of them."""
        whole, rest = divmod(self.gpus, sum(ratio))
        degrees = [self.tensor_parallel] + ([whole] if not rest and whole > self.tensor_parallel else [])
        return [Deployment(self.llm, self.gpu, self.topology, *ratio, degree) for degree in degrees]


@dataclass(frozen=True, slots=True)
class Cell:
    """Output tokens per second and GPU of each ratio at one shape and concurrency, measured and simulated."""

    name: str
    real: Mapping[str, float]
    simulated: Mapping[str, float]

    @property
    def best(self) -> list[str]:
        """Ratios whose measured rate is within 5 % of the best."""
        most = max(self.real.values())
        return [ratio for ratio, rate in self.real.items() if rate >= (1.0 - TIE) * most]

    @property
    def chosen(self) -> str:
        """The best ratio as simulated."""
        return max(self.simulated, key=self.simulated.__getitem__)

    @property
    def right(self) -> bool:
        """Whether the simulated best is one of the measured best."""
        return self.chosen in self.best


def find(root: Path) -> list[Sweep]:
    """Return the sweeps under ``root``. Raises InputError for one that cannot be read."""
    paths = [path for path in sorted(root.rglob("results.csv")) if {"prefill", "decode"} <= set(Source(path).header)]
    return [_read(path) for path in paths]


def rows(sweep: Sweep, progress: Progress | None = None) -> list[Row]:
    """Return the errors of TTFT, TPOT and output rate of every run without failures, on each of the ratio's deployments."""
    groups: dict[tuple[int, int, tuple[int, int]], list[Run]] = {}
    for run in sorted(sweep.runs, key=lambda run: run.date):
        groups.setdefault((run.prefill, run.decode, run.shape), []).append(run)
    result: list[Row] = []
    for done, ((prefill, decode, _), members) in enumerate(sorted(groups.items())):
        whole = [run for run in members if not run.failed]
        for deployment in sweep.deployments((prefill, decode)) if whole else []:
            figures, words = replay(deployment, [run.load for run in whole])
            for run, simulated in zip(whole, figures):
                name = f"{sweep.folder.name}/{run.ratio} on {deployment.gpus} GPUs/{_cell_name(run)}"
                for metric, value in simulated._asdict().items():
                    result.append(row(name, sweep.engine, words, metric, "mean", getattr(run, metric), value, NOTHING))
        if progress is not None:
            progress(done + 1, len(groups))
    return result


def readings(found: Sequence[Row]) -> dict[str, list[Cell]]:
    """Return the cells by how ``rows``' deployments are read: as the settings say, every ratio on all GPUs, ratios that need them all.

    Rows of other data yield nothing.
    """
    rates: dict[str, dict[tuple[str, int], tuple[float, float]]] = {}
    for each in found:
        _, part, cell = each.dataset.split("/")
        match = _PART.fullmatch(part)
        if match is not None and each.metric == "output_tokens_per_s":
            gpus = int(match[2])
            rates.setdefault(cell, {})[match[1], gpus] = (each.real / gpus, each.simulated / gpus)
    if not rates:
        return {}
    whole = max(gpus for members in rates.values() for _, gpus in members)
    kept = {
        "servers as the settings say": lambda ratio, gpus, all_gpus: gpus == min(all_gpus),
        f"every ratio on {whole} GPUs": lambda ratio, gpus, all_gpus: gpus == whole,
        f"only ratios that need {whole} GPUs": lambda ratio, gpus, all_gpus: all_gpus == [whole],
    }
    return {name: [_cell(cell, members, keep) for cell, members in rates.items()] for name, keep in kept.items()}


def verdicts(found: Sequence[Row]) -> list[str]:
    """Return one line for each reading: cells right, what is wrong, and what naming the same ratio everywhere would have got."""
    lines = []
    for reading, cells in readings(found).items():
        wrong = [f"{cell.name}: {cell.chosen}, not {' or '.join(cell.best)}" for cell in cells if not cell.right]
        always = {
            ratio: sum(ratio in cell.best for cell in cells) for ratio in dict.fromkeys(ratio for cell in cells for ratio in cell.real)
        }
        constant = max(always, key=always.__getitem__)
        lines.append(
            f"best ratio by output tokens per GPU-second, {reading}: {len(cells) - len(wrong)} of {len(cells)} right "
            f"(always {constant}: {always[constant]}); wrong: {'; '.join(wrong) or 'none'}"
        )
    close = [f"{cell.name}: {', '.join(cell.best)}" for cell in readings(found).popitem()[1] if len(cell.best) > 1]
    return [*lines, f"measured within {TIE:.0%} of each other, of the ratios that need all GPUs: {'; '.join(close) or 'none'}"]


def _cell(name: str, members: Mapping[tuple[str, int], tuple[float, float]], keep: Any) -> Cell:
    taken = {}
    for (ratio, gpus), pair in members.items():
        if keep(ratio, gpus, sorted(other for same, other in members if same == ratio)):
            taken[ratio] = pair
    return Cell(name, {ratio: real for ratio, (real, _) in taken.items()}, {ratio: simulated for ratio, (_, simulated) in taken.items()})


def _cell_name(run: Run) -> str:
    return f"{run.shape[0]}+{run.shape[1]} x {run.load.users}"


# -- reading ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> Sweep:
    source = Source(path)
    for column in COLUMNS:
        if column not in source.header:
            raise InputError(str(path), f"column '{column}' is missing", nearest(column, source.header))
    where = path.parent / "settings.yaml"
    settings = _settings(where)
    host = _stated(settings, where, "gpus", r"(\d+) x (\w+) SXM")
    degree = int(_stated(settings, where, "workers", r"TP (\d+)")[0])
    sweep = Sweep(
        path.parent, str(settings["engine"]).split(",")[0], _llm_of(settings["engine"], where), _known("gpus", f"{host[1].lower()}-sxm", where),
        _known("topologies", f"dgx-{host[1].lower()}", where), int(host[0]), degree,
        tuple(_run(f"{path}:{line}", record) for line, record in source.csv_rows()),
    )  # fmt: skip
    _check(sweep, settings, path)
    return sweep


def _check(sweep: Sweep, settings: Mapping[str, Any], path: Path) -> None:
    if not sweep.runs:
        raise InputError(str(path), "the file has a header and no rows")
    listed, seen = [str(ratio) for ratio in settings["ratios_prefill_decode"]], set()
    for run in sweep.runs:
        if run.ratio not in listed:
            raise InputError(str(path), f"ratio {run.ratio} is not among those of settings.yaml", "it lists " + ", ".join(listed))
        if (run.prefill + run.decode) * sweep.tensor_parallel > sweep.gpus:
            raise InputError(
                str(path), f"ratio {run.ratio} at TP {sweep.tensor_parallel} needs more than the {sweep.gpus} GPUs of settings.yaml"
            )
        key = (run.ratio, run.shape, run.load.users)
        if key in seen:
            raise InputError(str(path), f"ratio {run.ratio}, {_cell_name(run)}: there are two rows", "one run of each can be replayed")
        seen.add(key)


def _run(where: str, record: Mapping[str, str]) -> Run:
    def count(column: str) -> int:
        return int(number(record, column, where, at_least=1))

    completed, limit = count("completed"), count("osl")
    mean = count("total_output_tokens") / completed
    sent = count("num_prompts")
    if sent < completed:
        raise InputError(where, f"{completed} of {sent} requests completed", "see completed and num_prompts")
    if mean > limit:
        raise InputError(
            where,
            f"answers have {mean:.0f} tokens on average, more than the {limit} asked for",
            "see total_output_tokens, completed and osl",
        )
    load = Load(count("max_concurrency"), completed, round(count("total_input_tokens") / completed), mean, limit)
    times = {}
    for column in ("mean_ttft_ms", "mean_tpot_ms", "output_throughput"):
        times[column] = number(record, column, where)
        if not times[column]:
            raise InputError(where, f"column '{column}' is 0", "a measured value must be positive")
    return Run(count("prefill"), count("decode"), (count("isl"), limit), record["date"], load, sent - completed, times["mean_ttft_ms"] * 1e-3,
               times["mean_tpot_ms"] * 1e-3, times["output_throughput"])  # fmt: skip


def _settings(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(Source(path).text)
    except yaml.YAMLError:
        settings = None
    missing = {"gpus", "workers", "engine", "ratios_prefill_decode"} - set(settings if isinstance(settings, dict) else ())
    if missing:
        raise InputError(
            str(path), f"does not state {', '.join(sorted(missing))}", "a mapping that describes host, servers and ratios is expected"
        )
    return settings


def _stated(settings: Mapping[str, Any], path: Path, key: str, pattern: str) -> tuple[str, ...]:
    found = re.search(pattern, str(settings[key]))
    if found is None:
        raise InputError(f"{path}:{key}", f"'{settings[key]}' is not understood", f"expected something like '{pattern}'")
    return found.groups()


def _llm_of(engine: Any, path: Path) -> str:
    named = [name for name in catalog.names("llms") if name in str(engine).lower()]
    if not named:
        raise InputError(f"{path}:engine", f"'{engine}' names no language model of the catalogue", "see twinserve list llms")
    return max(named, key=len)


def _known(kind: str, name: str, path: Path) -> str:
    if name not in catalog.names(kind):
        raise InputError(f"{path}:gpus", f"the catalogue has no '{name}' among its {kind}", nearest(name, catalog.names(kind)))
    return name
