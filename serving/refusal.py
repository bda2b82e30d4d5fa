"""What comes with a refusal: whether it is for good, and when it is worth coming back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.request import Request
    from serving.scheduler import Scheduler

FOR_GOOD = ("kv_capacity", "max_model_len")  # limits that no later attempt could pass


def retry_after_s(request: Request, queue: Scheduler) -> float | None:
    """Seconds after which the admission policy of ``queue``, which has just refused ``request``, says that coming back is worth it.

    Infinite where the policy says that it never will be; None where it says nothing.
    """
    told = getattr(queue.policies.admission, "retry_after_s", None)
    if told is None:
        return None
    seconds = told(request, queue)
    return math.inf if seconds is None else seconds
