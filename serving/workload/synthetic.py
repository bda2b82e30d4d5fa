"""Requests of a synthetic workload, made in chunks of columns and zipped into tuples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np

from serving.errors import InputError
from serving.histogram import LONGEST_S
from serving.request import Arrival, Request
from serving.scenario.workload import Workload
from serving.workload.arrivals import instants
from serving.workload.classes import Labels
from serving.workload.context import Context
from serving.workload.prefixes import SharedPrefixes
from serving.workload.sizes import Sizes

_tuple = tuple.__new__


def synthetic(workload: Workload, context: Context) -> Iterator[Arrival]:
    """Yield the requests of ``workload`` in order of arrival, ids from 0. Raises InputError when a data file is broken."""
    labels = Labels(workload, context)
    sizes = Sizes(workload, labels.classes, context)
    prefixes = SharedPrefixes(workload.prefix, context) if workload.prefix and context.prefix_caching else None
    first_id = 0
    for times in bounded(workload, context):
        classes = labels.draw_classes(times.size)
        tenants = labels.draw_tenants(times.size)
        prompt, output, caps = sizes.draw(classes)
        ids = range(first_id, first_id + times.size)
        prompt_list, class_list = prompt.tolist(), classes.tolist()
        # tuple.__new__ over zipped columns never enters Python code: a quarter of the cost of calling the class.
        rows = zip(
            ids,
            times.tolist(),
            prompt_list,
            caps.tolist(),
            _by(labels.priorities, class_list),
            _by(labels.names, class_list),
            _by(labels.tenants, tenants.tolist()),
            repeat(None),
            repeat(()) if prefixes is None else map(prefixes.keys, prefixes.draw(times.size), ids, prompt_list),
            repeat(None),
            _by(labels.ttft_slo_s, class_list),
            repeat(""),
            repeat(None),
        )
        yield from map(_tuple, repeat(Arrival), zip(map(_tuple, repeat(Request), rows), output.tolist()))
        first_id += times.size


def _by(values: list, positions: list[int]) -> Iterator:
    return repeat(values[0]) if len(values) == 1 else map(values.__getitem__, positions)


def bounded(workload: Workload, context: Context, *, limit: int | None = None) -> Iterator[np.ndarray]:
    """Yield chunks of arrival times that end after ``requests`` (or ``limit``) arrivals and before ``duration_s``."""
    left = limit if limit is not None else workload.requests
    duration_s = None if workload.closed_loop else workload.duration_s
    for times in instants(workload.arrivals, context.rng("arrivals"), context.saturation_rps):
        kept = times if duration_s is None else times[: np.searchsorted(times, duration_s)]
        kept = kept if left is None else kept[:left]
        if kept.size:
            if not kept[-1] < LONGEST_S:
                raise InputError("workload.arrivals", f"a request would arrive at {kept[-1]:.3g} s", "a run lasts 272 years at most")
            yield kept
        if left is not None:
            left -= kept.size
        if kept.size < times.size or left == 0:
            return
