"""Calibration from one run of a real server, without an operator profile: three physical factors, or the reason why not.

The factors multiply a GPU's kernel set as the roofline uses it: the efficiency of compute, the efficiency of memory bandwidth, and
the host's exposed time per step. They are fitted to the requests of the run's first part by Gauss-Newton steps on the logarithms
of the mean TTFT and TPOT of groups of requests (simulated over measured); the rest of the run is predicted. A factor whose standard error is
too large a share of a step, or that cannot be told from the others, is named and the calibration refused. Intervals: bootstrap over requests
of the linearised fit. Sources: J. Dennis and R. Schnabel, Numerical Methods (1983), ch. 10; B. Efron and R. Tibshirani, An
Introduction to the Bootstrap (1993), ch. 9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serving.catalog import read_entry
from serving.errors import InputError
from serving.files import write_whole
from serving.records import Run, open_run
from serving.request import Arrival, Request
from serving.rng import stream
from serving.scenario import Scenario, from_mapping

FACTORS = ("compute efficiency", "bandwidth efficiency", "host time per step")
FEWEST_REQUESTS = 40
TRAIN_SHARE = 0.5
ITERATIONS, AVERAGED, LARGEST_STEP = 8, 4, 0.5
START = np.array([1.0, 1.0, 1e-3])
STRIDES = np.array([0.15, 0.15, 1e-3])  # for slopes: of an efficiency (relative), of the host time (seconds); wide, since simulated times are rugged
TYPICAL = np.array([1.0, 1.0, 1e-3])  # the scale on which an error of each counts
LARGEST_ERROR = np.array([0.25, 0.25, 2.0])  # standard error of each beyond which it is not identified, in units of TYPICAL
BINS, FEWEST_IN_BIN = 8, 8
LEAST_SPREAD = 0.01  # of the mean of a bin: no run repeats itself better
RESAMPLES = 400


class Observed(NamedTuple):
    """Times of the requests of a run in order of id, seconds; TPOT is NaN where there is one token."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray


@dataclass(frozen=True, slots=True)
class SingleRun:
    """``factors`` are (estimate, low, high) by name; errors are (simulated - real)/real of means on the requests not fitted."""

    accepted: bool
    reason: str
    factors: dict[str, tuple[float, float, float]]
    trained_on: int
    holdout: dict[str, float]
    gpu: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """The object that the command prints."""
        factors = {name: dict(zip(("estimate", "low", "high"), values)) for name, values in self.factors.items()}
        return {"accepted": self.accepted, "reason": self.reason, "factors": factors, "train_requests": self.trained_on, "holdout": self.holdout}


def calibrate_run(folder: Path | str, scenario: Scenario, *, seed: int = 0) -> SingleRun:
    """Fit the factors of ``scenario``'s GPU to the run in ``folder``; the scenario says what served it.

    Prompts are taken to share nothing; the scenario's latency model is replaced by the roofline, its workload by the run's requests.
    Raises InputError for what is no run with a table of requests, for too few, and where prompts were found in the prefix cache.
    """
    run = open_run(folder)
    if scenario.cluster.pools:
        raise InputError("cluster.pools", "a fleet of pools has a GPU for each: calibrate a run of one kind of replica")
    arrivals, real = _requests(run)
    train = int(len(arrivals) * TRAIN_SHARE)
    document, _ = read_entry("gpus", scenario.cluster.gpu, "cluster.gpu")
    limits = _limits(document)

    def simulated(factors: np.ndarray) -> Observed:
        return _simulate(scenario, document, factors, arrivals)

    bins = _bins(arrivals[:train])
    estimate, jacobian = _fit(lambda factors: _residuals(simulated(factors), real, bins), limits)
    found = simulated(estimate)
    disturbed = _disturbed(found, real, bins, seed)
    reason = _unidentified(jacobian, disturbed)
    spread = np.array([estimate - _solve(jacobian, draw) for draw in disturbed])
    intervals = np.clip(np.percentile(spread, [2.5, 97.5], axis=0), *limits).T
    named = {name: (float(value), float(low), float(high)) for name, value, (low, high) in zip(FACTORS, estimate, intervals)}
    if reason:
        return SingleRun(False, reason, named, train, {}, None)
    holdout = {
        metric: float(np.nanmean(getattr(found, metric)[train:]) / np.nanmean(getattr(real, metric)[train:]) - 1.0) for metric in Observed._fields
    }
    return SingleRun(True, "", named, train, holdout, _gpu(document, estimate, f"calibrated on {run.path.name}, requests 1-{train}"))


def write(result: SingleRun, path: Path) -> None:
    """Write the calibrated GPU as a catalogue file. Raises InputError when ``path`` cannot be written."""
    import yaml

    write_whole(path, yaml.safe_dump(result.gpu, sort_keys=False, width=140))


def _requests(run: Run) -> tuple[list[Arrival], Observed]:
    if not run.has("requests"):
        raise InputError(str(run.path), "has no table of requests", "import a result with one line a request")
    rows = run.requests[run.requests["status"] == "completed"].sort_values(["arrival_s", "request_id"])
    rows = rows[rows["first_token_s"].notna()]
    warm = int((rows["cached_tokens"] > 0).sum())
    if warm:
        raise InputError(str(run.path), f"is warm: {warm} of {len(rows)} requests found part of their prompt in the prefix cache", "measure cold prompts")
    if len(rows) < FEWEST_REQUESTS:
        raise InputError(str(run.path), f"has {len(rows)} completed requests with a first token", f"at least {FEWEST_REQUESTS} are needed")
    columns = ("arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "finish_s")
    arrival_s, prompts, outputs, first_s, finish_s = (rows[name].to_numpy() for name in columns)
    arrivals = [Arrival(Request(i, float(arrival_s[i]), int(prompts[i]), int(outputs[i])), int(outputs[i])) for i in range(len(rows))]
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_s = np.where(outputs > 1, (finish_s - first_s) / (outputs - 1), np.nan)
    return arrivals, Observed(first_s - arrival_s, tpot_s)


def _simulate(scenario: Scenario, document: dict[str, Any], factors: np.ndarray, arrivals: list[Arrival]) -> Observed:
    """Simulate the requests on the GPU with these factors."""
    import tempfile

    import yaml

    from sim.run import simulate

    with tempfile.TemporaryDirectory() as temporary:
        gpu = Path(temporary) / "gpu.yaml"
        gpu.write_text(yaml.safe_dump(_gpu(document, factors, "trial")))
        resolved = scenario.resolved()
        resolved["cluster"]["gpu"] = str(gpu)
        resolved["latency"] = {"name": "roofline"}
        out = Path(temporary) / "run"
        simulate(from_mapping(resolved), out=out, arrivals=arrivals, saturated_rps=1.0)
        rows = open_run(out).requests.sort_values("request_id")
    if len(rows) != len(arrivals) or (rows["status"] != "completed").any():
        raise InputError("policy", "the simulated server does not complete every request that the real one did", "are its limits those of the server?")
    tokens = rows["output_tokens"].to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_s = np.where(tokens > 1, (rows["finish_s"] - rows["first_token_s"]) / (tokens - 1), np.nan)
    return Observed((rows["first_token_s"] - rows["arrival_s"]).to_numpy(), tpot_s)


def _bins(arrivals: list[Arrival]) -> list[tuple[str, np.ndarray]]:
    """Groups of requests whose means are compared: of TTFT by prompt length, of TPOT by order of arrival and by context.

    One request's times move in jumps, with the step that it happens to wait for; the mean of a group does not.
    """
    order = np.arange(len(arrivals))
    prompts = np.array([each.request.prompt_tokens for each in arrivals])
    contexts = np.array([each.request.prompt_tokens + each.output_tokens / 2 for each in arrivals])
    several = np.array([each.output_tokens > 1 for each in arrivals])
    count = max(3, min(BINS, len(arrivals) // FEWEST_IN_BIN))
    bins = [("ttft_s", part) for part in np.array_split(np.argsort(prompts, kind="stable"), count)]
    for key in (order, contexts):
        bins += [("tpot_s", part) for part in np.array_split(np.argsort(key, kind="stable")[several[np.argsort(key, kind="stable")]], count)]
    return [(metric, part) for metric, part in bins if len(part)]


def _residuals(simulated: Observed, real: Observed, bins: list[tuple[str, np.ndarray]]) -> np.ndarray:
    """log(simulated/real) of the mean of each bin."""
    return np.log([getattr(simulated, metric)[part].mean() / getattr(real, metric)[part].mean() for metric, part in bins])


def _disturbed(simulated: Observed, real: Observed, bins: list[tuple[str, np.ndarray]], seed: int) -> np.ndarray:
    """Residuals [draws, bins] as they might have been: the requests of each bin drawn again, and what every run adds."""
    draws = stream(seed, "single_run.bootstrap")
    result = np.empty((RESAMPLES, len(bins)))
    for row in result:
        drawn = [(metric, part[draws.integers(len(part), size=len(part))]) for metric, part in bins]
        row[:] = _residuals(simulated, real, drawn) + draws.normal(0.0, LEAST_SPREAD, len(bins))
    return result


def _fit(residuals_of: Callable[[np.ndarray], np.ndarray], limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Newton in units of time within ``limits``; returns the factors and the slopes [bins, factors] over a wide stride.

    Times are nearly linear in the reciprocals of the efficiencies and in the host time, but simulated ones are rugged: no step is
    refused for a small rise, and the average of the last iterates is the answer.
    """
    factors = np.clip(START, *limits)
    path = []
    for _ in range(ITERATIONS):
        jacobian = _slopes(residuals_of, factors, limits)
        in_time = jacobian * -np.array([factors[0] ** 2, factors[1] ** 2, -1.0])
        step = np.clip(_solve(in_time, residuals_of(factors)), -LARGEST_STEP * TYPICAL, LARGEST_STEP * TYPICAL)
        times = np.array([1.0 / factors[0], 1.0 / factors[1], factors[2]]) - step
        factors = np.clip([1.0 / max(times[0], 1e-3), 1.0 / max(times[1], 1e-3), times[2]], *limits)
        path.append(factors)
    mean = np.mean(path[-AVERAGED:], axis=0)
    return mean, _slopes(residuals_of, mean, limits)


def _slopes(residuals_of: Callable[[np.ndarray], np.ndarray], factors: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Central differences; one-sided where a limit is near."""
    columns = []
    for i in range(len(FACTORS)):
        ends = []
        for side in (-1.0, 1.0):
            end = factors.copy()
            end[i] = np.clip(factors[i] + side * STRIDES[i] * (factors[i] if i < 2 else 1.0), limits[0][i], limits[1][i])
            ends.append(end)
        columns.append((residuals_of(ends[1]) - residuals_of(ends[0])) / (ends[1][i] - ends[0][i]))
    return np.stack(columns, axis=1)


def _solve(jacobian: np.ndarray, residuals: np.ndarray) -> np.ndarray:
    return np.linalg.lstsq(jacobian * TYPICAL, residuals, rcond=1e-8)[0] * TYPICAL


def _unidentified(jacobian: np.ndarray, disturbed: np.ndarray) -> str:
    """Name the factor that the run says least about, if its standard error is too large; else nothing."""
    matrix = jacobian * TYPICAL
    spread = float(np.sqrt(np.mean(disturbed.var(axis=0) + disturbed.mean(axis=0) ** 2)))
    values, vectors = np.linalg.eigh(matrix.T @ matrix)
    errors = spread * np.sqrt((vectors**2 / np.maximum(values, 1e-12)).sum(axis=1))
    worst = int(errors.argmax())
    if errors[worst] <= LARGEST_ERROR[worst]:
        return ""
    alone = spread / max(float(np.linalg.norm(matrix[:, worst])), 1e-6)
    why = "nothing in the run depends on it enough" if alone > LARGEST_ERROR[worst] else "its effect cannot be told from that of the others"
    return f"this run does not identify the {FACTORS[worst]}: {why} (standard error {errors[worst] * TYPICAL[worst]:.2g})"


def _limits(document: dict[str, Any]) -> np.ndarray:
    """Least and largest value of each factor: no efficiency may pass 1, no time fall below 0."""
    kernels = _kernels(document)
    compute = max(fit["compute_efficiency"] for fit in [*kernels["gemm"].values(), kernels["prefill_attention"]])
    memory = max(fit["memory_efficiency"] for fit in _memory_bound(kernels))
    return np.array([[0.05, 0.05, 0.0], [1.0 / compute, 1.0 / memory, 0.1]])


def _gpu(document: dict[str, Any], factors: np.ndarray, source: str) -> dict[str, Any]:
    """The GPU's catalogue entry with calibrated kernels and host time, for a file that ``cluster.gpu`` can name."""
    import copy

    compute, memory, host_s = (float(factor) for factor in factors)
    kernels = copy.deepcopy(_kernels(document))
    for fit in [*kernels["gemm"].values(), kernels["prefill_attention"]]:
        fit["compute_efficiency"] = min(1.0, fit["compute_efficiency"] * compute)
    for fit in _memory_bound(kernels):
        fit["memory_efficiency"] = min(1.0, fit["memory_efficiency"] * memory)
    kernels["source"] = f"{kernels['source']}; {source}: compute x {compute:.4g}, bandwidth x {memory:.4g}"
    host = _part(document, "host", "hosts") | {"step_s": host_s, "sequence_s": 0.0}
    host["source"] = f"{host['source']}; step_s: {source}"
    return {**document, "kernels": kernels, "host": host}


def _memory_bound(kernels: dict[str, Any]) -> list[dict[str, Any]]:
    return [*kernels["gemm"].values(), kernels["prefill_attention"], kernels["decode_attention"], kernels["elementwise"]]


def _kernels(document: dict[str, Any]) -> dict[str, Any]:
    return _part(document, "kernels", "kernels")


def _part(document: dict[str, Any], key: str, kind: str) -> dict[str, Any]:
    part = document[key]
    return read_entry(kind, part, f"cluster.gpu.{key}")[0] if isinstance(part, str) else part
