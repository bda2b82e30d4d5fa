"""What a summary says of stages and sites, as rows for a terminal or a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Rows(NamedTuple):
    """A table of text; the first ``words`` columns are words, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int


def front_tables(summary: Mapping[str, Any]) -> Iterator[Rows]:
    """Yield the tables that a summary has something for: stages, what they remember, sites."""
    stages = summary.get("stages", ())
    if stages:
        rows = [
            (row["name"], f"{row['servers']:,}", f"{row['requests']:,}", _ms(row["time_s"], "mean"), _ms(row["time_s"], "p99"), _ms(row["wait_s"], "mean"), _share(row["busy_fraction"]))
            for row in stages
        ]  # fmt: skip
        yield Rows("Before the model", ("stage", "servers", "requests", "mean ms", "p99 ms", "wait ms", "busy"), rows, 1)
    caches = [row for stage in stages for row in _caches(stage)]
    if caches:
        yield Rows("Remembered", ("stage", "cache", "hits", "hit rate", "entries", "MB", "evicted", "expired"), caches, 2)
    if "sites" in summary:
        rows = [
            (row["name"], row["tier"], f"{row['replicas']} x {row['gpu']}", f"{row['requests']:,}", f"{row['from_outside']:,}", _share(row["gpu_busy_fraction"]))
            for row in summary["sites"]["places"]
        ]  # fmt: skip
        yield Rows("Sites", ("site", "tier", "replicas", "requests", "from outside", "busy"), rows, 3)


def _caches(stage: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The caches of a stage, place by place where it stands at several."""
    for place in stage.get("places", (stage,)):
        found = {"by key": place["cache"]} if "cache" in place else place.get("retrieval", {})
        for name, cache in found.items():
            if isinstance(cache, Mapping):
                yield (
                    stage["name"], name, f"{cache['hits']:,}", _share(cache["hit_rate"]), f"{cache['entries']:,}", f"{cache['bytes'] / 1e6:,.1f}",
                    f"{cache['evicted']:,}", f"{cache['expired']:,}",
                )  # fmt: skip


def _ms(histogram: Mapping[str, float | None], statistic: str) -> str:
    value = histogram[statistic]
    return "-" if value is None else f"{value * 1e3:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
