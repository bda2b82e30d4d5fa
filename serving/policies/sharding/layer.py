"""Every GPU holds whole layers, with their KV cache."""

from __future__ import annotations

from serving.layout import Layout
from serving.llm import Llm


class Layer:
    """No all-reduce: activations hop from GPU to GPU, and layers that do not divide evenly leave GPUs unequally full."""

    def layout(self, llm: Llm, gpus: int) -> Layout:
        """Make every GPU a stage of its own."""
        return Layout(stages=gpus)
