"""The first pages, the latest pages, and the hottest of those between."""

from __future__ import annotations

from collections.abc import Sequence

from serving.errors import InputError


class Window:
    """Keeps ``sink_blocks`` at the beginning (StreamingLLM's attention sinks, arXiv 2309.17453), the latest ``window_blocks``, and of the
    pages between them the ``hot_blocks`` that got the most attention; where nobody measures it, the latest of those.
    """

    entropy_below = 0.0  # it does not look

    def __init__(self, *, window_blocks: int = 256, sink_blocks: int = 1, hot_blocks: int = 0) -> None:
        if window_blocks < 1 or sink_blocks < 0 or hot_blocks < 0:
            raise InputError("window_blocks", f"needs at least 1 and no negative sink or hot blocks, got {window_blocks}, {sink_blocks}, {hot_blocks}")
        self.window_blocks, self.sink_blocks, self.hot_blocks = window_blocks, sink_blocks, hot_blocks
        self.most_blocks: int | None = window_blocks + sink_blocks + hot_blocks

    def drop(self, held: int, calm_steps: int, heat: Sequence[float] | None) -> Sequence[int]:
        """What is beyond the budget, coldest first, in order of position."""
        excess = held - self.most_blocks
        if excess <= 0:
            return ()
        first, end = self.sink_blocks, held - self.window_blocks
        if heat is None:
            return range(first, first + excess)
        return sorted(sorted(range(first, end), key=lambda position: (heat[position], position))[:excess])
