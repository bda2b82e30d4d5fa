"""The paged KV cache: per layer one key and one value tensor of pages.

```
keys[layer]  [blocks, block_tokens, kv_heads, head_dim]     values[layer]  the same
             layers that read an earlier layer's entries have that layer's tensors
block 0      reserved: padded rows of a batch write there, no sequence ever owns it
slot         block · block_tokens + offset: where one token's key and value lie
```
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.kv_formats import NarrowPages
from serving.errors import InputError


class KvCache:
    """The pages of all layers on one device. Which sequence owns which block is the scheduler's business, not this class's."""

    def __init__(self, shape: Architecture, *, blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device, narrow: str | None = None) -> None:
        """Allocate ``blocks`` pages (the reserved one included) of ``block_tokens`` tokens, of ``dtype`` or of the format ``narrow``.

        Raises InputError when fewer than two fit the arguments, or when the device has no memory for them (naming how many would fit).
        """
        if blocks < 2:
            raise InputError("kv_cache.blocks", f"{blocks} is too few: block 0 is reserved, so at least 2 are needed")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.device = device
        page = (blocks, block_tokens, shape.kv_heads, shape.head_dim)
        try:
            # Zeros, not garbage: padded rows read block 0, and a NaN there would spread through masked products.
            owned = {layer: [_pages(page, dtype, device, narrow) for _ in range(2)] for layer in range(shape.layers) if shape.owner_of(layer) == layer}
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if "memory" not in str(error):
                raise
            raise InputError("kv_cache.blocks", *_shortage(shape, blocks, block_tokens, dtype, device)) from None

        self.pages = [one for pair in owned.values() for one in pair]
        self.keys, self.values = ([owned[shape.owner_of(layer)][part] for layer in range(shape.layers)] for part in range(2))

    def bytes(self) -> int:
        """Return the bytes all pages take."""
        return sum(pages.nbytes for pages in self.pages)


def _pages(page: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, narrow: str | None) -> Tensor | NarrowPages:
    return torch.zeros(page, dtype=dtype, device=device) if narrow is None else NarrowPages(narrow, page, dtype, device)


def block_bytes(shape: Architecture, block_tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes one block takes over all layers."""
    return shape.kv_bytes_per_token(dtype.itemsize) * block_tokens


def free_bytes(device: torch.device) -> int:
    """Return the device's free memory now, bytes; on CPU what the operating system calls available (0 when it does not say)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 0


def _shortage(shape: Architecture, blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    each, free = block_bytes(shape, block_tokens, dtype), free_bytes(device)
    needed = blocks * each
    return f"{blocks} blocks need {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free", f"{max(0, free // each)} blocks fit"
