"""A release while it serves: some requests go to a candidate, and it is promoted or rolled back by what came of them.

Both variants are clusters with routers of their own, of as many replicas as the fleet has; together that many are in service. ``Split``
stands before them with the interface of one.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from serving import sequence
from serving.histogram import Histogram
from serving.request import Request
from serving.scenario.model import Scenario, Slo
from serving.scenario.rollout import Rollout, Stage
from sim.cluster import Cluster
from sim.environment import FAULT
from sim.outcomes import latencies
from sim.replica import Replica

ANSWERED = ("stop", "length")


class Split:
    """The baseline's cluster and the candidate's, on one environment, with the interface of a ``Cluster``."""

    def __init__(self, baseline: Cluster, candidate: Cluster) -> None:
        self.env = baseline.env
        self.baseline, self.candidate = baseline, candidate
        self.chooses: Callable[[Request], bool] = lambda request: False  # whether a request goes to the candidate
        baseline.watch()
        candidate.watch()

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, the baseline's first."""
        return [*self.baseline.replicas, *self.candidate.replicas]

    @property
    def provisioned(self) -> int:
        """Replicas that are paid for: a release changes what they run, not how many there are."""
        return len(self.baseline.replicas)

    @property
    def arrived(self) -> int:
        """Requests submitted so far."""
        return self.baseline.arrived + self.candidate.arrived

    @property
    def arrivals_end_s(self) -> float:
        """Time of the last arrival."""
        return max(self.baseline.arrivals_end_s, self.candidate.arrivals_end_s)

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not left."""
        return self.baseline.in_flight + self.candidate.in_flight

    @property
    def end_s(self) -> float:
        """Time of the last arrival or step."""
        return max(self.baseline.end_s, self.candidate.end_s)

    def submit(self, request: Request, output_tokens: int) -> int:
        """Route a request now, in the variant that is chosen for it."""
        return (self.candidate if self.chooses(request) else self.baseline).submit(request, output_tokens)

    def resubmit(self, request: Request, output_tokens: int) -> int:
        """Route a refused request again, by what is chosen for it now."""
        return (self.candidate if self.chooses(request) else self.baseline).resubmit(request, output_tokens)

    def abort(self, request_id: int, position: int) -> bool:
        """Drop a request that the replica at ``position`` has; False when it has left already."""
        cluster, index = self._variant_of(position)
        return cluster.abort(request_id, index)

    def takes(self, position: int) -> bool:
        """Whether the replica at ``position`` is in service."""
        cluster, index = self._variant_of(position)
        return cluster.signals.online(index)

    def _variant_of(self, position: int) -> tuple[Cluster, int]:
        first = len(self.baseline.replicas)
        return (self.baseline, position) if position < first else (self.candidate, position - first)

    def on_outcome(self, watcher: Callable[[int, float, str], None]) -> None:
        """Call ``watcher(request_id, time_s, status)`` when a request leaves, at that time."""
        self.baseline.on_outcome(watcher)
        self.candidate.on_outcome(watcher)

    def drain(self) -> None:
        """Nothing is left once the event queue is empty: every replica wakes itself."""


class Tally:
    """What the users of one variant saw."""

    def __init__(self) -> None:
        self.ttft, self.tpot = Histogram(), Histogram()
        self.outcomes = self.met = self.failed = 0

    def add(self, ttft_s: float, tpot_s: float | None, met: bool) -> None:
        """An answer."""
        self.outcomes += 1
        self.met += met
        self.ttft.add(np.array([ttft_s]))
        if tpot_s is not None:
            self.tpot.add(np.array([tpot_s]))

    def fail(self) -> None:
        """A request that was refused, or failed."""
        self.outcomes += 1
        self.failed += 1

    @property
    def attainment(self) -> float | None:
        """Share of the outcomes that met their objectives."""
        return self.met / self.outcomes if self.outcomes else None

    def report(self) -> dict[str, Any]:
        """For a summary."""
        return {
            "outcomes": self.outcomes, "failed": self.failed, "slo_attainment": self.attainment,
            "ttft_s": {key: self.ttft.summary()[key] for key in ("mean", "p50", "p99")},
            "tpot_s": {key: self.tpot.summary()[key] for key in ("mean", "p50", "p99")},
        }  # fmt: skip


class Release:
    """Moves requests from the baseline to the candidate, stage by stage, and back if it must."""

    def __init__(self, splits: Sequence[Split], spec: Rollout, slo: Slo, seed: int, reach: float = 1.0) -> None:
        """``splits``: one for each site that it touches. ``reach``: the share of the requests there that the release may touch at all."""
        self._splits, self._spec, self._slo, self._seed, self._reach = splits, spec, slo, seed, reach
        self._env = splits[0].env
        self._share = 0.0
        self._stages: Iterator[Stage] = iter(spec.all_stages())
        self._stage: Stage | None = None
        self._began_s = 0.0
        self._whole = {"baseline": Tally(), "candidate": Tally()}
        self._now = dict(self._whole)
        self._recent: deque[tuple[float, bool]] = deque()  # the candidate's latest outcomes, and whether each missed
        self._recent_misses = 0
        self._rows: list[dict[str, Any]] = []
        self.outcome, self.reason, self.ended_s = "unfinished", "", math.nan
        for split in splits:
            split.chooses = self._chooses
            self._listen("baseline", split.baseline)
            self._listen("candidate", split.candidate)
        self._give(0.0)
        self._env.at(float(spec.warmup_s), lambda event: self._next(), FAULT)

    def _chooses(self, request: Request) -> bool:
        """Requests of a session stay together, and those that had the candidate keep it as the share grows."""
        spec = self._spec
        if (spec.tenants and request.tenant not in spec.tenants) or (spec.classes and request.class_name not in spec.classes):
            return False
        who = request.request_id if request.session is None else f"session {request.session}"
        return zlib.crc32(f"{self._seed} {who}".encode()) < self._share * 2**32

    # -- what comes back ------------------------------------------------------------------------------------------------

    def _listen(self, name: str, cluster: Cluster) -> None:
        def left(seq: sequence.Sequence, now_s: float, status: str) -> None:
            if status not in ANSWERED:
                self._failed(name, now_s)
                return
            seen = latencies(seq, now_s)
            met = seen.meet(self._slo.targets(seq.request.class_name))
            for tally in self._tallies(name):
                tally.add(seen.ttft_s, seen.tpot_s, met)
            self._note(name, now_s, not met)

        for replica in cluster.replicas:
            replica.on_record = left
        cluster.on_outcome(lambda request_id, now_s, status: self._failed(name, now_s) if status.startswith("rejected") else None)

    def _tallies(self, name: str) -> list[Tally]:
        whole, now = self._whole[name], self._now[name]
        return [whole] if now is whole else [whole, now]

    def _failed(self, name: str, now_s: float) -> None:
        for tally in self._tallies(name):
            tally.fail()
        self._note(name, now_s, True)

    def _note(self, name: str, now_s: float, missed: bool) -> None:
        """Roll back at once if the candidate burns its error budget and the baseline does not."""
        if name != "candidate" or self._stage is None:
            return
        recent, spec = self._recent, self._spec
        recent.append((now_s, missed))
        self._recent_misses += missed
        while recent[0][0] < now_s - spec.burn_window_s:
            self._recent_misses -= recent.popleft()[1]
        share = self._recent_misses / len(recent)
        baseline = self._now["baseline"].attainment
        if len(recent) >= spec.least and share > max(spec.burn * (1 - self._slo.attainment), 1 - (1.0 if baseline is None else baseline)):
            self._end_stage(f"{share:.1%} of the last {len(recent)} outcomes missed their objectives", passed=False)

    # -- stages ---------------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        self._stage = stage = next(self._stages, None)
        if stage is None:
            self._give(1.0)
            self.outcome, self.ended_s = "promoted", self._env.now
            return
        self._give(stage.share)
        self._began_s = self._env.now
        self._now = {"baseline": Tally(), "candidate": Tally()}
        self._env.at(self._env.now + stage.for_s, lambda event: self._judge(stage), FAULT)

    def _judge(self, stage: Stage) -> None:
        if self._stage is stage:
            problem = self._problem(stage)
            self._end_stage(problem or "", passed=problem is None)

    def _end_stage(self, reason: str, passed: bool) -> None:
        stage, self._stage = self._stage, None
        self._rows.append(
            {
                "name": stage.name, "check": stage.check, "share": stage.share, "from_s": self._began_s, "to_s": self._env.now, "passed": passed,
                "reason": reason, **{name: tally.report() for name, tally in self._now.items()},
            }
        )  # fmt: skip
        if passed:
            self._next()
        else:
            self._give(0.0)
            self.outcome, self.reason, self.ended_s = "rolled_back", f"{stage.name}: {reason}", self._env.now

    def _give(self, share: float) -> None:
        """Let the candidate have ``share`` of the requests it may have, and the replicas that this takes."""
        self._share = share
        for split in self._splits:
            replicas, part = len(split.baseline.replicas), share * self._reach
            mine = round(part * replicas) if part in (0.0, 1.0) else max(1, min(round(part * replicas), replicas - 1))
            others = replicas - mine if part in (0.0, 1.0) else max(1, replicas - mine)
            for cluster, count in ((split.candidate, mine), (split.baseline, others)):
                for replica in cluster.replicas:
                    cluster.set_online(replica.index, replica.index < count)

    def _problem(self, stage: Stage) -> str | None:
        """Why the release must not go on; None when it may."""
        mine, base, gates = self._now["candidate"], self._now["baseline"], self._spec.gates
        least = 1 if stage.check == "probe" else self._spec.least
        allowed = 0.0 if stage.check == "probe" else gates.failure_share
        if mine.failed > allowed * mine.outcomes:
            return f"{mine.failed} of {mine.outcomes} failed or were refused"
        if mine.outcomes < least:
            return f"{mine.outcomes} outcomes are too few, {least} are needed"
        if stage.check == "smoke" and mine.attainment < self._slo.attainment:
            return f"{mine.attainment:.2%} met their objectives, {self._slo.attainment:.2%} are asked"
        return self._compare(mine, base) if stage.check == "compare" else None

    def _compare(self, mine: Tally, base: Tally) -> str | None:
        gates = self._spec.gates
        if base.outcomes < self._spec.least:
            return f"the baseline's {base.outcomes} outcomes are too few to compare with"
        if mine.attainment < base.attainment - gates.attainment_drop:
            return f"{mine.attainment:.2%} met their objectives, {base.attainment:.2%} with the baseline"
        for name, limit in (("ttft", gates.ttft_p99_ratio), ("tpot", gates.tpot_p99_ratio)):
            ours, theirs = (getattr(tally, name).summary()["p99"] for tally in (mine, base))
            if ours is not None and theirs and ours > limit * theirs:
                return f"{name.upper()} p99 is {ours / theirs:.2f} times the baseline's, {limit:g} are allowed"
        return None

    def report(self) -> dict[str, Any]:
        """The ``rollout`` part of summary.json."""
        return {
            "outcome": self.outcome, "reason": self.reason, "ended_s": None if math.isnan(self.ended_s) else self.ended_s, "stages": self._rows,
            "variants": {name: tally.report() for name, tally in self._whole.items()},
        }  # fmt: skip


def reach(scenario: Scenario) -> float:
    """Share of all requests that the scenario's release may touch; what a trace brings is taken to be touched entirely."""
    spec, workload = scenario.rollout, scenario.workload
    share = 1.0
    for wanted, rows in ((spec.tenants, workload.tenants), (spec.classes, workload.classes)):
        total = sum(row.share for row in rows)
        if wanted and total:
            share *= sum(row.share for row in rows if row.name in wanted) / total
    return share
