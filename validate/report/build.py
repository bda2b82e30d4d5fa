"""Which sections a report has: one run in depth, several runs against each other, or a study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serving.errors import InputError
from sim.front_tables import front_tables
from validate.explain import explain_all
from validate.report import agreement, causes, changes, headline, latency, study, timeline
from validate.report.figure import Figure
from validate.report.page import Page, Section
from validate.run_data import RunData, find, read_run


def build(folders: Sequence[Path]) -> Page:
    """Make the page of run directories or of one study directory.

    Raises InputError when a folder is neither, or when a study is mixed with anything else.
    """
    studies = [folder for folder in folders if study.is_study(folder)]
    if studies and len(folders) > 1:
        raise InputError(str(studies[0]), "is a study: it is reported alone", "give one study, or run directories only")
    if studies:
        return study.page(studies[0])
    runs = [read_run(folder) for folder in folders]
    return run_page(runs[0]) if len(runs) == 1 else runs_page(_labelled(runs))


def _labelled(runs: Sequence[RunData]) -> list[RunData]:
    """Give each run a label of its own: real and simulated where that tells two apart, else the folder's name, else its path."""
    from dataclasses import replace

    if len(runs) == 2 and runs[0].simulated != runs[1].simulated:
        return [replace(run, label="simulated" if run.simulated else "real") for run in runs]
    names = [run.label for run in runs]
    return [replace(run, label=str(run.path)) if names.count(run.label) > 1 else run for run in runs]


def _parts(*parts: Figure | headline.Table | None) -> list[Figure | headline.Table]:
    return [part for part in parts if part is not None]


def _size(run: RunData) -> str:
    arrived, duration_s = run.summary["requests"]["arrived"], run.summary["duration_s"]
    return ("requests" if arrived is None else f"{arrived:,} requests") + ("" if duration_s is None else f" in {duration_s:,.0f} s")


def _subtitle(run: RunData) -> str:
    scenario = run.scenario
    gpu, replicas, tp = (find(scenario, f"cluster.{key}") for key in ("gpu", "replicas", "tensor_parallel"))
    gpu = gpu or run.facts.get("device", "unknown hardware")
    pools = [f"{pool['replicas']} \u00d7 {pool.get('gpu') or gpu} for {pool['role']}" for pool in find(scenario, "cluster.pools") or ()]
    most = find(scenario, "cluster.autoscaling.maximum")
    hardware = " and ".join(pools) or f"{replicas or 1}{f' to {most}' if most else ''} \u00d7 {gpu}"
    fleet = f"{find(scenario, 'llm', 'unnamed model')} on {hardware}"
    batching = find(scenario, "policy.batching.name") or find(scenario, "policy.batching")
    ordering = find(scenario, "policy.ordering.name") or find(scenario, "policy.ordering")
    words = [fleet + (f", tensor parallel {tp}" if tp and tp > 1 else ""), _size(run)]
    words += [f"{ordering} order, {str(batching).replace('_', ' ')}"] if ordering and batching else []
    return " · ".join(words) + (" · interrupted" if run.facts.get("partial") else "")


def _provenance(runs: Sequence[RunData]) -> dict[str, str]:
    facts = {}
    for run in runs:
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        facts[f"{prefix}run directory"] = run.path.resolve().name
        versions = ", ".join(f"{name} {text}" for name, text in sorted((run.facts.get("versions") or {}).items()))
        source = f"twinserve {run.facts.get('twinserve', 'unknown')}, commit {run.facts.get('commit') or 'unknown'}"
        facts[f"{prefix}made by"] = f"{source}, seed {run.facts.get('seed')}, on {run.facts.get('device')}; {versions}"
    facts["definitions"] = (
        "TTFT: first token - arrival. TPOT: (last - first token) / (output - 1). Goodput: requests per second that met all objectives of their class. "
        "Percentiles of the cards and tables are the run's own (within 0.1 %); curves use every completed request."
    )
    return facts


def run_page(run: RunData) -> Page:
    """One run in depth."""
    import yaml

    recorded = bool(run.requests) and run.completed.any()
    spikes = explain_all(run) if recorded and run.steps and len(run.steps["step"]) else None
    tone, sentence = headline.verdict(run, spikes)
    slo = _parts(timeline.attainment(run), *((latency.by_class(run, metric) for metric in ("ttft_s", "tpot_s")) if recorded else ()))
    sections = [
        Section("latency", "Latency", _parts(*((latency.ladder(run), latency.cumulative(run)) if recorded else ()), headline.latency_table(run))),
        Section("objectives", "Objectives", slo),
        Section("time", "Over time", _parts(timeline.series(run) if run.steps and len(run.steps["step"]) else None, changes.fault_table(run), changes.release_table(run))),
    ]
    if spikes:
        tables = [headline.cause_table(metric, rows) for metric, rows in spikes.items()]
        lead = "Each slow request's latency is split by cause, and the causes ranked by what they add beyond a typical request."
        sections.append(Section("causes", "Why the slowest were slow", [causes.chart(spikes), *tables], lead))
    before = [headline.Table(*rows) for rows in front_tables(run.summary)]
    if before:
        sections.append(Section("front", "Before the fleet", before))
    sections.append(Section("slice", "A slice", _parts(timeline.gantt(run)) if recorded else []))
    kind = "simulated run" if run.simulated else "real run"
    text = yaml.safe_dump(dict(run.scenario), sort_keys=False, allow_unicode=True) if run.scenario else ""
    name = str(find(run.scenario, "name", run.label))
    return Page(kind, name, _subtitle(run), sentence, tone, headline.cards(run), sections, _provenance([run]), text)


def runs_page(runs: Sequence[RunData]) -> Page:
    """Runs against each other; two of them request by request."""
    ladders = _parts(*(latency.overlay(runs, metric) for metric in latency.NAMES))
    sections = [Section("runs", "Side by side", [headline.runs_table(runs)])]
    verdict = "; ".join(f"{run.label}: {headline.verdict(run)[1].split('.')[0].lower()}" for run in runs) + "."
    kind = f"{len(runs)} runs"
    if len(runs) == 2:
        base, other = agreement.ordered(*runs)
        verdict = _agreement_sentence(base, other)
        kind = "real against simulated" if base.simulated != other.simulated else "two runs"
        parts = _parts(agreement.differences(base, other), *(agreement.pairs(base, other, metric) for metric in ("ttft_s", "tpot_s", "e2e_s")))
        sections = [Section("agreement", "Agreement", [*parts, headline.difference_table(base, other)])]
    sections.append(Section("latency", "Latency", ladders, "Percentile ladders: each further nine takes the same room."))
    sections += [Section(f"time-{i}", f"Over time: {run.label}", [timeline.series(run)._replace(key=f"series-{i}")]) for i, run in enumerate(runs) if run.steps and len(run.steps["step"])]
    heading = str(find(runs[0].scenario, "name", runs[0].label)) if len({find(r.scenario, "name") for r in runs}) == 1 else " · ".join(r.label for r in runs)
    return Page(kind, heading, _subtitle(runs[0]), verdict, "", [], sections, _provenance(runs))


def _agreement_sentence(base: RunData, other: RunData) -> str:
    told = []
    for metric, statistic in (("ttft_s", "p50"), ("ttft_s", "p99"), ("tpot_s", "p50"), ("e2e_s", "p99")):
        old, new = base.summary[metric].get(statistic), other.summary[metric].get(statistic)
        if old and new is not None:
            told.append(f"{latency.SHORT[metric]} {statistic} {headline.difference(old, new)}")
    old, new = base.summary["output_tokens_per_s"], other.summary["output_tokens_per_s"]
    told += [f"throughput {headline.difference(old, new)}"] if old and new is not None else []
    return f"{other.label.capitalize()} against {base.label}: {', '.join(told)}."
