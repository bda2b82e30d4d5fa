"""The gate: which metrics of which scenarios got worse, by enough and for certain.

A metric has regressed when three things hold: the mean paired change is at least ``effect``; Holm's corrected one-sided
p-value, over all metrics of all scenarios of the suite, is below ``alpha``; and the bootstrap interval of the mean paired
change lies above zero. The first keeps certain trifles out, the second and third large but uncertain changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serving.rng import stream
from validate import stats
from validate.regress.measure import BURN_WINDOWS_S, Sample, metric, worse

EFFECT, ALPHA = 0.01, 0.01
RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Verdict:
    """One metric of one scenario. ``change``, as ``measure.worse`` gives it, is positive where the candidate is worse; with its interval."""

    scenario: str
    metric: str
    baseline: float
    candidate: float
    change: stats.Interval
    p: float
    verdict: str  # regressed, improved, unchanged or undecided
    required: int  # replications that would settle a change of ``effect``, by the spread seen

    @property
    def regressed(self) -> bool:
        return self.verdict == "regressed"


@dataclass(frozen=True, slots=True)
class Objective:
    """A class against the SLO: attained shares, burn rates (1: exactly what the SLO allows fails) overall and in the worst windows."""

    scenario: str
    class_name: str
    asked: float
    baseline: float
    candidate: float
    burn_baseline: tuple[float, ...]
    burn_candidate: tuple[float, ...]

    @property
    def verdict(self) -> str:
        """``met``, ``missed`` by both, ``mended``, or ``broken``: met by the baseline only."""
        held, holds = self.baseline >= self.asked, self.candidate >= self.asked
        return {(True, True): "met", (False, False): "missed", (False, True): "mended", (True, False): "broken"}[held, holds]


Pairs = Mapping[str, tuple[Sequence[Sample], Sequence[Sample]]]  # scenario -> samples of the baseline and of the candidate


Changes = dict[tuple[str, str], np.ndarray]  # (scenario, metric) -> paired changes, positive where worse


def changes_of(pairs: Pairs) -> Changes:
    """Paired changes of every metric of every scenario. Metrics without a value in some replication are left out."""
    changes: Changes = {}
    for scenario, (old, new) in pairs.items():
        for name in old[0].values if old else ():
            both = np.array([[each.values.get(name, np.nan) for each in side] for side in (old, new)])
            if np.isfinite(both).all():
                changes[scenario, name] = worse(metric(name), both[0], both[1])
    return changes


def regressed(changes: Changes, *, effect: float = EFFECT, alpha: float = ALPHA, seed: int = 0) -> list[tuple[str, str]]:
    """The metrics that the gate stops, without the figures of the others."""
    decisions = stats.gate({"/".join(key): change for key, change in changes.items()}, effect=effect, alpha=alpha)
    suspects = [key for key, decision in zip(changes, decisions) if decision.verdict == "regressed"]
    return [key for key in suspects if bootstrap(changes[key], alpha, seed, "/".join(key)).low > 0]


def decide(pairs: Pairs, *, effect: float = EFFECT, alpha: float = ALPHA, seed: int = 0) -> list[Verdict]:
    """Judge every metric of every scenario together."""
    changes = changes_of(pairs)
    decisions = stats.gate({"/".join(key): change for key, change in changes.items()}, effect=effect, alpha=alpha)
    return [_verdict(key, pairs[key[0]], changes[key], decision, effect, alpha, seed) for key, decision in zip(changes, decisions)]


def _verdict(
    key: tuple[str, str], both: tuple[Sequence[Sample], Sequence[Sample]], change: np.ndarray, decision: stats.Decision, effect: float,
    alpha: float, seed: int,
) -> Verdict:  # fmt: skip
    scenario, name = key
    interval = bootstrap(change, alpha, seed, "/".join(key))
    verdict = decision.verdict
    if (verdict == "regressed" and interval.low <= 0) or (verdict == "improved" and interval.high >= 0):
        verdict = "undecided"
    elif verdict in ("unchanged", "undecided"):
        verdict = "unchanged" if max(-interval.low, interval.high) < effect else "undecided"
    required = stats.required_replications(change, effect, alpha=alpha) if verdict == "undecided" else len(change)
    old, new = (float(np.mean([each.values[name] for each in side])) for side in both)
    return Verdict(scenario, name, old, new, interval, decision.p, verdict, required)


def bootstrap(change: np.ndarray, alpha: float, seed: int, name: str) -> stats.Interval:
    """Interval of the mean of paired changes at level 1 - 2 alpha, the same for the same seed and name."""
    if not change.any():
        return stats.Interval(0.0, 0.0, 0.0, 1 - 2 * alpha)
    return stats.bootstrap_interval(change, rng=stream(seed, f"regress.{name}"), level=1 - 2 * alpha, resamples=RESAMPLES)


def objectives(pairs: Pairs, asked: Mapping[str, float]) -> list[Objective]:
    """The SLO table: every class of every scenario, over all replications; ``asked`` is the attainment by scenario."""
    table = []
    for scenario, (old, new) in pairs.items():
        names = list(dict.fromkeys(name for each in (*old, *new) for name in each.classes))
        for name in names:
            (held, burned), (holds, burns) = (_attained(side, name, asked[scenario]) for side in (old, new))
            table.append(Objective(scenario, name, asked[scenario], held, holds, burned, burns))
    return table


def _attained(side: Sequence[Sample], name: str, asked: float) -> tuple[float, tuple[float, ...]]:
    shares = [each.classes[name] for each in side if name in each.classes]
    requests = sum(share.requests for share in shares)
    attained = sum(share.met for share in shares) / requests if requests else 1.0
    worst = (max((share.burn[i] for share in shares), default=0.0) for i in range(len(BURN_WINDOWS_S)))
    return attained, ((1 - attained) / max(1 - asked, 1e-9), *worst)
