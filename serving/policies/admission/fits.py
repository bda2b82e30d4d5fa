"""What can never fit is refused at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.request import Request

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


class Fits:
    """Refuses a prompt that the KV pool or the maximum length cannot hold; optionally a queue that is too long."""

    def __init__(self, *, max_queue: int | None = None) -> None:
        self.max_queue = max_queue

    def admit(self, request: Request, queue: Scheduler) -> str | None:
        """The name of the limit, or None."""
        pool = queue.pool
        if request.prompt_tokens > pool.total * pool.block_tokens:
            return "kv_capacity"
        if request.max_output_tokens < 1:
            return "max_model_len"
        if self.max_queue is not None and queue.waiting_count >= self.max_queue:
            return "max_queue"
        return None
