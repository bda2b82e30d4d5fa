"""KV heads as far as there are any, tokens beyond."""

from __future__ import annotations

import math

from serving.layout import Layout
from serving.llm import Llm


class HeadThenSequence:
    """As ``head`` while GPUs have a KV head each; GPUs that would hold copies of one share its tokens instead."""

    def layout(self, llm: Llm, gpus: int) -> Layout:
        """Latent attention has one head for all, so its tokens are dealt to all GPUs."""
        heads = 1 if llm.mla is not None else math.gcd(gpus, llm.kv_heads)
        return Layout(tensor_parallel=gpus, kv_shards=gpus // heads)
