"""Streaming metrics: what a run's users saw, from one tuple per finished request, in memory that does not grow with them.

A row is appended to a list (the hot path is ``list.append``) and the list is digested by numpy every few thousand rows.
``summary.json`` is made here: its keys are a contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from serving.histogram import Histogram

SCHEMA_VERSION = 1
FLUSH_ROWS = 8192
FLUSH_GAPS = 65536

COMPLETED, REJECTED, CAPACITY, ABORTED, ERROR = range(5)
STATUS_NAMES = ("completed", "rejected", "capacity", "aborted", "error")  # the last three are failures after admission


class Row(NamedTuple):
    """One request that has left, however it left. Times that never came are NaN; ``finish_s`` is when it left.

    Any tuple with these twelve fields in this order will do: the hot path builds plain ones.
    """

    request_id: int
    class_index: int
    arrival_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    scheduled_s: float
    first_token_s: float
    finish_s: float
    preemptions: int
    replica: int
    status_code: int


@dataclass(frozen=True, slots=True)
class FleetTotals:
    """What the replicas counted over the whole run."""

    duration_s: float  # from time zero to the last event
    replicas: float  # on average, where they come and go
    gpus: float  # of all replicas together
    gpu_usd_per_h: float | None  # price of one GPU; None when the catalogue has none
    busy_s: float  # seconds of steps, summed over replicas
    steps: int
    events: int  # of the event loop: what the simulator itself did
    kv_blocks: float  # usable blocks of all replicas together; on average, where they come and go
    kv_block_seconds: float  # integral over time of the blocks in use
    kv_max_fraction: float  # fullest moment of any replica
    preemptions: int
    prompt_tokens: int  # of admitted sequences, each admission counted
    cached_tokens: int  # of those, found in the prefix cache
    in_flight: int = 0  # arrived and not finished when an interrupted run stopped


class Metrics:
    """Collects rows and inter-token gaps; ``summary`` turns them into the dictionary of ``summary.json``.

    Latencies, rates and SLO attainment are those of the requests that arrive in [warmup_s, end - cooldown_s], where the end is
    the run's last event; the counts under ``requests`` and everything in ``FleetTotals`` are the whole run's. As the end is not
    known before it comes, rows of the last ``cooldown_s`` are held back until later rows show that they count.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        targets_of: Callable[[str], tuple[float, float, float]],
        *,
        warmup_s: float = 0.0,
        cooldown_s: float = 0.0,
        keep_rows: bool = False,
        timeline_s: float | None = None,
    ) -> None:
        """``targets_of(class name)`` gives the class's objectives (TTFT, TPOT, E2E) in seconds, infinite where there is none.

        ``keep_rows`` keeps about 100 bytes a request for ``columns()``. ``timeline_s`` also counts, in windows of that length by
        arrival, the requests and those that met their objectives.
        """
        self._timeline_s = timeline_s
        self._timeline = np.zeros((2, 0), dtype=np.int64)
        self.warmup_s = warmup_s
        self.cooldown_s = cooldown_s
        self.windowed = warmup_s > 0 or cooldown_s > 0  # then ``itl`` needs to know when each gap ended
        self._targets_of = targets_of
        self._classes: dict[str, int] = {}
        self._limits_s = np.empty((0, 3))  # by class: TTFT, TPOT, E2E
        self._measured_by_class, self._met_by_class = np.zeros((2, 0), dtype=np.int64)
        for name in class_names:
            self.class_index(name)
        self._rows: list[tuple] = []
        self.finish = self._rows.append  # the hot path; follow it with ``flush_if_full`` now and then
        # Buffers of ``itl``: the gaps, how many requests saw each, and (when windowed) when each ended. The hot path extends them itself.
        self.gaps_s: list[float] = []
        self.gap_weights: list[int] = []
        self.gap_ends_s: list[float] = []
        self._gaps = (self.gaps_s, self.gap_weights, self.gap_ends_s)
        self._gap_arrays: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._gap_array_rows = 0
        self._held_rows = np.empty((0, len(Row._fields)))
        self._kept: list[np.ndarray] | None = [] if keep_rows else None
        self._latest_s = 0.0
        self.ttft, self.tpot, self.itl_gaps, self.e2e, self.queue = (Histogram() for _ in range(5))
        self._by_status = np.zeros(len(STATUS_NAMES), dtype=np.int64)
        self._preempted = self._all_output_tokens = 0
        self._completed = self._prompt_tokens = self._output_tokens = 0

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, each at its index."""
        return tuple(self._classes)

    def class_index(self, name: str) -> int:
        """Return the index of a class for ``Row.class_index``; a trace may bring classes that no scenario names."""
        index = self._classes.get(name)
        if index is None:
            index = self._classes[name] = len(self._classes)
            self._limits_s = np.concatenate([self._limits_s, [self._targets_of(name)]])
            self._measured_by_class = np.append(self._measured_by_class, 0)
            self._met_by_class = np.append(self._met_by_class, 0)
        return index

    def flush_if_full(self) -> None:
        """Digest the buffered rows and gaps when there are enough of them to make it cheap."""
        if len(self._rows) >= FLUSH_ROWS:
            self._flush_rows()
        if len(self.gaps_s) >= FLUSH_GAPS:
            self._flush_gaps(final=False)

    def itl(self, gaps_s: list[float] | np.ndarray, weights: list[int] | np.ndarray, ends_s: list[float] | np.ndarray | None = None) -> None:
        """Add gaps between successive tokens of a request: ``gaps_s[i]`` was seen by ``weights[i]`` requests.

        A decode step of duration d over B sequences is the gap d with weight B. ``ends_s[i]`` is when the gap ended; it is
        needed when ``windowed`` is true and ignored otherwise. All lists, or all arrays of shape (n,).
        """
        if self.windowed and ends_s is None:
            raise ValueError("with a warm-up or cool-down every gap needs the time it ended")
        if isinstance(gaps_s, list):
            gaps, counts, ends = self._gaps
            gaps.extend(gaps_s)
            counts.extend(weights)
            if self.windowed:
                ends.extend(ends_s)
            if len(gaps) >= FLUSH_GAPS:
                self._flush_gaps(final=False)
            return
        self._gap_arrays.append((gaps_s, weights, ends_s if self.windowed else gaps_s))
        self._gap_array_rows += len(gaps_s)
        if self._gap_array_rows >= FLUSH_GAPS:
            self._flush_gaps(final=False)

    def columns(self) -> dict[str, np.ndarray]:
        """Return the kept rows as columns named as in ``Row``, in order of request id; the times are float64, the rest int64."""
        if self._kept is None:
            raise ValueError("the rows were not kept")
        self._flush_rows()
        table = np.concatenate([*self._kept, np.empty((0, len(Row._fields)))])
        table = table[np.argsort(table[:, 0], kind="stable")]
        self._kept = [table]
        return {name: table[:, i].copy() if name.endswith("_s") else table[:, i].astype(np.int64) for i, name in enumerate(Row._fields)}

    def met_and_measured(self) -> dict[str, tuple[int, int]]:
        """By class, so far: requests that met all their objectives, and requests that were measured."""
        self._flush_rows()
        return {name: (int(m), int(n)) for name, m, n in zip(self.class_names, self._met_by_class, self._measured_by_class)}

    def summary(self, *, scenario: str, seed: int, totals: FleetTotals, load_factor: float | None = None) -> dict:
        """Return the contents of ``summary.json``. Call it once, at the end: it closes the measured window."""
        self._flush_rows()
        self._latest_s = totals.duration_s
        self._flush_gaps(final=True)
        self._measure(self._held_rows[self._held_rows[:, 2] <= totals.duration_s - self.cooldown_s])
        window_s = max(totals.duration_s - self.cooldown_s - self.warmup_s, 0.0)
        measured, met = int(self._measured_by_class.sum()), int(self._met_by_class.sum())
        by_class = {name: _ratio(int(m), int(n)) for name, m, n in zip(self.class_names, self._met_by_class, self._measured_by_class)}
        cost_usd = None if totals.gpu_usd_per_h is None else totals.gpus * totals.gpu_usd_per_h * totals.duration_s / 3600
        return {
            "schema_version": SCHEMA_VERSION,
            "scenario": scenario,
            "seed": seed,
            "requests": self._request_counts(totals.in_flight),
            "duration_s": totals.duration_s,
            "ttft_s": self.ttft.summary(),
            "tpot_s": self.tpot.summary(),
            "itl_s": self.itl_gaps.summary(),
            "e2e_s": self.e2e.summary(),
            "queue_s": self.queue.summary(),
            "prompt_tokens_per_s": _ratio(self._prompt_tokens, window_s),
            "output_tokens_per_s": _ratio(self._output_tokens, window_s),
            "requests_per_s": _ratio(self._completed, window_s),
            "goodput_rps": _ratio(met, window_s),
            "slo_attainment": {"overall": _ratio(met, measured), "by_class": by_class},
            "preemptions": totals.preemptions,
            "prefix_cache_hit_rate": _ratio(totals.cached_tokens, totals.prompt_tokens),
            "kv_utilisation": {
                "mean": _ratio(totals.kv_block_seconds, totals.kv_blocks * totals.duration_s),
                "max": totals.kv_max_fraction,
            },
            "gpu_busy_fraction": _ratio(totals.busy_s, totals.replicas * totals.duration_s),
            "load_factor": load_factor,
            "steps": totals.steps,
            "events": totals.events,
            "cost_usd": cost_usd,
            "usd_per_million_output_tokens": None if cost_usd is None else _ratio(cost_usd * 1e6, self._all_output_tokens),
        }

    def _request_counts(self, in_flight: int) -> dict[str, int]:
        by_status = self._by_status.tolist()
        return {
            "arrived": sum(by_status) + in_flight,
            "completed": by_status[COMPLETED],
            "rejected": by_status[REJECTED],
            "failed": by_status[CAPACITY] + by_status[ABORTED] + by_status[ERROR],
            "preempted": self._preempted,
        }

    def timeline(self) -> list[tuple[float, int, int]]:
        """Windows of ``timeline_s`` as (start, requests that arrived, of those that met their objectives); after ``summary``."""
        counts, met = self._timeline
        return [(index * self._timeline_s, int(count), int(good)) for index, (count, good) in enumerate(zip(counts, met))]

    def _count_windows(self, arrivals_s: np.ndarray, met_s: np.ndarray) -> None:
        windows = [(times_s // self._timeline_s).astype(np.int64) for times_s in (arrivals_s, met_s)]
        size = max(self._timeline.shape[1], 1 + int(max(part.max(initial=-1) for part in windows)))
        wider = np.zeros((2, size), dtype=np.int64)
        wider[:, : self._timeline.shape[1]] = self._timeline
        self._timeline = wider + np.stack([np.bincount(part, minlength=size) for part in windows])

    def _flush_rows(self) -> None:
        """Turn the buffered tuples into columns, count them, and measure those that are certainly inside the window."""
        rows = self._rows
        if not rows:
            return
        width = len(Row._fields)
        table = np.fromiter(chain.from_iterable(rows), np.float64, len(rows) * width).reshape(-1, width)
        rows.clear()  # the list itself must live on: ``finish`` is bound to it
        if self._kept is not None:
            self._kept.append(table)
        status = table[:, 11].astype(np.int64)
        self._by_status += np.bincount(status, minlength=len(STATUS_NAMES))
        self._preempted += int(np.count_nonzero(table[:, 9]))
        self._all_output_tokens += int(table[:, 5].sum())
        self._latest_s = max(self._latest_s, float(table[:, 8].max()))
        if self.windowed:
            table = np.concatenate([self._held_rows, table[table[:, 2] >= self.warmup_s]])
            sure = table[:, 2] <= self._latest_s - self.cooldown_s
            self._held_rows, table = table[~sure], table[sure]
        self._measure(table)

    def _measure(self, table: np.ndarray) -> None:
        """Add rows (shape (n, 12)) that lie inside the window to the histograms and the SLO counts."""
        everybody = table
        group = table[:, 1].astype(np.int64)
        self._measured_by_class += np.bincount(group, minlength=len(self._classes))
        done = table[:, 11] == COMPLETED
        if not done.all():
            table, group = table[done], group[done]
        _, _, arrival_s, prompt, _, output, scheduled_s, first_s, finish_s, *_ = table.T
        ttft_s, e2e_s = first_s - arrival_s, finish_s - arrival_s
        several = output > 1  # one token has no time per *further* token: undefined, so left out and always met
        tpot_s = np.divide(finish_s - first_s, output - 1, out=np.zeros_like(output), where=several)
        ttft_limit_s, tpot_limit_s, e2e_limit_s = self._limits_s[group].T
        met = (ttft_s <= ttft_limit_s) & (tpot_s <= tpot_limit_s) & (e2e_s <= e2e_limit_s)
        self._met_by_class += np.bincount(group[met], minlength=len(self._classes))
        if self._timeline_s is not None:
            self._count_windows(everybody[:, 2], arrival_s[met])
        self._completed += len(table)
        self._prompt_tokens += int(prompt.sum())
        self._output_tokens += int(output.sum())
        self.ttft.add(ttft_s)
        self.e2e.add(e2e_s)
        self.queue.add(scheduled_s - arrival_s)
        self.tpot.add(tpot_s if several.all() else tpot_s[several])

    def _flush_gaps(self, *, final: bool) -> None:
        """Add the buffered gaps to their histogram; with a window, only those known to end inside it."""
        gaps, counts, ends = self._gaps
        listed = (np.array(gaps, dtype=np.float64), np.array(counts, dtype=np.int64), np.array(ends if self.windowed else gaps, dtype=np.float64))
        gap_s, count, end_s = (np.concatenate(columns) for columns in zip(listed, *self._gap_arrays))
        for column in self._gaps:
            column.clear()
        self._gap_arrays.clear()
        self._gap_array_rows = 0
        if self.windowed and gap_s.size:
            self._latest_s = max(self._latest_s, float(end_s.max()))
            sure = end_s <= self._latest_s - self.cooldown_s
            if not final:
                self._gap_arrays.append((gap_s[~sure], count[~sure], end_s[~sure]))
            inside = sure & (end_s >= self.warmup_s)
            gap_s, count = gap_s[inside], count[inside]
        self.itl_gaps.add(gap_s, count)


def _ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None where there is nothing to divide by."""
    return part / whole if whole else None
