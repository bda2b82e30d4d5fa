"""Layers share keys and values in groups of a fixed size, however similar they are."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from serving.errors import InputError


class Every:
    """For networks that were trained so (cross-layer attention, arXiv 2405.12981); ``group`` layers each."""

    def __init__(self, *, group: int = 2) -> None:
        if group < 1:
            raise InputError("group", f"must be at least 1, got {group}")
        self.group = group

    def owners(self, similarity: Seq[float]) -> list[int]:
        """The first of each group."""
        return [layer - layer % self.group for layer in range(len(similarity) + 1)]
