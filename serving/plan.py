"""What one step does: the shape a latency model prices, the plan an executor runs, the result it commits."""

from __future__ import annotations

from typing import NamedTuple


class StepShape(NamedTuple):
    """The quantities that decide what a step costs. ``BatchPlan`` has the same attributes, so either can be priced.

    ``chunks`` lists the prefill chunks as (new tokens, tokens already in the KV cache before them).
    ``decode_context_tokens`` sums, over the decoding sequences, the KV entries each attends to (the new one included).
    ``logits_rows`` counts the rows the LM head computes: decodes plus prompts that finish in this step.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    decode_context_tokens: int = 0
    logits_rows: int = 0
    query_tokens_per_decode: int = 1
