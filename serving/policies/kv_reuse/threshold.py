"""Layers reuse the keys and values of an earlier layer that is similar enough."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from serving.errors import InputError


class Threshold:
    """A layer joins the group of the layer before it while it is certain to be closer than ``cosine`` to the group's first layer.

    Only neighbours were compared. Angles between them add up to at least the angle to the first layer, so the cosine of their sum
    is what is certain. ``group`` bounds the layers that share.
    """

    def __init__(self, *, cosine: float = 0.92, group: int = 2) -> None:
        if not 0 < cosine < 1:
            raise InputError("cosine", f"must lie between 0 and 1, got {cosine}")
        if group < 1:
            raise InputError("group", f"must be at least 1, got {group}")
        self.cosine = cosine
        self.group = group

    def owners(self, similarity: Seq[float]) -> list[int]:
        """Compare along the layers."""
        owners, angle = [0], 0.0
        for layer, cosine in enumerate(similarity, start=1):
            angle += math.acos(cosine)
            if angle < math.pi and math.cos(angle) > self.cosine and layer - owners[-1] < self.group:
                owners.append(owners[-1])
            else:
                owners.append(layer)
                angle = 0.0
        return owners
