"""Attention by the Triton kernels: paged split-context decodes and paged chunked prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention import AttentionGeometry
from engine.attention.batch import AttentionBatch
from engine.kernels.decode_attention import DecodeTuning, DecodeWorkspace, decode_attention, decode_tuning
from engine.kernels.pointwise import kv_write
from engine.kernels.prefill_attention import PrefillTuning, prefill_attention, prefill_tuning

#: Multiprocessors assumed where there is no device to ask: few, so that the interpreter runs few programs.
INTERPRETER_MULTIPROCESSORS = 2


class TritonAttention:
    """One kernel for the decodes (plus its reduction), one for the chunks. Decode-only batches can be captured."""

    capturable = True

    def __init__(self, geometry: AttentionGeometry, decode: DecodeTuning | None = None, prefill: PrefillTuning | None = None) -> None:
        device = geometry.device
        properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        count, major = (properties.multi_processor_count, properties.major) if properties else (INTERPRETER_MULTIPROCESSORS, 9)
        self._scale = geometry.scale
        self._slopes = geometry.slopes
        self._prefill = prefill or prefill_tuning(major)
        self._workspace = DecodeWorkspace(
            geometry.max_decodes, geometry.heads, geometry.kv_heads, geometry.head_dim, count, device, decode or decode_tuning(major)
        )

    def begin(self, batch: AttentionBatch) -> None:
        """Choose the length of a context split for this step, on the device."""
        if batch.decodes:
            self._workspace.cut(batch.context[: batch.decodes])

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, keys: Tensor, values: Tensor, batch: AttentionBatch, window: int) -> Tensor:
        """See ``engine.attention.AttentionBackend.attend``."""
        if k is not None:
            kv_write(k, v, keys, values, batch.slots)
        decodes, table = batch.decodes, batch.table
        options = {"scale": self._scale, "window": window, "slopes": self._slopes}
        parts = []
        if decodes:
            rows, context = batch.rows[:decodes], batch.context[:decodes]
            parts.append(decode_attention(q[:decodes], keys, values, table, rows, context, self._workspace, **options))
        if batch.chunks:
            rows, context = batch.rows[decodes:], batch.context[decodes:]
            longest = max(new for new, _ in batch.chunks)
            parts.append(prefill_attention(q[decodes:], keys, values, table, rows, context, batch.starts, longest, tuning=self._prefill, **options))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
