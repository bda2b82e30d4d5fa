"""Measured steps as what a latency model is fitted to: terms, device and host seconds, regime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hwmodels.fitted import DEVICE_TERMS, HOST_TERMS, remainder_tiles
from serving.errors import InputError
from serving.records import Run

REGIMES = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class StepTable:
    """n steps: ``device`` [n, device terms], ``host`` [n, host terms], seconds [n], ``regime`` [n] (index into REGIMES), ``run`` [n]."""

    device: np.ndarray
    host: np.ndarray
    device_s: np.ndarray
    host_s: np.ndarray
    regime: np.ndarray
    run: np.ndarray

    @property
    def duration_s(self) -> np.ndarray:
        """Seconds of each step."""
        return self.device_s + self.host_s

    def rows(self, chosen: np.ndarray) -> StepTable:
        """The chosen steps (a mask or positions)."""
        return StepTable(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def step_table(runs: Sequence[Run], graph_sizes: tuple[int, ...]) -> StepTable:
    """Read the steps of ``runs``, in order. Raises InputError for rows that stand for several steps, or that lack what chunks cost."""
    tables = [_one(run, number, bool(graph_sizes)) for number, run in enumerate(runs)]
    return StepTable(*(np.concatenate([getattr(table, name) for table in tables]) for name in StepTable.__dataclass_fields__))


def captured_sizes(runs: Sequence[Run]) -> tuple[int, ...]:
    """The captured batch sizes that the runs replayed."""
    return tuple(sorted({int(size) for run in runs for size in run.steps["graph"] if size}))


def _one(run: Run, number: int, graphs: bool) -> StepTable:
    steps = run.steps
    if (steps["steps"] != 1).any():
        raise InputError(str(run.path), "has rows that stand for several steps", "only measured steps can be fitted")
    prefill, seqs, decodes = (steps[name].to_numpy(np.float64) for name in ("prefill_tokens", "prefill_seqs", "decode_seqs"))
    context = steps["decode_context_tokens"].to_numpy(np.float64) * (decodes > 0)
    graph = steps["graph"].to_numpy(np.float64)
    pairs, before, rows = _chunk_columns(run, prefill, seqs)
    tokens = np.where(graph > 0, graph, prefill + decodes)
    ones = np.ones(len(steps))
    terms = {
        "constant": ones, "tokens": tokens, "several_tokens": tokens > 1, "remainder_tiles": remainder_tiles(tokens.astype(np.int64)), "any_decode": decodes > 0, "decodes": decodes,
        "decode_context_tokens": context, "prefill_seqs": seqs, "query_key_pairs": pairs, "prefill_context_tokens": before,
        "eager": (graph == 0) * float(graphs), "sequences": decodes + seqs, "logits_rows": np.where(seqs > 0, rows, decodes),
    }  # fmt: skip
    duration_s = steps["duration_s"].to_numpy(np.float64)
    host_s = duration_s * _host_share(run, len(steps))
    return StepTable(
        np.column_stack([terms[name] for name in DEVICE_TERMS]), np.column_stack([terms[name] for name in HOST_TERMS]),
        duration_s - host_s, host_s, np.where(seqs == 0, 1, np.where(decodes > 0, 2, 0)), np.full(len(steps), number),
    )  # fmt: skip


def _chunk_columns(run: Run, prefill: np.ndarray, seqs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query-key pairs, prefill context, logits rows: as the engine recorded them, else rebuilt from the plans."""
    if run.has("engine_steps"):
        table = run.engine_steps
        return tuple(table[name].to_numpy(np.float64) for name in ("query_key_pairs", "prefill_context_tokens", "logits_rows"))
    if run.has("plans") and len(run.plans) == len(prefill):
        return _from_plans(run)
    # Whole prompts, as even as they can be: what is known when only sums were logged.
    each = prefill / np.maximum(seqs, 1)
    return seqs * each * (each + 1) / 2, np.zeros(len(prefill)), run.steps["decode_seqs"].to_numpy(np.float64) + seqs


def _from_plans(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Follow each request's chunks; one that was preempted begins again."""
    prompts = dict(zip(run.requests["request_id"].tolist(), run.requests["prompt_tokens"].tolist())) if run.has("requests") else {}
    computed: dict[int, int] = {}
    decodes = run.steps["decode_seqs"].tolist()
    rows = []
    for plan, decoding in zip(run.plans.itertuples(index=False), decodes):
        pairs = context = logits = 0
        for request_id in plan.preempted:
            computed.pop(int(request_id), None)
        for chunk in plan.chunks:
            request_id, new = chunk["request_id"], chunk["new_tokens"]
            before = computed.get(request_id, 0)
            computed[request_id] = before + new
            pairs += new * before + new * (new + 1) // 2
            context += before
            logits += before + new >= prompts.get(request_id, 0)
        rows.append((pairs, context, logits + decoding))
    return tuple(np.array(rows, dtype=np.float64).reshape(-1, 3).T)


def _host_share(run: Run, steps: int) -> np.ndarray:
    """The part of each step that the host adds to the device's: all of its own time on a CPU, what the device does not hide on a GPU."""
    if not run.has("engine_steps"):
        return np.zeros(steps)
    table = run.engine_steps
    device_s = table["device_s"].to_numpy(np.float64)
    if (table["launch_s"] > 0).any():  # launched ahead: host and device run side by side
        return np.clip(1 - device_s / table["measured_s"].to_numpy(np.float64), 0, 1)
    host_s = sum(table[name].to_numpy(np.float64) for name in ("schedule_s", "prepare_s", "sample_s", "post_s"))
    return host_s / np.maximum(host_s + device_s, 1e-12)
