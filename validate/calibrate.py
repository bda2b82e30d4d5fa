"""Measured steps become a ``fitted`` latency model, or are refused with a reason.

Non-negative least squares on relative errors, with large ones held down (Huber), on blocks of steps chosen at random; then everything
is scaled so that the total time agrees: robust fitting alone comes out short where the large errors are all on one side. What decode-only steps of one
batch size take beyond that is kept by batch size, where enough of them were seen. What the blocks held out say is the error.
Sources: C. Lawson and R. Hanson, Solving Least Squares Problems (1974), ch. 23; P. Huber, Ann. Math. Statist. 35 (1964).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.fitted import DEVICE_TERMS, FORMAT, HOST_TERMS, beyond_terms_s
from serving.errors import InputError
from serving.files import write_whole
from serving.records import Run, open_run
from serving.rng import stream
from serving.version import commit, version
from validate.stats import Interval, mape_interval
from validate.step_table import REGIMES, StepTable, captured_sizes, step_table

WARM_UP_STEPS = 8  # of each run: first touches of memory, first calls of kernels
BLOCK_STEPS = 16  # steps that are held out together: neighbours are alike
HOLDOUT = 0.3
FEWEST_STEPS = 200
FEWEST_OF_A_BATCH = 16  # decode-only steps of one batch size before their mean says more than the terms do
NOISE = 0.25  # mean absolute error of held-out steps beyond which a run says too little
DRIFT = 0.10  # error of their total time beyond which it says the wrong thing
HUBER = 1.5  # in units of the residuals' spread


@dataclass(frozen=True, slots=True)
class Calibration:
    """``fit`` is what goes to the file (None when refused); errors are fractions of the measured seconds, on steps held out."""

    accepted: bool
    reason: str
    train_steps: int
    mape: Interval | None
    bias: float | None
    by_regime: dict[str, tuple[Interval, int]]
    fit: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """The object that ``calibrate --json`` prints."""
        regimes = {name: {"mape": found.estimate, "interval": [found.low, found.high], "steps": steps} for name, (found, steps) in self.by_regime.items()}
        holdout = {
            "mape": None if self.mape is None else self.mape.estimate,
            "interval": None if self.mape is None else [self.mape.low, self.mape.high],
            "bias": self.bias, "by_regime": regimes,
        }  # fmt: skip
        return {"holdout": holdout, "train_steps": self.train_steps, "accepted": self.accepted, "reason": self.reason}


def calibrate(folders: Sequence[Path], *, seed: int = 0) -> Calibration:
    """Fit the steps of the runs in ``folders``, all of one device and one network. Raises InputError for what is no run with steps."""
    runs = [open_run(folder) for folder in folders]
    reason = _unfit(runs)
    if reason:
        return Calibration(False, reason, 0, None, None, {}, None)
    sizes = captured_sizes(runs)
    table = step_table(runs, sizes)
    kept = np.concatenate([np.arange(count) >= min(WARM_UP_STEPS, count // 10) for count in np.bincount(table.run)])
    table = table.rows(kept & (table.duration_s > 0))
    if len(table.run) < FEWEST_STEPS:
        return Calibration(False, f"too short: {len(table.run)} steps, at least {FEWEST_STEPS} are needed", 0, None, None, {}, None)
    held_out, groups = _split(table, seed)
    train, test = table.rows(~held_out), table.rows(held_out)
    device, host = fit_terms(train.device, train.device_s, train.duration_s), fit_terms(train.host, train.host_s, train.duration_s)
    batches_s = decode_batches_s(train, device, host)
    guess = _seconds(test, device, host, batches_s)
    rng = stream(seed, "calibrate.intervals")
    mape = mape_interval(test.duration_s, guess, rng=rng, groups=groups[held_out])
    by_regime = {}
    for index, name in enumerate(REGIMES):
        mine = test.regime == index
        if len(np.unique(groups[held_out][mine])) > 1:
            by_regime[name] = (mape_interval(test.duration_s[mine], guess[mine], rng=rng, groups=groups[held_out][mine]), int(mine.sum()))
    bias = float(guess.sum() / test.duration_s.sum() - 1)
    reason = _too_noisy(mape, bias)
    result = Calibration(not reason, reason, len(train.run), mape, bias, by_regime, None)
    if reason:
        return result
    return Calibration(True, "", len(train.run), mape, bias, by_regime, _file(runs, folders, sizes, device, host, batches_s, result))


def fit_terms(terms: np.ndarray, seconds: np.ndarray, scale_s: np.ndarray) -> np.ndarray:
    """Non-negative coefficients [terms] with ``terms @ coefficients`` near ``seconds``, errors counted as fractions of ``scale_s``.

    The total of the fitted seconds is that of the measured ones.
    """
    from scipy.optimize import nnls

    unit = np.abs(terms).max(axis=0)
    unit[unit == 0] = 1.0
    weight = 1.0 / scale_s
    coefficients = np.zeros(terms.shape[1])
    for _ in range(8):
        coefficients, _ = nnls(terms / unit * weight[:, None], seconds * weight)
        error = (terms / unit @ coefficients - seconds) / scale_s
        spread = 1.4826 * np.median(np.abs(error - np.median(error)))
        if spread <= 0:
            break
        weight = np.sqrt(np.minimum(1.0, HUBER * spread / np.maximum(np.abs(error), 1e-300))) / scale_s
    coefficients /= unit
    total = float((terms @ coefficients).sum())
    return coefficients * (seconds.sum() / total) if total > 0 else coefficients


def decode_batches_s(table: StepTable, device: np.ndarray, host: np.ndarray) -> dict[int, float]:
    """What decode-only steps take beyond their terms in the mean, seconds by batch size, for sizes of which there are FEWEST_OF_A_BATCH steps."""
    beyond_s = table.duration_s - table.device @ device - table.host @ host
    decodes = table.device[:, DEVICE_TERMS.index("decodes")].astype(np.int64)
    alone = table.regime == REGIMES.index("decode")
    counts = np.bincount(decodes[alone])
    return {int(size): float(beyond_s[alone & (decodes == size)].mean()) for size in np.flatnonzero(counts >= FEWEST_OF_A_BATCH)}


def _seconds(table: StepTable, device: np.ndarray, host: np.ndarray, batches_s: Mapping[int, float]) -> np.ndarray:
    """Seconds of each step as the fit has them."""
    seconds = table.device @ device + table.host @ host
    if batches_s:
        alone = table.regime == REGIMES.index("decode")
        seconds[alone] += beyond_terms_s(batches_s, table.device[alone, DEVICE_TERMS.index("decodes")])
    return np.maximum(seconds, 0.0)


def _split(table: StepTable, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose blocks of neighbouring steps to hold out. Returns the mask and each step's block."""
    position = np.concatenate([np.arange(count) for count in np.bincount(table.run)])
    _, groups = np.unique(table.run * (len(table.run) + 1) + position // BLOCK_STEPS, return_inverse=True)
    blocks = groups.max() + 1
    chosen = stream(seed, "calibrate.split").permutation(blocks)[: max(2, round(HOLDOUT * blocks))]
    return np.isin(groups, chosen), groups


def _unfit(runs: Sequence[Run]) -> str:
    """Why these runs cannot be fitted together, or an empty string."""
    for run in runs:
        if str(run.info["device"]).startswith("simulated"):
            return f"{run.path}: its steps were computed by the simulator, not measured"
        if not run.has("steps"):
            raise InputError(str(run.path), "has no steps.parquet", "there is nothing to fit")
        if run.has("requests"):
            warm = int((run.requests["cached_tokens"] > 0).sum())
            if warm:
                return f"{run.path}: warm, {warm} of {len(run.requests)} requests found part of their prompt in the prefix cache"
    for key, of in (("device", lambda run: run.info["device"]), ("llm", lambda run: run.info["scenario"].get("llm")), ("dtype", _dtype)):
        values = list(dict.fromkeys(of(run) for run in runs))
        if len(values) > 1:
            return f"from another {key}: {values[0]} and {values[1]} cannot be one fit"
    return ""


def _dtype(run: Run) -> Any:
    return run.info["versions"].get("dtype")


def _too_noisy(mape: Interval, bias: float) -> str:
    if not mape.estimate <= NOISE:
        return f"too noisy: steps held out are {mape.estimate:.0%} off on average, {NOISE:.0%} is the limit"
    if not abs(bias) <= DRIFT:
        return f"too noisy: the total time of steps held out is {bias:+.0%} off, {DRIFT:.0%} is the limit"
    return ""


def _file(
    runs: Sequence[Run], folders: Sequence[Path], sizes: tuple[int, ...], device: np.ndarray, host: np.ndarray, batches_s: dict[int, float],
    result: Calibration,
) -> dict[str, Any]:
    """The contents of the fit's file: coefficients, error, provenance."""
    first = runs[0].info
    cluster = first["scenario"].get("cluster") or {}
    return {
        "format": FORMAT,
        "llm": _name(first["scenario"].get("llm")),
        "gpu": _name(cluster.get("gpu")),
        "tensor_parallel": cluster.get("tensor_parallel", 1),
        "graph_sizes": list(sizes),
        "device_s": {name: float(value) for name, value in zip(DEVICE_TERMS, device) if value},
        "host_s": {name: float(value) for name, value in zip(HOST_TERMS, host) if value},
        "decode_batches_s": batches_s,
        "holdout": {**result.as_json()["holdout"], "train_steps": result.train_steps},
        "provenance": {
            "device": first["device"],
            "versions": dict(first["versions"]),
            "measured_on": sorted({str(run.info["measured_on"]) for run in runs if run.info.get("measured_on")}),
            "commit": first["commit"],
            "runs": [f"{folder.resolve().name}: {run.info['scenario'].get('name')}, seed {run.info['seed']}" for folder, run in zip(folders, runs)],
            "fitted_by": f"twinserve {version()}, commit {commit()}",
        },
    }


def _name(catalogue_name_or_path: Any) -> Any:
    """A scenario may name a file of the catalogue's form: the entry is known by the name inside it, which is the file's."""
    return Path(catalogue_name_or_path).stem if isinstance(catalogue_name_or_path, str) else catalogue_name_or_path


def write(fit: Mapping[str, Any], out: Path) -> None:
    """Write a fit's file. Raises InputError when the disk refuses."""
    import yaml

    write_whole(out, yaml.safe_dump(dict(fit), sort_keys=False, width=120))
