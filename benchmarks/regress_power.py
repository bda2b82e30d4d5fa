"""What the gate of ``twinserve regress`` sees, and how often it cries wolf: an offline experiment on the default suite.

    python -m benchmarks.regress_power --pool 64                      # about 8 CPU minutes
    python -m benchmarks.regress_power --pool 9600 --independent      # hours: no two trials share a pair

Power: all step times of one scenario are multiplied by a factor, found such that the long-run p99 of TTFT (over all requests of a
pool of replications) moves by 2 %; a trial draws as many pairs as the suite uses and asks whether *that metric* is stopped, after
Holm's correction over all metrics of all scenarios. Any stop is counted beside it: a slower step also shows elsewhere.

False alarms: candidates without a true change. ``jitter``: every step is longer or shorter by up to 2 % at random, so that runs
drift apart as those of another implementation would. ``unpaired``: the same policy with other seeds, the noisiest there is.

Trials draw their pairs from a pool with replacement (without, trials would differ less than new ones do) and so share pairs; the
interval printed (Clopper-Pearson) treats them as independent. With ``--pool`` of trials x replications and ``--independent`` they are.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving import scenario
from serving.rng import stream
from validate.regress import gate
from validate.regress.drive import drive
from validate.regress.measure import Sample, sample
from validate.regress.run import REPLICATIONS
from validate.regress.suite import Member, load_suite
from validate.regress.workers import Workers

TRUE_CHANGE, TOLERANCE = 0.02, 0.001
JITTER = 0.02
KEY = "ttft_p99_s"


class Steps:
    """A latency model whose steps all take ``factor`` times as long, each up to ``jitter`` more or less, at random."""

    def __init__(self, latency: Any, factor: float, jitter: float, rng: np.random.Generator) -> None:
        self._latency, self._factor, self._jitter, self._rng = latency, factor, jitter, rng

    def step_s(self, shape: Any) -> float:
        """One step."""
        return self._latency.step_s(shape) * self._scale()

    def run_s(self, shape: Any, steps: int) -> list[float]:
        """Successive decode steps."""
        durations = self._latency.run_s(shape, steps)
        if not self._jitter:
            return [each * self._factor for each in durations]
        return (np.asarray(durations) * self._factor * (1 + self._jitter * (2 * self._rng.random(steps) - 1))).tolist()

    def _scale(self) -> float:
        return self._factor * (1 + self._jitter * (2 * self._rng.random() - 1)) if self._jitter else self._factor


def one(raw: dict[str, Any], seed: int, factor: float, jitter: float) -> tuple[Sample, np.ndarray]:
    """One replication, in a worker: what the gate sees of it, and every TTFT."""
    loaded = scenario.from_mapping(raw, seed=seed)
    noise = stream(seed, "regress_power.jitter")
    driven = drive(loaded, wrap=lambda latency: Steps(latency, factor, jitter, noise))
    rows = driven.columns
    return sample(driven, loaded.slo, 0.0, 0.0), (rows["first_token_s"] - rows["arrival_s"]).astype(np.float32)


@dataclass
class Pool:
    """Replications of one scenario under one step-time factor."""

    samples: list[Sample]
    ttft_s: list[np.ndarray]

    def p99_s(self) -> float:
        """Long-run p99 of TTFT: over all requests of all replications."""
        return float(np.quantile(np.concatenate(self.ttft_s), 0.99))


def pool(workers: Workers, member: Member, size: int, factor: float = 1.0, jitter: float = 0.0) -> Pool:
    """Run ``size`` replications."""
    calls = [(one, (member.raw, member.seed(index), factor, jitter)) for index in range(size)]
    answers = dict(workers.run(calls))
    return Pool([answers[index][0] for index in range(size)], [answers[index][1] for index in range(size)])


def slowed(workers: Workers, member: Member, base: Pool) -> tuple[float, float, Pool]:
    """Find the factor that moves the long-run p99 by TRUE_CHANGE; returns it, the change it makes, and its pool."""
    excess = TRUE_CHANGE / 2
    while True:
        slow = pool(workers, member, len(base.samples), 1 + excess)
        change = slow.p99_s() / base.p99_s() - 1
        print(f"  steps x {1 + excess:.5f} move the long-run p99 by {change:+.3%}", file=sys.stderr)
        if abs(change - TRUE_CHANGE) <= TOLERANCE:
            return 1 + excess, change, slow
        excess *= min(2.0, max(0.5, TRUE_CHANGE / change)) if change > 0 else 2.0


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Clopper-Pearson interval of a proportion at level 0.95."""
    from scipy.stats import beta

    low = float(beta.ppf(0.025, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, trials - hits)) if hits < trials else 1.0
    return low, high


def told(label: str, hits: int, trials: int) -> str:
    """One line of the result."""
    low, high = interval(hits, trials)
    return f"{label:52} {hits:4} of {trials} = {hits / trials:6.1%}  [{low:.1%}, {high:.1%}]"


class Trials:
    """Suites drawn from pools: the baseline's, and for each scenario a candidate's."""

    def __init__(self, base: dict[str, Pool], pairs: int, trials: int, independent: bool) -> None:
        self._base, self._pairs, self._trials, self._independent = base, pairs, trials, independent

    def count(self, candidate: dict[str, Pool], target: str | None = None, *, unpaired: bool = False) -> tuple[int, int]:
        """In how many trials the metric of scenario ``target``, and in how many anything, is stopped."""
        rng = stream(0, f"regress_power.trials.{target}")
        metric_hits = suite_hits = 0
        for trial in range(self._trials):
            pairs = {}
            for name, base in self._base.items():
                size = len(base.samples)
                own = np.arange(trial * self._pairs, (trial + 1) * self._pairs)
                drawn = own if self._independent else rng.integers(0, size, self._pairs)
                other = (drawn + rng.integers(1, size, self._pairs)) % size if unpaired else drawn
                pairs[name] = ([base.samples[i] for i in drawn], [candidate[name].samples[i] for i in other])
            stopped = gate.regressed(gate.changes_of(pairs), seed=trial)
            suite_hits += bool(stopped)
            metric_hits += (target, KEY) in stopped
        return metric_hits, suite_hits


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment and print its figures; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=int, default=64, help="replications of each scenario and kind")
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=REPLICATIONS, help="replications of a trial: what the suite uses")
    parser.add_argument("--suite", default="default")
    parser.add_argument("--targets", default="", help="scenarios to slow down, by commas; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--independent", action="store_true", help="no two trials share a pair: needs a pool of trials x pairs")
    options = parser.parse_args(arguments)
    if options.independent and options.pool < options.trials * options.pairs:
        parser.error("--independent needs --pool of at least trials x pairs")
    members = load_suite(options.suite).members
    targets = [each for each in options.targets.split(",") if each] or [member.name for member in members]
    began_s = time.monotonic()
    size = f"{options.pairs} pairs a scenario, {options.trials} trials, pools of {options.pool} replications"
    print(f"suite {options.suite}, {size}", flush=True)
    missed = False
    with Workers(options.jobs, 600.0) as workers:
        base = {member.name: pool(workers, member, options.pool) for member in members}
        still = {member.name: pool(workers, member, options.pool, jitter=JITTER) for member in members}
        trials = Trials(base, options.pairs, options.trials, options.independent)
        for label, candidate, unpaired in (("jitter", still, False), ("unpaired", base, True)):
            _, alarms = trials.count(candidate, unpaired=unpaired)
            missed |= alarms > 0.01 * options.trials
            print(told(f"false alarms of suites, {label}", alarms, options.trials), flush=True)
        for member in members:
            if member.name in targets:
                factor, change, slow = slowed(workers, member, base[member.name])
                seen, anything = trials.count({**still, member.name: slow}, member.name)
                missed |= seen < 0.95 * options.trials
                print(f"{member.name}: steps x {factor:.5f}, long-run p99 TTFT {change:+.2%}")
                print(told("  its p99 TTFT is stopped", seen, options.trials))
                print(told("  anything is stopped", anything, options.trials), flush=True)
    spent = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = sum(each.ru_utime + each.ru_stime for each in spent)
    print(f"{time.monotonic() - began_s:.0f} s by the clock, {cpu_s:.0f} CPU seconds", file=sys.stderr)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
