"""What one replication of a scenario says: the gated metrics, and how each class fared against its objectives."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serving.metrics import COMPLETED
from serving.scenario import Slo
from validate.regress.drive import Driven

BURN_WINDOWS_S = (60.0, 10.0)  # the slow burn and the fast burn


@dataclass(frozen=True, slots=True)
class Metric:
    """How a metric is compared: ``harm`` is +1 where larger is worse. ``relative``: a change is a fraction of the baseline's value;
    else of everything (fractions and counts per request, of which the baseline may have none)."""

    label: str
    harm: int
    relative: bool = True
    unit: str = ""


METRICS: Mapping[str, Metric] = {
    "ttft_p50_s": Metric("TTFT p50", +1, unit="s"),
    "ttft_p99_s": Metric("TTFT p99", +1, unit="s"),
    "tpot_mean_s": Metric("TPOT mean", +1, unit="s"),
    "tpot_p99_s": Metric("TPOT p99", +1, unit="s"),
    "e2e_mean_s": Metric("E2E mean", +1, unit="s"),
    "e2e_p99_s": Metric("E2E p99", +1, unit="s"),
    "goodput_rps": Metric("Goodput", -1, unit="/s"),
    "slo_attainment": Metric("SLO attainment", -1, relative=False, unit="%"),
    "preemptions_per_request": Metric("Preemptions", +1, relative=False, unit="%"),
    "output_tokens_per_s": Metric("Output tokens", -1, unit="/s"),
}


def metric(key: str) -> Metric:
    """The metric of a key of ``Sample.values``: one of METRICS, or ``slo_attainment.CLASS``."""
    name, dot, class_name = key.partition(".")
    return Metric(f"SLO attainment of {class_name}", -1, relative=False, unit="%") if dot else METRICS[name]


@dataclass(frozen=True, slots=True)
class ClassShare:
    """One class of one replication: requests, those that met their objectives, worst burn rate in windows of BURN_WINDOWS_S."""

    requests: int
    met: int
    burn: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One replication. ``values`` by the keys of METRICS, then ``slo_attainment.CLASS`` if there are several; NaN: no value."""

    values: dict[str, float]
    classes: dict[str, ClassShare]


@functools.lru_cache(maxsize=4096)
def _weights(n: int, quantile: float) -> np.ndarray:
    from scipy.special import betainc

    edges = betainc((n + 1) * quantile, (n + 1) * (1 - quantile), np.arange(n + 1) / n)
    return np.diff(edges)


def smooth_quantile(values: np.ndarray, quantile: float) -> float:
    """Harrell-Davis estimate: a mean of all order statistics, weighted by how likely each is to be the quantile.

    In pairs of runs it jumps less than one order statistic does: fewer replications show the same change.
    Source: F. Harrell and C. Davis, Biometrika 69 (1982).
    """
    if not len(values):
        return math.nan
    return float((_weights(len(values), quantile) * np.sort(values)).sum())


def sample(driven: Driven, slo: Slo, warmup_s: float, cooldown_s: float) -> Sample:
    """Measure a run; requests that arrive in its first ``warmup_s`` and last ``cooldown_s`` are left out."""
    rows = driven.columns
    end_s = driven.cluster.end_s
    inside = (rows["arrival_s"] >= warmup_s) & (rows["arrival_s"] <= end_s - cooldown_s)
    rows = {name: column[inside] for name, column in rows.items()}
    done = rows["status_code"] == COMPLETED
    ttft_s, e2e_s = rows["first_token_s"] - rows["arrival_s"], rows["finish_s"] - rows["arrival_s"]
    gaps = rows["output_tokens"] - 1
    tpot_s = np.divide(rows["finish_s"] - rows["first_token_s"], gaps, out=np.zeros(len(gaps)), where=gaps > 0)
    limits = np.array([slo.targets(name) for name in driven.class_names])[rows["class_index"]]
    with np.errstate(invalid="ignore"):
        met = done & (ttft_s <= limits[:, 0]) & (tpot_s <= limits[:, 1]) & (e2e_s <= limits[:, 2])
    window_s = end_s - warmup_s - cooldown_s
    count = len(done)
    ttft_s, e2e_s, tpot_s = ttft_s[done], e2e_s[done], tpot_s[done & (gaps > 0)]
    values = {
        "ttft_p50_s": smooth_quantile(ttft_s, 0.5),
        "ttft_p99_s": smooth_quantile(ttft_s, 0.99),
        "tpot_mean_s": float(tpot_s.mean()) if len(tpot_s) else math.nan,
        "tpot_p99_s": smooth_quantile(tpot_s, 0.99),
        "e2e_mean_s": float(e2e_s.mean()) if len(e2e_s) else math.nan,
        "e2e_p99_s": smooth_quantile(e2e_s, 0.99),
        "goodput_rps": float(met.sum()) / window_s,
        "slo_attainment": float(met.sum()) / count if count else math.nan,
        "preemptions_per_request": float(rows["preemptions"].sum()) / count if count else math.nan,
        "output_tokens_per_s": float(rows["output_tokens"].sum()) / window_s,
    }
    classes = _classes(driven.class_names, rows, met, slo.attainment)
    if len(classes) > 1:
        values |= {f"slo_attainment.{name}": share.met / share.requests if share.requests else math.nan for name, share in classes.items()}
    return Sample(values, classes)


def _classes(names: Sequence[str], rows: Mapping[str, np.ndarray], met: np.ndarray, asked: float) -> dict[str, ClassShare]:
    shares = {}
    for index, name in enumerate(names):
        mine = rows["class_index"] == index
        arrival_s, failed = rows["arrival_s"][mine], ~met[mine]
        burn = tuple(_worst_burn(arrival_s, failed, window_s, asked) for window_s in BURN_WINDOWS_S)
        shares[name] = ClassShare(int(mine.sum()), int(met[mine].sum()), burn)
    return shares


def _worst_burn(arrival_s: np.ndarray, failed: np.ndarray, window_s: float, asked: float) -> float:
    """Worst share of failures in any window, as a multiple of the share that ``asked`` allows (windows follow one another)."""
    if not len(arrival_s):
        return 0.0
    window = (arrival_s // window_s).astype(np.int64)
    requests = np.bincount(window)
    shares = np.bincount(window, weights=failed) / np.maximum(requests, 1)
    return float(shares.max()) / max(1 - asked, 1e-9)


def worse(compared: Metric, baseline: Sequence[float], candidate: Sequence[float]) -> np.ndarray:
    """Change of each pair in the harmful direction: the log of the ratio where relative, else the difference.

    Logs, because without a true change they are as often above zero as below; (new - old) / old is not: its mean is positive. A
    value of zero counts as a millionth of the metric's mean.
    """
    old, new = np.asarray(baseline, dtype=float), np.asarray(candidate, dtype=float)
    if not compared.relative:
        return compared.harm * (new - old)
    least = 1e-6 * (old.mean() + new.mean()) or 1.0
    return compared.harm * (np.log(np.maximum(new, least)) - np.log(np.maximum(old, least)))


def as_change(compared: Metric, change: float) -> float:
    """A change as ``worse`` gives it, or the mean of several, as people say it: a signed fraction, up is up."""
    signed = compared.harm * change + 0.0  # no negative zero
    return math.expm1(signed) if compared.relative else signed
