"""Small scenarios for the tests of studies, as plain data, and tasks that worker processes can import."""

from __future__ import annotations

import copy
import gc
import io
import os
import re
from pathlib import Path
from typing import Any

from serving.errors import InputError

SMALL: dict[str, Any] = {
    "name": "small", "seed": 5, "llm": "llama-3.1-8b", "max_model_len": 4096, "cluster": {"gpu": "l40s"},
    "workload": {
        "requests": 400, "arrivals": {"process": "poisson", "rate_rps": 24.0},
        "prompt_tokens": {"dist": "lognormal", "median": 300, "sigma": 0.7, "max": 2048},
        "output_tokens": {"dist": "lognormal", "median": 60, "sigma": 0.5, "max": 256},
    },
    "slo": {"attainment": 0.9, "default": {"ttft_ms": 400, "tpot_ms": 45}},
}  # fmt: skip
PLAN: dict[str, Any] = {
    "candidates": {"gpus": ["l40s", {"name": "a100-sxm-80gb", "price_usd_per_h": 1.2}], "tensor_parallel": [1, 2], "max_batch_tokens": [512, 4096]},
    "replicas": {"min": 1, "max": 5}, "replications": {"min": 2, "max": 4}, "top": 3,
}  # fmt: skip


def planned(**changes: Any) -> dict[str, Any]:
    """The small scenario with a plan section, whose keys ``changes`` replace."""
    return copy.deepcopy({**SMALL, "plan": {**PLAN, **changes}})


def double(value: int) -> int:
    return 2 * value


def die(value: int) -> int:
    os._exit(13)


def die_once(marker: str) -> str:
    if not Path(marker).exists():
        Path(marker).touch()
        os._exit(13)
    return "second try"


def refuse(value: int) -> int:
    raise InputError("here", "cannot", "hint")


def stumble(value: int) -> int:
    raise ZeroDivisionError("oh")


def collector(_: int) -> list:
    return [gc.isenabled(), *gc.get_threshold(), gc.get_freeze_count() > 0]


class Terminal(io.StringIO):
    """A terminal; its width is what the environment says in COLUMNS."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What is on it, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue()).splitlines()
