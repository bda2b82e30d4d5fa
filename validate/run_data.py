"""A run as the reports see it: scenario, summary, and the columns of its tables as numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serving.records import Run, open_run
from serving.run_checks import check_summary

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class RunData:
    """One run. ``requests`` and ``steps`` are empty when the run kept no records; ``facts`` is run.yaml less its scenario."""

    path: Path
    label: str
    scenario: Mapping
    facts: Mapping
    summary: Mapping
    requests: Columns = field(default_factory=dict)
    steps: Columns = field(default_factory=dict)
    stages: Columns = field(default_factory=dict)  # what requests passed before a replica saw them; empty where there was nothing

    @property
    def simulated(self) -> bool:
        """Whether the simulator made this run (a real engine names its hardware)."""
        return str(self.facts.get("device", "")).startswith("simulated")

    @property
    def pools(self) -> dict[str, range]:
        """Replica numbers by role where prompts and answers have pools of their own (numbered prefill first); empty otherwise."""
        pools = find(self.scenario, "cluster.pools") or ()
        sizes = {pool["role"]: int(find(pool, "autoscaling.maximum") or pool["replicas"]) for pool in pools}
        if set(sizes) != {"prefill", "decode"}:
            return {}
        return {"prefill": range(sizes["prefill"]), "decode": range(sizes["prefill"], sizes["prefill"] + sizes["decode"])}

    @property
    def completed(self) -> np.ndarray:
        """Mask over ``requests`` of those that finished normally."""
        return self.requests["status"] == "completed"

    def latency_s(self, metric: str) -> np.ndarray:
        """Seconds per request of ``ttft_s``, ``tpot_s``, ``e2e_s`` or ``queue_s``; NaN where a request never got there."""
        rows = self.requests
        if metric == "queue_s":
            return rows["scheduled_s"] - rows["arrival_s"]
        if metric == "ttft_s":
            return rows["first_token_s"] - rows["arrival_s"]
        if metric == "e2e_s":
            return rows["finish_s"] - rows["arrival_s"]
        gaps = np.maximum(rows["output_tokens"] - 1, 0).astype(float)
        decode_s = rows["finish_s"] - rows["first_token_s"]
        return np.divide(decode_s, gaps, out=np.full(len(gaps), np.nan), where=gaps > 0)


def find(mapping: Mapping, dotted: str, default=None):
    """Return the value at a dotted path of nested mappings, or ``default``."""
    value = mapping
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def _columns(run: Run, table: str) -> Columns:
    if not run.has(table):
        return {}
    frame = getattr(run, table)
    return {name: frame[name].to_numpy(dtype=object if frame[name].dtype.kind not in "iufb" else None) for name in frame.columns}


def _whole(summary: Mapping) -> Mapping:
    """A summary whose groups are all mappings: what an imported run does not know at all is unknown figure by figure."""
    unknown = {"slo_attainment": {"overall": None, "by_class": {}}, "kv_utilisation": {"mean": None, "max": None}}
    return {**summary, **{key: empty for key, empty in unknown.items() if summary[key] is None}}


def read_run(folder: Path, label: str = "") -> RunData:
    """Read a run directory. Raises InputError when the folder is none or a file of it is broken; absent tables stay empty."""
    run = open_run(folder)
    check_summary(run.summary, folder / "summary.json", complete=True)
    facts = {key: value for key, value in run.info.items() if key != "scenario"}
    requests, steps = _columns(run, "requests"), _columns(run, "steps")
    return RunData(folder, label or folder.resolve().name, run.info["scenario"], facts, _whole(run.summary), requests, steps, _columns(run, "stages"))
