"""Prompt length, output length and the client's cap of each request, by class."""

from __future__ import annotations

import numpy as np

from serving.scenario.fields import data_file
from serving.scenario.workload import RequestClass, Workload
from serving.workload.context import Context
from serving.workload.lengths import MAX_TOKENS, Draw, largest_tokens, tokens
from serving.workload.table import LengthTable, read_lengths


class Sizes:
    """Draws lengths. A class that has its own distribution draws from its own stream."""

    def __init__(self, workload: Workload, classes: tuple[RequestClass, ...], context: Context) -> None:
        self._workload = workload
        self._classes = classes
        self._max_model_len = context.max_model_len
        self._table: LengthTable | None = read_lengths(data_file(workload.lengths.table)) if workload.lengths else None
        self._table_rng = context.rng("lengths")
        self._shared = {key: _maybe(getattr(workload, key), key, context) for key in ("prompt_tokens", "output_tokens")}
        self._own = [
            {key: _maybe(getattr(row, key), f"{key}.{row.name}", context) for key in ("prompt_tokens", "output_tokens")} for row in classes
        ]
        self._caps = np.array([self._cap(row) for row in classes], dtype=np.int64)

    def draw(self, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return prompt tokens, output tokens and the cap on output tokens (int64 each) for requests of these classes.

        No output is longer than its cap: a client that asks for at most n tokens gets at most n.
        """
        n = classes.size
        if self._table is not None:
            prompt, output = self._table.draw(self._table_rng, n)
        else:
            prompt, output = self._from_shared("prompt_tokens", n), self._from_shared("output_tokens", n)
        for position, own in enumerate(self._own):
            for key, lengths in (("prompt_tokens", prompt), ("output_tokens", output)):
                if own[key] is not None:
                    chosen = classes == position
                    lengths[chosen] = own[key](int(chosen.sum()))
        caps = self.caps(classes, prompt)
        return prompt, np.minimum(output, caps), caps

    def caps(self, classes: np.ndarray, prompt: np.ndarray) -> np.ndarray:
        """Return the cap on output tokens (int64): the client's, or what the longest sequence leaves, but at least 1."""
        return np.maximum(np.minimum(self._caps[classes], self._max_model_len - prompt), 1)

    def _from_shared(self, key: str, n: int) -> np.ndarray:
        draw = self._shared[key]
        return draw(n) if draw is not None else np.ones(n, dtype=np.int64)

    def _cap(self, row: RequestClass) -> int:
        given = row.max_output_tokens or self._workload.max_output_tokens
        if given is not None:
            return min(given, MAX_TOKENS)
        if self._workload.trace is not None:
            return MAX_TOKENS
        spec = row.output_tokens or self._workload.output_tokens
        largest = largest_tokens(spec) if spec is not None else (self._table.largest_output if self._table else None)
        return MAX_TOKENS if largest is None else largest


def _maybe(spec: object, name: str, context: Context) -> Draw | None:
    return None if spec is None else tokens(spec, context.rng(name))
