"""A window of fixed length and size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.errors import InputError

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


class Fixed:
    """Collects requests until ``window_s`` after the first or until ``size`` wait; then open until the queue is empty."""

    def __init__(self, *, window_s: float = 0.05, size: int = 16) -> None:
        if not window_s >= 0:
            raise InputError("window_s", f"must not be negative, got {window_s}")
        if size < 1:
            raise InputError("size", f"must be at least 1, got {size}")
        self.window_s = window_s
        self.size = size
        self._opened_for_s: float | None = None  # the collection that has been opened by its size

    def open_s(self, batch: PlanBuilder) -> float:
        """When the present collection opens."""
        if batch.waiting >= self.size:
            self._opened_for_s = batch.waiting_since_s
        return batch.now_s if self._opened_for_s == batch.waiting_since_s else batch.waiting_since_s + self.window_s
