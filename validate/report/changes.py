"""What happened to the fleet while it served: faults and the recovery from them, replicas in service, and how a release went."""

from __future__ import annotations

from typing import Any

import numpy as np

from validate.report.headline import Table, number
from validate.run_data import RunData, find

_LABELLED = 8  # faults; more of them are marked by their lines alone
_WORDS = {"replica_loss": "replica lost", "slow_gpu": "slow GPU", "host_stall": "host stalls", "slow_link": "slow links"}


def _faults(run: RunData) -> list[dict[str, Any]]:
    return find(run.summary, "fleet.faults") or []


def _where(fault: dict[str, Any]) -> str:
    return fault["link"] if "link" in fault else f"replica {fault['replica']}"


def marks(run: RunData) -> list[dict[str, Any]]:
    """A vertical line across a figure over time for every fault."""
    faults = _faults(run)
    lines = []
    for fault in faults:
        at = {"type": "line", "x0": fault["at_s"], "x1": fault["at_s"], "xref": "x", "y0": 0, "y1": 1, "yref": "paper"}
        place = {"textposition": "end", "textangle": 0, "xanchor": "left", "yanchor": "top"}
        label = {"text": f"{_WORDS[fault['kind']]}, {_where(fault)}", **place, "font": {"color": "$vermillion", "size": 11}}
        lines.append(
            {**at, "line": {"color": "$vermillion", "width": 1, "dash": "dot"}, **({"label": label} if len(faults) <= _LABELLED else {})}
        )
    return lines


def in_service(run: RunData) -> tuple[list[float], list[int]] | None:
    """Instants and how many replicas took requests from each on; None where the fleet stayed as it was."""
    changes = find(run.summary, "fleet.changes")
    if not changes:
        return None
    pools = find(run.scenario, "cluster.pools") or [find(run.scenario, "cluster") or {}]
    ready = set(range(sum(int(pool.get("replicas") or 1) for pool in pools)))
    at_s, counts = [0.0], [len(ready)]
    for change in changes:
        (ready.add if change["state"] == "ready" else ready.discard)(change["replica"])
        at_s.append(float(change["at_s"]))
        counts.append(len(ready))
    at_s.append(max(at_s[-1], float(run.summary.get("duration_s") or 0.0)))
    counts.append(len(ready))
    kept = np.append(np.diff(at_s) > 0, True)  # of what happens at one instant the outcome counts
    return [each for each, keep in zip(at_s, kept) if keep], [each for each, keep in zip(counts, kept) if keep]


def fault_table(run: RunData) -> Table | None:
    """Every fault, and when the objectives were met again."""
    faults = _faults(run)
    if not faults:
        return None
    fleet = run.summary["fleet"]

    last_s = max(fault["at_s"] for fault in faults)

    def recovery(fault: dict[str, Any]) -> str:
        seconds = fault["recovery_s"]
        if seconds is None:
            return "not before the end" if fault["at_s"] == last_s else "not before the next fault"
        return "never missed" if seconds == 0 else f"{number(seconds)} s"

    rows = [[_WORDS[fault["kind"]], _where(fault), f"{fault['at_s']:,.1f}", recovery(fault)] for fault in faults]
    title = f"Faults; {fleet['retried']:,} requests were tried again, {fleet['failed']:,} failed"
    return Table(title, ["fault", "where", "at, s", "objectives met again after"], rows, words=2)


def release_table(run: RunData) -> Table | None:
    """The stages of a release: what the users of both variants saw, and why it went on or ended."""
    release = find(run.summary, "rollout")
    if not release:
        return None
    outcome = {"promoted": "promoted", "rolled_back": "rolled back"}.get(release["outcome"], "unfinished")
    ended = f" after {release['ended_s']:,.0f} s" if release["ended_s"] is not None else ""

    def both(stage: dict[str, Any], metric: str) -> str:
        return " / ".join(
            number(None if p99 is None else p99 * 1e3) for p99 in (stage[who][metric]["p99"] for who in ("candidate", "baseline"))
        )

    rows = [
        [
            stage["name"], f"{stage['share']:.0%}", f"{stage['from_s']:,.0f} to {stage['to_s']:,.0f}", " / ".join(f"{stage[who]['outcomes']:,}" for who in ("candidate", "baseline")),
            both(stage, "ttft_s"), both(stage, "tpot_s"), "passed" if stage["passed"] else stage["reason"],
        ]
        for stage in release["stages"]
    ]  # fmt: skip
    columns = ["stage", "share", "seconds", "answers", "TTFT p99, ms", "TPOT p99, ms", "outcome"]
    return Table(f"Release, candidate / baseline: {outcome}{ended}", columns, rows, text=1) if rows else None
