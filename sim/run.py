"""One simulation from a scenario to its summary and run directory."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serving.clients import OpenLoop, start_clients
from serving.errors import InputError
from serving.metrics import FleetTotals, Metrics
from serving.recording import Recording
from serving.records import RunWriter
from serving.request import Arrival
from serving.rng import stream
from serving.scenario import Scenario
from sim.attach import Dynamics, attach
from sim.bottleneck import Fleet, fleet_of
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.drafts import draft_report
from sim.fleet import Parts, build_fleet, compile_report, new_metrics, resolve_fleet, tier_report
from sim.held_weights import adapter_report
from sim.retries import Retries
from sim.rollout import Release, Split, reach
from sim.saturation import saturated_fleet_rps
from sim.sites import SiteFleet
from sim.stages import Front, longest_request

AnyCluster = Cluster | Disaggregated | Split | SiteFleet
Progress = Callable[[int, int | None], None]
Stop = Callable[[Metrics], bool]
_PROGRESS_EVERY = 1024  # arrivals
_STOP_EVERY = 256


@dataclass(frozen=True, slots=True)
class RunResult:
    """``summary`` is the contents of summary.json; ``partial`` marks a run that was interrupted."""

    summary: dict[str, Any]
    fleet: Fleet
    partial: bool
    skipped: dict[str, int] = field(default_factory=dict)  # trace rows left out, by reason


def simulate(
    scenario: Scenario,
    *,
    out: Path | None = None,
    records: bool = True,
    plans: bool = False,
    stepwise: bool = False,
    audit: float = 0.0,
    progress: Progress | None = None,
    arrivals: Iterable[Arrival] | None = None,
    stop: Stop | None = None,
    saturated_rps: float | None = None,
) -> RunResult:
    """Run ``scenario`` to its end and return what its users saw; with ``out``, also write the run directory.

    ``records`` keeps tables of requests and steps (only with ``out``); ``plans`` adds every decision. ``stepwise`` takes one event
    per step and changes no result. ``audit`` is the fraction of skipped steps that are planned again to check the batching
    policy's promises. Ctrl-C ends the run early: the result is then ``partial`` and its directory marked so. Raises InputError
    for whatever is wrong with the scenario, before anything is written.

    For studies: ``arrivals`` replaces the workload's own (in order of time), ``stop`` is asked every few hundred arrivals whether
    the answer is known already (the result is then ``partial``), ``saturated_rps`` is the fleet's if it was measured before.
    """
    parts = resolve_fleet(scenario)
    records = records and out is not None
    metrics = new_metrics(scenario, keep_rows=records)
    saturation = _Saturation(parts, saturated_rps)
    skipped: dict[str, int] = {}
    with _writer(out, records, plans, scenario) as writer:
        stage_log = None if writer is None else writer.stages
        cluster = build_fleet(scenario, parts, metrics, stepwise=stepwise, audit=audit, recording=_recording(writer, parts), stage_log=stage_log)
        dynamics = attach(cluster, scenario, parts, metrics)
        front = Front(cluster, scenario, metrics, stage_log) if scenario.front else cluster
        _start(
            front, arrivals, workload=scenario.workload, seed=scenario.seed, block_tokens=scenario.kv_cache.block_tokens, saturation_rps=saturation,
            max_model_len=longest_request(scenario, parts), prefix_caching=scenario.kv_cache.prefix_caching,
            slo=scenario.slo, skipped=skipped,
        )  # fmt: skip
        retry = scenario.workload.retry
        retries = None if retry is None else Retries(cluster, retry, stream(scenario.seed, "retries"))
        splits = cluster.splits() if isinstance(cluster, SiteFleet) else [cluster]
        release = None if scenario.rollout is None else Release(splits, scenario.rollout, scenario.slo, scenario.seed, reach(scenario))
        partial = not _run_to_end(front, scenario, progress, stop and (lambda: stop(metrics)))
        load_factor = _load_factor(cluster, scenario, saturation, dynamics)
        totals = _totals(front, parts, dynamics, 0 if retries is None else retries.waiting)
        summary = metrics.summary(scenario=scenario.name, seed=scenario.seed, totals=totals, load_factor=load_factor)
        summary |= _parts_of_summary(scenario, parts, cluster, dynamics, retries, release)
        if front is not cluster:
            summary["stages"] = front.report()
            done_s = front.done_s()
            summary |= {} if done_s is None else {"done_s": done_s}
        if writer is not None:
            writer.publish(
                scenario=scenario.resolved(), seed=scenario.seed, device=_device(parts), summary=summary,
                requests=metrics.columns() if records else None, class_names=metrics.class_names, partial=partial, latency=_provenance(parts),
            )  # fmt: skip
    return RunResult(summary, _fleet(scenario, parts, len(cluster.replicas)), partial, skipped)


def _parts_of_summary(
    scenario: Scenario, parts: dict[str, Parts], cluster: AnyCluster, dynamics: Dynamics | None, retries: Retries | None, release: Release | None
) -> dict[str, Any]:
    """What a summary says only of scenarios that ask for it."""
    extra: dict[str, Any] = {}
    if scenario.kv_cache.tiers:
        extra["kv_tiers"] = tier_report(cluster.replicas)
    if scenario.compilation is not None:
        extra["compilation"] = compile_report(cluster.replicas)
    if scenario.speculation is not None:
        extra["speculation"] = draft_report(replica.drafts for replica in cluster.replicas)
    if scenario.cluster.ingress is not None:
        extra["ingress"] = cluster.signals.delivery.report()
    if scenario.retention is not None:
        extra["retention"] = {"dropped_blocks": sum(replica.scheduler.dropped_blocks for replica in cluster.replicas)}
    if scenario.adapters is not None:
        extra["adapters"] = adapter_report(cluster.replicas, parts["replicas"].latency)
    if retries is not None:
        extra["back_pressure"] = retries.report()
    if isinstance(cluster, Cluster) and hasattr(cluster.routing, "report"):
        extra |= cluster.routing.report()
    if isinstance(cluster, SiteFleet):
        extra["sites"] = cluster.report()
    if dynamics is not None:
        extra["fleet"] = dynamics.report(cluster.end_s)
    if release is not None:
        extra["rollout"] = release.report()
    return extra


def _recording(writer: RunWriter | None, parts: dict[str, Parts]) -> Recording | None:
    if writer is None or (writer.steps is None and writer.plans is None):
        return None
    return Recording(writer.steps, writer.plans, getattr(next(iter(parts.values())).latency, "path", None))


def _provenance(parts: dict[str, Parts]) -> dict[str, Any]:
    """Where each kind of replica's step times come from, for the latency models that know."""
    return {role: {"name": part.scenario.latency.name, **part.latency.provenance()} for role, part in parts.items() if hasattr(part.latency, "provenance")}


def _device(parts: dict[str, Parts]) -> str:
    return "simulated " + " + ".join(dict.fromkeys(part.gpu.name for part in parts.values()))


def _fleet(scenario: Scenario, parts: dict[str, Parts], replicas: int) -> Fleet:
    first = next(iter(parts.values()))
    kv_tokens = first.capacity.usable_blocks * scenario.kv_cache.block_tokens
    return replace(fleet_of(scenario, first.llm, first.gpu, kv_tokens=kv_tokens), replicas=replicas)


@contextlib.contextmanager
def _writer(out: Path | None, records: bool, plans: bool, scenario: Scenario) -> Iterator[RunWriter | None]:
    if out is None:
        yield None
        return
    with RunWriter(out, steps=records, plans=plans, stages=records and bool(scenario.front or scenario.sites)) as writer:
        yield writer


def _start(cluster: AnyCluster | Front, arrivals: Iterable[Arrival] | None, **arguments: Any) -> None:
    if arrivals is None:
        start_clients(cluster, **arguments)
    else:
        OpenLoop(cluster, iter(arrivals))


class _Saturation:
    """The saturated rate, measured at most once and only if somebody asks."""

    def __init__(self, parts: dict[str, Parts], known: float | None) -> None:
        self._parts = parts
        self._measured: list[float | None] = [] if known is None else [known]

    def __call__(self) -> float:
        """Requests per second of the whole fleet; InputError when the workload is too small to tell."""
        rate = self.rate()
        if rate is None:
            raise InputError("workload", "has too few requests to measure what saturates it", "give rate_rps instead of load_factor")
        return rate

    def rate(self) -> float | None:
        """The same, or None."""
        if not self._measured:
            self._measured.append(saturated_fleet_rps(self._parts))
        return self._measured[0]


def _run_to_end(cluster: AnyCluster | Front, scenario: Scenario, progress: Progress | None, stop: Callable[[], bool] | None) -> bool:
    """Run until nothing is left to do; False when interrupted or stopped."""
    try:
        if progress is None and stop is None:
            cluster.env.run()
        elif not _run_watched(cluster, scenario.workload.requests, progress, stop):
            return False
        cluster.drain()
    except KeyboardInterrupt:
        return False
    return True


def _run_watched(cluster: AnyCluster | Front, expected: int | None, progress: Progress | None, stop: Callable[[], bool] | None) -> bool:
    """As ``env.run``, telling every so many events how far it is, or asking whether to go on; False when stopped."""
    step, queue = cluster.env.step, cluster.env._queue
    every = _PROGRESS_EVERY if stop is None else _STOP_EVERY
    while queue:
        for _ in range(every):
            step()
            if not queue:
                break
        if progress is not None:
            progress(cluster.arrived, expected)
        if stop is not None and stop():
            return False
    return True


def _totals(cluster: AnyCluster | Front, parts: dict[str, Parts], dynamics: Dynamics | None, away: int) -> FleetTotals:
    replicas = cluster.replicas
    end_s = cluster.end_s
    gpus = {role: part.gpus if dynamics is None or not end_s else _mean_gpus(part, role, dynamics, end_s) for role, part in parts.items()}
    there = getattr(cluster, "provisioned", len(replicas))
    provisioned = there if dynamics is None or not end_s else dynamics.provisioned_s(end_s) / end_s
    share = provisioned / len(replicas)  # of all that there could be
    prices = [part.gpu.price_usd_per_h for part in parts.values()]
    return FleetTotals(
        duration_s=end_s,
        replicas=provisioned,
        gpus=sum(gpus.values()),
        gpu_usd_per_h=None if None in prices else sum(map(operator.mul, gpus.values(), prices)) / sum(gpus.values()),
        busy_s=sum(replica.busy_until(end_s) for replica in replicas),
        steps=sum(replica.steps for replica in replicas),
        events=cluster.arrived + sum(replica.runs for replica in replicas),
        kv_blocks=share * sum(replica.scheduler.pool.total for replica in replicas),
        kv_block_seconds=sum(replica.pages.block_seconds for replica in replicas),
        kv_max_fraction=max(replica.pages.max_blocks / replica.scheduler.pool.total for replica in replicas),
        preemptions=sum(replica.preemptions for replica in replicas),
        prompt_tokens=sum(replica.prompt_tokens for replica in replicas),
        cached_tokens=sum(replica.cached_tokens for replica in replicas),
        in_flight=cluster.in_flight + away,
    )


def _mean_gpus(part: Parts, role: str, dynamics: Dynamics, end_s: float) -> float:
    """GPUs of one kind of replica that were paid on average."""
    return part.layout.gpus * dynamics.provisioned_s(end_s, role) / end_s


def _load_factor(cluster: AnyCluster, scenario: Scenario, saturation: _Saturation, dynamics: Dynamics | None) -> float | None:
    """Offered over saturated throughput, of the replicas provisioned on average; None where arrivals wait for answers or a release changes it."""
    from serving.workload import follows_answers

    if scenario.sites is not None or scenario.front:  # what limits them depends on who goes where, or is no replica at all
        return None
    if any(pool.autoscaling is not None for pool in scenario.cluster.pools):  # which of the pools limits it changes as they do
        return None
    if cluster.arrivals_end_s <= 0 or scenario.rollout is not None or follows_answers(scenario.workload):
        return None
    saturated = saturation.rate()
    if not saturated:
        return None
    share = 1.0 if dynamics is None else dynamics.provisioned_s(cluster.end_s) / cluster.end_s / dynamics.ready
    return cluster.arrived / cluster.arrivals_end_s / (saturated * share)
