"""Weights are split as in tensor parallelism; the KV cache is dealt out by tokens."""

from __future__ import annotations

from serving.layout import Layout
from serving.llm import Llm


class Sequence:
    """The cache shrinks with every GPU, whatever the number of KV heads; queries are gathered and partial softmaxes merged in every layer."""

    def layout(self, llm: Llm, gpus: int) -> Layout:
        """Split every matrix over ``gpus`` and deal the tokens of every KV head to all of them."""
        return Layout(tensor_parallel=gpus, kv_shards=gpus)
