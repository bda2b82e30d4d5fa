"""The comparison: every scenario of a suite, replication by replication, once with each side's policies and the same requests."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from serving import scenario
from serving.errors import InputError
from validate.regress import gate
from validate.regress.choice import Choice, apply, concerns
from validate.regress.drive import Fault, OutOfTimeError, drive, fault_of, time_limit
from validate.regress.measure import Sample, sample
from validate.regress.properties import Finding, broken_by_baseline, check_properties
from validate.regress.suite import Suite
from validate.regress.workers import Call, Lost, Workers

BASELINE, CANDIDATE = "baseline", "candidate"
REPLICATIONS = 24
AUDIT_SHARE = 0.02  # of the steps that a policy's promise let the simulator skip
LIMIT_S = 15.0  # CPU seconds of one replication
_GRACE = 10.0  # a call may take this many times its limit by the clock: the machine may be busy


@dataclass(frozen=True, slots=True)
class Failure:
    """A side's run that has no result; ``fault`` says what its policy did."""

    scenario: str
    side: str
    policy: str
    replication: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class Settings:
    """How a comparison is made. ``effect`` and ``alpha`` as in the gate."""

    replications: int = REPLICATIONS
    jobs: int = 2
    effect: float = gate.EFFECT
    alpha: float = gate.ALPHA
    audit: float = AUDIT_SHARE
    limit_s: float = LIMIT_S


@dataclass(slots=True)
class Report:
    """All that a comparison found."""

    suite: str
    baseline: list[Choice]
    candidate: list[Choice]
    settings: Settings
    verdicts: list[gate.Verdict] = field(default_factory=list)
    objectives: list[gate.Objective] = field(default_factory=list)
    properties: list[Finding] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def regressed(self) -> bool:
        """Whether the candidate is worse in a metric, breaks a property, or failed to run."""
        failed = any(failure.side == CANDIDATE for failure in self.failures)
        return failed or any(each.regressed for each in self.verdicts) or any(each.broken for each in self.properties)


Progress = Callable[[int, int], None]


def compare(suite: Suite, baseline: list[Choice], candidate: list[Choice], settings: Settings, progress: Progress | None = None) -> Report:
    """Run the whole suite. Raises InputError for what is wrong with it or with a policy's name, file or options."""
    for choice in candidate:
        if not any(concerns(member.raw, choice.kind) for member in suite.members):
            raise InputError("SUITE", f"no scenario of '{suite.name}' has a {choice.kind} policy to replace")
    report = Report(suite.name, baseline, candidate, settings)
    sides = {BASELINE: baseline, CANDIDATE: candidate}
    with Workers(settings.jobs, settings.limit_s * _GRACE) as workers:
        report.properties = check_properties(workers, candidate)
        samples = dict(_replicate(workers, suite, sides, report, progress))
        if any(finding.broken for finding in report.properties):
            report.properties = broken_by_baseline(workers, report.properties, baseline)
    pairs = {}
    for member in suite.members:
        both = [[samples.get((member.name, side, index)) for index in range(settings.replications)] for side in sides]
        if all(each is not None for side in both for each in side):
            pairs[member.name] = (both[0], both[1])
    report.verdicts = gate.decide(pairs, effect=settings.effect, alpha=settings.alpha)
    report.objectives = gate.objectives(pairs, {member.name: member.attainment for member in suite.members})
    return report


def _replicate(
    workers: Workers, suite: Suite, sides: dict[str, list[Choice]], report: Report, progress: Progress | None
) -> Iterator[tuple[tuple[str, str, int], Sample]]:
    """Yield the samples; a side that fails in a scenario is run there once and named in ``report.failures``."""
    settings, members = report.settings, {member.name: member for member in suite.members}
    waves = [[(member.name, side, index) for member in suite.members for side in sides] for index in range(settings.replications)]
    total, done, failed = len(waves) * len(waves[0]), 0, set()
    for wave in (waves[0], [key for later in waves[1:] for key in later]):
        keys = [key for key in wave if key[:2] not in failed and (key[0], BASELINE) not in failed and (key[0], CANDIDATE) not in failed]
        calls = [_call(members[name], sides, side, index, settings) for name, side, index in keys]
        done += len(wave) - len(keys)
        for position, answer in workers.run(calls):
            key, done = keys[position], done + 1
            if progress is not None:
                progress(done, total)
            if isinstance(answer, Sample):
                yield key, answer
                continue
            fault = Fault(None, "must decide in finite time", answer.reason) if isinstance(answer, Lost) else answer
            if key[:2] not in failed:
                failed.add(key[:2])
                report.failures.append(Failure(key[0], key[1], " and ".join(map(str, sides[key[1]])), key[2], fault))
    report.failures.sort(key=lambda failure: (failure.scenario, failure.side))


def _call(member: Any, sides: dict[str, list[Choice]], side: str, index: int, settings: Settings) -> Call:
    audit = settings.audit if side == CANDIDATE else 0.0
    return replicate, (json.dumps(member.raw, sort_keys=True), apply(member.raw, sides[side]), member.seed(index), audit, settings.limit_s)


def replicate(offered: str, raw: dict[str, Any], seed: int, audit: float, limit_s: float) -> Sample | Fault:
    """One replication, in a worker process. ``offered`` is the scenario as it was written, JSON: load factors are of its own policies."""
    try:
        with time_limit(limit_s):
            loaded = scenario.from_mapping(raw, seed=seed)
            driven = drive(loaded, audit=audit, saturation_rps=functools.partial(_saturation_rps, offered))
            return sample(driven, loaded.slo, loaded.measure.warmup_s, loaded.measure.cooldown_s)
    except InputError:
        raise
    except (Exception, OutOfTimeError) as error:
        return fault_of(error, limit_s)


@functools.lru_cache(maxsize=64)
def _saturation_rps(offered: str) -> float | None:
    from sim.fleet import resolve_fleet
    from sim.saturation import saturated_fleet_rps

    return saturated_fleet_rps(resolve_fleet(scenario.from_mapping(json.loads(offered))))
