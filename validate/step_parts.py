"""What each step of a run spent its time on, from the run's own steps: no calibration is needed.

The time of decode-only steps is fitted (non-negative least squares, outlying ones put aside) on decodes, their context and eager
execution. What a decode-only step takes beyond 1.25 times its fit is put down to the clock (a slow GPU, a throttled clock, another
tenant); smaller misfits are spread over its other parts. A step with prefill chunks costs what its decodes alone would, and the
rest is prefill: records do not tell the context of a chunk, so such a step counts as slow only between decode-only steps that are.
"""

from __future__ import annotations

import numpy as np

from validate.run_data import Columns

SLOW_STEP = 1.25  # beyond what a linear fit of decode steps misses by itself
BASE, PREFILL, GRAPH, CLOCK = range(4)
_FIT_ROWS = 20_000


def eager_steps(steps: Columns) -> np.ndarray:
    """Mask of the decode-only steps that ran outside captured graphs (``graph`` 0) although other steps of the run used one."""
    eager = (steps["graph"] == 0) & (steps["prefill_tokens"] == 0)
    return eager if (steps["graph"] > 0).any() else np.zeros(len(eager), bool)


def _features(steps: Columns) -> np.ndarray:
    """[rows, 4] totals per row: steps, decodes, their context, eager steps."""
    count = steps["steps"].astype(float)
    context = steps["decode_context_tokens"] + (count - 1) / 2 * steps["decode_seqs"]  # of the middle step of a run of several
    return np.stack([count, steps["decode_seqs"] * count, context * count, eager_steps(steps) * count], axis=1)


def _fit(features: np.ndarray, duration_s: np.ndarray) -> np.ndarray:
    """Seconds per unit of each feature; relative errors count, and steps off by more than ``SLOW_STEP`` are put aside."""
    from scipy.optimize import nnls

    if not len(duration_s):
        return np.zeros(features.shape[1])
    stride = max(1, len(duration_s) // _FIT_ROWS)
    sample = np.flatnonzero((np.arange(len(duration_s)) % stride == 0) | (features[:, -1] > 0))[: 2 * _FIT_ROWS]
    scale = np.maximum(features[sample].max(axis=0), 1e-12)
    weighted = features[sample] / scale / duration_s[sample, None]
    kept = np.ones(len(sample), bool)
    for _ in range(4):
        weights = nnls(weighted[kept], np.ones(kept.sum()))[0]
        ratio = weighted @ weights
        kept = (ratio > 1 / SLOW_STEP) & (ratio < SLOW_STEP)
        if not kept.any():
            break
    return weights / scale


def _slowness(steps: Columns, alone: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """[rows] how many times too long each step took, one where it was not slow; ``ratio`` tells it of the decode-only rows ``alone``.

    A row with prefill takes the smaller of its nearest decode-only neighbours' on the same replica, one where a side has none.
    """
    slow = np.where(alone & (ratio > SLOW_STEP), ratio, 1.0)
    order = np.lexsort((steps["start_s"], steps["replica"]))
    replica, known, value = steps["replica"][order], alone[order], slow[order]
    at = np.arange(len(order))
    before = np.maximum.accumulate(np.where(known, at, -1))
    after = np.minimum.accumulate(np.where(known, at, len(order))[::-1])[::-1]

    def neighbour(index: np.ndarray) -> np.ndarray:
        there = np.clip(index, 0, len(order) - 1)
        return np.where((index == there) & (replica[there] == replica), value[there], 1.0)

    slowness = np.empty(len(order))
    slowness[order] = np.minimum(neighbour(before), neighbour(after))
    return slowness


def fit_step_parts(steps: Columns) -> np.ndarray:
    """Return [rows, 4] seconds of each steps row: base, prefill, graph and clock, which add up to its duration."""
    features, duration = _features(steps), np.maximum(steps["duration_s"].astype(float), 1e-12)
    alone = steps["prefill_tokens"] == 0
    weights = _fit(features[alone], duration[alone])
    base, graph = features[:, :3] @ weights[:3], features[:, 3] * weights[3]
    fitted = base + graph
    ratio = np.divide(duration, fitted, out=np.ones_like(duration), where=fitted > 0)
    rightly = duration / _slowness(steps, alone, ratio)  # what the step would have taken at full speed
    squeeze = np.where(alone, np.divide(rightly, fitted, out=np.zeros_like(rightly), where=fitted > 0), np.minimum(1.0, rightly / np.maximum(fitted, 1e-300)))
    parts = np.stack([base * squeeze, np.zeros_like(base), graph * squeeze, duration - rightly], axis=1)
    parts[:, PREFILL] = np.where(alone, 0.0, rightly - fitted * squeeze)
    parts[:, BASE] += np.where(alone & (fitted <= 0), rightly, 0.0)
    return parts
