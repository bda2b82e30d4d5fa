"""Fit collectives to measurements and write ``hwmodels/measured/collectives-*.yaml`` with its provenance.

    python -m hwmodels.fit_collectives --gpu h100-sxm --custom custom_allreduce.csv --nccl nccl_perf.parquet --out FILE
    python -m hwmodels.fit_collectives --gpu h100-sxm --name h100-sxm-sglang --points FILE --out FILE

Inputs: ``--custom`` an AIConfigurator table of a serving engine's all-reduce (``message_size`` counts bf16 ELEMENTS, latency in
ms, CUDA graph rows are used); ``--nccl`` its table of NCCL operations (half precision rows are used); ``--points`` a YAML list
of published points. The kernels have three constants each for all numbers of ranks together; which kernel a point belongs to
follows from which is cheaper, so no threshold is fitted. The library gets a further regime only while that cuts its mean error by a percentage point.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hwmodels.collectives import Regimes, Segment, sent_bytes

KERNELS = ("one_shot", "two_shot")
KERNEL_MAX_BYTES = 4 << 20  # the largest power of two below the 8 MiB buffer of the engines' kernels
REGIME_GAIN = 0.01  # a further regime of the library must cut the mean error by this much
MOST_REGIMES = 5
SPIKE = 1.3  # a point this much slower than some larger vector among as many ranks is a disturbed measurement
BF16_BYTES = 2
NCCL_OPERATIONS = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all"}


class Point(NamedTuple):
    """One measurement: vector bytes among ``ranks`` GPUs took ``seconds``."""

    ranks: int
    size_bytes: float
    seconds: float


Law = tuple[float, float, float]  # latency_s, per_peer_s, seconds per byte sent


def kernel_s(law: Law, algorithm: str, ranks: int, size_bytes: float) -> float:
    """Seconds by a fitted kernel."""
    return law[0] + law[1] * (ranks - 1) + law[2] * sent_bytes("all_reduce", algorithm, size_bytes, ranks)


def fit_kernels(points: Sequence[Point]) -> dict[str, Law]:
    """Fit both kernels by relative least squares; each point counts for the kernel that is cheaper there, until none moves."""
    assigned = ["one_shot" if p.ranks == 2 or p.size_bytes * p.ranks < (2 << 20) else "two_shot" for p in points]
    laws: dict[str, Law] = {}
    for _ in range(20):
        for name in KERNELS:
            mine = [p for p, kernel in zip(points, assigned) if kernel == name]
            rows = [[1.0, p.ranks - 1.0, sent_bytes("all_reduce", name, p.size_bytes, p.ranks)] for p in mine]
            laws[name] = _relative_fit(rows, [p.seconds for p in mine])
        chosen = [min(KERNELS, key=lambda name: kernel_s(laws[name], name, p.ranks, p.size_bytes)) for p in points]
        if chosen == assigned:
            break
        assigned = chosen
    return laws


def _relative_fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> Law:
    from scipy.optimize import nnls

    matrix, target = np.array(rows), np.array(seconds)
    weighted = matrix / target[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(weighted / scale, np.ones(len(target)))
    return tuple(float(x) for x in solution / scale)


def fit_library(operation: str, points: Sequence[Point]) -> list[dict[str, float]]:
    """Return regimes as the fields of ``collectives.Segment`` for one number of ranks.

    Dynamic programming over the sizes where a regime may begin, by the sum of relative errors (outliers in the tables must not
    decide); a further regime has to earn its place.
    """
    points = sorted(points, key=lambda p: p.size_bytes)
    count = len(points)
    law: dict[tuple[int, int], tuple[Law, float]] = {}
    shortest = 3 if count >= 6 else count
    for i in range(count):
        for j in range(i + shortest, count + 1):
            part = points[i:j]
            fitted = _relative_fit(
                [[1.0, 0.0, sent_bytes(operation, "library", p.size_bytes, p.ranks)] for p in part], [p.seconds for p in part]
            )
            law[i, j] = fitted, sum(abs(_library_s(fitted, operation, p) / p.seconds - 1) for p in part)
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}
    for regimes in range(1, MOST_REGIMES + 1):
        for j in range(1, count + 1):
            options = [
                (best[regimes - 1, i][0] + law[i, j][1], [*best[regimes - 1, i][1], i])
                for i in range(j)
                if (regimes - 1, i) in best and (i, j) in law
            ]
            if options:
                best[regimes, j] = min(options)
    done = [best[regimes, count] for regimes in range(1, MOST_REGIMES + 1) if (regimes, count) in best]
    error, starts = done[0]
    for other_error, other_starts in done[1:]:
        if error - other_error < REGIME_GAIN * count:
            break
        error, starts = other_error, other_starts
    ends = [*starts[1:], count]
    return [
        {
            "from_bytes": points[i].size_bytes,
            "to_bytes": points[j - 1].size_bytes,
            "latency_s": _round(law[i, j][0][0]),
            "seconds_per_byte": _round(law[i, j][0][2]),
        }
        for i, j in zip(starts, ends)
    ]


def _library_s(law: Law, operation: str, point: Point) -> float:
    return law[0] + law[2] * sent_bytes(operation, "library", point.size_bytes, point.ranks)


def read_custom(path: Path, backend_suffix: str = "_graph") -> list[Point]:
    """Read a serving engine's all-reduce table; sizes there are counts of bf16 elements."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_point(row) for row in csv.DictReader(file) if row["backend"].endswith(backend_suffix)]


def read_table(path: Path) -> list[dict[str, Any]]:
    """Rows of a parquet table, as mappings."""
    import pandas as pd

    return pd.read_parquet(path).to_dict("records")


def _point(row: dict[str, Any]) -> Point:
    return Point(int(row["num_gpus"]), float(row["message_size"]) * BF16_BYTES, float(row["latency"]) * 1e-3)


def without_spikes(points: Sequence[Point]) -> list[Point]:
    """Drop disturbed measurements: a collective cannot take much longer than one of a larger vector among as many ranks."""
    kept = []
    for p in points:
        larger = [q.seconds for q in points if q.ranks == p.ranks and q.size_bytes > p.size_bytes]
        if not larger or p.seconds <= SPIKE * min(larger):
            kept.append(p)
    return kept


def _by_ranks(points: Sequence[Point]) -> dict[int, list[Point]]:
    return {ranks: [p for p in points if p.ranks == ranks] for ranks in sorted({p.ranks for p in points})}


def _errors(predict: Callable[[Point], float], points: Sequence[Point]) -> dict[str, Any]:
    shares = sorted(abs(predict(p) / p.seconds - 1) for p in points)
    return {"points": len(shares), "median": round(float(np.median(shares)), 4), "worst": round(shares[-1], 4)}


def _kernels_s(laws: dict[str, Law], point: Point) -> float:
    return min(kernel_s(laws[name], name, point.ranks, point.size_bytes) for name in KERNELS)


def _kernel_report(train: Sequence[Point], held_out: Sequence[Point]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fit the kernels; without points set aside, every other size is held out once to state the error on unseen sizes."""
    measured, train = train, without_spikes(train)
    laws = fit_kernels(train)
    errors: dict[str, Any] = {"train": _errors(lambda p: _kernels_s(laws, p), train) | {"dropped": len(measured) - len(train)}}
    if held_out:
        errors["holdout"] = _errors(lambda p: _kernels_s(laws, p), held_out)
    else:
        sizes = sorted({p.size_bytes for p in train})
        half = fit_kernels([p for p in train if sizes.index(p.size_bytes) % 2 == 0])
        errors["holdout"] = _errors(lambda p: _kernels_s(half, p), [p for p in train if sizes.index(p.size_bytes) % 2 == 1])
    facts = {
        name: {"latency_s": _round(law[0]), "per_peer_s": _round(law[1]), "bytes_per_s": _round(1 / law[2])} for name, law in laws.items()
    }
    return facts, errors


def _library_report(operation: str, points: Sequence[Point]) -> tuple[dict[int, Any], dict[str, Any]]:
    kept = without_spikes(points)
    facts = {ranks: fit_library(operation, mine) for ranks, mine in _by_ranks(kept).items()}
    laws = {ranks: Regimes(operation, ranks, [Segment(**regime) for regime in regimes]) for ranks, regimes in facts.items()}
    return facts, _errors(lambda p: laws[p.ranks].seconds(p.size_bytes), kept) | {"dropped": len(points) - len(kept)}


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _provenance(path: Path, rows: int) -> dict[str, Any]:
    return {"file": "/".join(path.parts[-4:]), "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "points": rows}


def fit_tables(custom: Path | None, nccl: Path | None) -> dict[str, Any]:
    """Fit the tables of AIConfigurator; either may be missing.

    The library of all-reduce is what the engine takes for large messages, and NCCL for sizes that its kernels serve.
    """
    facts: dict[str, Any] = {"data": [], "errors": {}, "kernels": {}, "library": {}}
    library: dict[str, list[Point]] = {}
    if custom is not None:
        points = (
            read_custom(custom)
            if custom.suffix == ".csv"
            else [_point(row) for row in read_table(custom) if row["backend"].endswith("_graph")]
        )
        facts["kernels"], facts["errors"]["kernels"] = _kernel_report([p for p in points if p.size_bytes <= KERNEL_MAX_BYTES], [])
        library["all_reduce"] = [p for p in points if p.size_bytes > KERNEL_MAX_BYTES]
        facts["data"].append(_provenance(custom, len(points)))
    if nccl is not None:
        rows = [row for row in read_table(nccl) if row["nccl_dtype"] == "half"]
        for name, operation in NCCL_OPERATIONS.items():
            points = [_point(row) for row in rows if row["op_name"] == name]
            served = operation in library
            library[operation] = library.get(operation, []) + [p for p in points if not served or p.size_bytes <= KERNEL_MAX_BYTES]
        facts["data"].append(_provenance(nccl, len(rows)))
    for operation, points in library.items():
        facts["library"][operation], facts["errors"][operation] = _library_report(operation, points)
    return facts


def fit_points(path: Path) -> dict[str, Any]:
    """Fit published points: ``kernels`` and ``library`` lists of {ranks, bytes, seconds, use: train | holdout}."""
    import yaml

    listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    kernels = {
        use: [Point(p["ranks"], p["bytes"], p["seconds"]) for p in listed["kernels"] if p["use"] == use] for use in ("train", "holdout")
    }
    library = [Point(p["ranks"], p["bytes"], p["seconds"]) for p in listed["library"]]
    facts: dict[str, Any] = {"errors": {}, "library": {}}
    facts["kernels"], facts["errors"]["kernels"] = _kernel_report(kernels["train"], kernels["holdout"])
    facts["library"]["all_reduce"], facts["errors"]["all_reduce"] = _library_report("all_reduce", library)
    facts["data"] = [_provenance(path, len(listed["kernels"]) + len(library))]
    facts["source"] = listed["source"]
    return facts


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry: fit and write one file."""
    import yaml

    parser = argparse.ArgumentParser(prog="python -m hwmodels.fit_collectives", description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", required=True, help="catalogue name")
    parser.add_argument("--name", help="name of the fit; the GPU's name by default")
    parser.add_argument("--custom", type=Path, help="all-reduce table of a serving engine (csv or parquet)")
    parser.add_argument("--nccl", type=Path, help="table of NCCL operations (parquet)")
    parser.add_argument("--points", type=Path, help="published points (yaml)")
    parser.add_argument("--source", default="AIConfigurator measured operators (NVIDIA, Apache-2.0)", help="said in the file")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    facts = fit_points(given.points) if given.points else fit_tables(given.custom, given.nccl)
    flags = [f"--{flag} {getattr(given, flag).name}" for flag in ("custom", "nccl", "points") if getattr(given, flag)]
    name = given.name or given.gpu
    head = {
        "name": name,
        "gpu": given.gpu,
        "source": facts.pop("source", given.source),
        "command": " ".join(["python -m hwmodels.fit_collectives --gpu", given.gpu, "--name", name, *flags]),
    }
    given.out.write_text(
        yaml.safe_dump(head | {"kernel_max_bytes": KERNEL_MAX_BYTES} | facts, sort_keys=False, width=140), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
