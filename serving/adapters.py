"""Adapters in slots: a replica holds a few of them beside the trunk, and loads others while it serves.

An adapter (LoRA) occupies one of N slots while sequences that use it run. A request whose adapter is in no slot can run only where
a slot is empty or holds one that nobody uses; until then others pass it. A slot in use is never given away, so running
sequences keep the adapter, and the version of it, that they began with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from serving.llm import Llm

if TYPE_CHECKING:
    from serving.policies.protocols import Adapters
    from serving.scenario import Scenario
    from serving.scheduler import Scheduler

ADAPTER_WEIGHT_BYTES = 2  # adapters stay at bf16 beside a quantised trunk


def adapter_bytes(llm: Llm, rank: int, tensor_parallel: int = 1) -> int:
    """Bytes of a LoRA adapter on each GPU: A [rank, inputs] and B [outputs, rank] for every dense matrix of every layer (Hu et al. 2021)."""
    matrices = [*llm.attention_matrices(tensor_parallel), *llm.mlp_matrices(llm.intermediate, tensor_parallel)]
    return llm.layers * rank * ADAPTER_WEIGHT_BYTES * sum(matrix.inputs + matrix.outputs for matrix in matrices)


def served_names(scenario: Scenario) -> tuple[str, ...]:
    """The adapters that a server of ``scenario`` has: those that its workload names, where it has slots for any."""
    mix = scenario.workload.adapters
    return () if scenario.adapters is None or mix is None else mix.all_names()


class AdapterSlots:
    """The slots of one replica. ``max_bypasses`` bounds how many others may pass a request that waits for a slot."""

    def __init__(self, slots: int, policy: Adapters, max_bypasses: int) -> None:
        self.slots = slots
        self.max_bypasses = max_bypasses
        self.loads = 0
        self.hits = 0  # sequences that found their adapter loaded
        self._policy = policy
        self._users: dict[str, int] = {}  # adapters in use, with the running sequences of each
        self._idle: OrderedDict[str, None] = OrderedDict()  # loaded, used by nobody; the one used longest ago first

    @property
    def in_use(self) -> int:
        """Adapters that running sequences use."""
        return len(self._users)

    def loaded(self) -> list[str]:
        """The adapters in slots, idle ones last."""
        return [*self._users, *self._idle]

    def room_for(self, names: Iterable[str]) -> bool:
        """Whether sequences with all these adapters could take seats now."""
        return len({name for name in names if name and name not in self._users}) <= self.slots - len(self._users)

    def take(self, name: str, queue: Scheduler) -> bool:
        """A sequence that uses ``name`` takes a seat; returns whether the adapter has to be loaded. ``room_for`` holds."""
        users = self._users.get(name, 0)
        known = users or name in self._idle
        self._users[name] = users + 1
        if known:
            self.hits += 1
            self._idle.pop(name, None)
            return False
        self.loads += 1
        if len(self._users) + len(self._idle) > self.slots:
            del self._idle[self._policy.evict(tuple(self._idle), queue)]
        return True

    def give_back(self, name: str) -> None:
        """A sequence that uses ``name`` runs no more."""
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            self._idle[name] = None

    def check(self, running: Iterable[str]) -> None:
        """Raise AssertionError unless the users are those of ``running``, the adapters of all running sequences, within the slots."""
        counted: dict[str, int] = {}
        for name in running:
            if name:
                counted[name] = counted.get(name, 0) + 1
        assert counted == self._users, f"users {self._users} are not those that run: {counted}"
        assert len(self._users) + len(self._idle) <= self.slots and not self._users.keys() & self._idle.keys()
