"""Every GPU holds its heads of every layer: plain tensor parallelism."""

from __future__ import annotations

from serving.layout import Layout
from serving.llm import Llm


class Head:
    """Two all-reduces a layer. Beyond one KV head a GPU, heads are copied and the cache shrinks no further."""

    def layout(self, llm: Llm, gpus: int) -> Layout:
        """Split every matrix and the KV heads over ``gpus``."""
        return Layout(tensor_parallel=gpus)
