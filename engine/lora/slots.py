"""The adapters on the device: a fixed number of slots, filled while it serves, and what they add to a product."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.lora.adapter import Adapter, load_adapter, matrices, random_adapter
from serving.errors import InputError, nearest

Apply = Callable[[Tensor, Tensor, Tensor, Tensor, tuple[int, ...], Tensor], None]


class AdapterStore:
    """Adapters in host memory, by name: of a folder's subfolders, or random ones."""

    def __init__(self, shape: Architecture, rank: int, *, folder: Path | None, seed: int, names: Iterable[str] = ()) -> None:
        """``names`` are those that are known to come. Raises InputError for one that the folder lacks, or that is no adapter of this network."""
        self._shape = shape
        self._rank = rank
        self._folder = folder
        self._seed = seed
        self._held: dict[str, Adapter] = {}
        matrices(shape)
        if folder is not None:
            for name in names:
                self.get(name)

    def get(self, name: str) -> Adapter:
        """The adapter, read or made when it is first asked for."""
        if name not in self._held:
            if self._folder is None:
                self._held[name] = random_adapter(self._shape, self._rank, name, self._seed)
            else:
                known = sorted(one.name for one in self._folder.iterdir() if one.is_dir()) if self._folder.is_dir() else []
                if name not in known:
                    raise InputError(str(self._folder), f"holds no adapter '{name}'", nearest(name, known))
                self._held[name] = load_adapter(self._folder / name, self._shape, self._rank)
        return self._held[name]


class LoraSlots:
    """``slots`` adapters of one rank: per layer and matrix A [slots, parts · rank, inputs] and B [slots, outputs, rank]."""

    def __init__(self, shape: Architecture, slots: int, rank: int, store: AdapterStore, apply: Apply, *, dtype: torch.dtype, device: torch.device) -> None:
        self._store = store
        self._apply = apply
        self._sizes = matrices(shape)
        self._layers = [
            {
                key: (
                    torch.zeros(slots, len(one.widths) * rank, one.inputs, dtype=dtype, device=device),
                    torch.zeros(slots, sum(one.widths), rank, dtype=dtype, device=device),
                )
                for key, one in self._sizes.items()
            }
            for _ in range(shape.layers)
        ]

    def put(self, slot: int, name: str) -> None:
        """Copy the adapter ``name`` into a slot, on the current stream: kernels issued before still see what was there."""
        for held, low in zip(self._layers, self._store.get(name)):
            for key, (a, b) in held.items():
                a[slot].copy_(low[key].a)
                b[slot].copy_(low[key].b)

    def add(self, y: Tensor, x: Tensor, layer: int, key: str, adapters: Tensor) -> Tensor:
        """Add to ``y`` [T, outputs], in place, what each row's adapter makes of ``x`` [T, inputs]; ``adapters`` [T] are slots, -1: none."""
        a, b = self._layers[layer][key]
        self._apply(y, x, a, b, self._sizes[key].widths, adapters)
        return y

    def bytes(self) -> int:
        """Device memory of all slots."""
        return sum(one.numel() * one.element_size() for layer in self._layers for pair in layer.values() for one in pair)
