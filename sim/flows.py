"""What the network keeps of a transfer, of a group of like transfers, and of a channel that carries them."""

from __future__ import annotations

import math
from collections.abc import Callable

from sim.topology import Channel, Route

INFINITY = math.inf
Peaks = dict[int, float]
GroupKey = tuple[tuple[tuple[int, int], ...], float, int]  # (channel index, crossings) ..., cap in bytes/s, priority


class Flow:
    """One transfer. ``state`` goes waiting (latency) -> moving -> done, or to cancelled; times are seconds of virtual time."""

    __slots__ = ("bytes", "dst", "finish_s", "group", "id", "key", "on_done", "priority", "route", "src", "start_s", "state", "target")

    def __init__(self, number: int, src: str, dst: str, size_bytes: float, route: Route, key: GroupKey, start_s: float) -> None:
        self.id = number
        self.src = src
        self.dst = dst
        self.bytes = size_bytes
        self.priority = key[2]
        self.route = route
        self.start_s = start_s
        self.finish_s = INFINITY
        self.state = "waiting"
        self.on_done: Callable[[Flow], None] | None = None
        self.key: GroupKey = key
        self.group: Group | None = None
        self.target = 0.0  # the group's clock at which this flow has moved all its bytes

    def __lt__(self, other: Flow) -> bool:
        return self.id < other.id


class Group:
    """Flows that share route, cap and priority, hence one rate. ``served`` counts bytes moved per flow since the group began."""

    __slots__ = ("at_s", "cap", "count", "heap", "key", "number", "priority", "rate", "served", "uses", "version")

    def __init__(self, number: int, key: GroupKey, now_s: float) -> None:
        self.number = number
        self.key = key
        self.uses, self.cap, self.priority = key
        self.count = 0
        self.rate = 0.0
        self.served = 0.0
        self.at_s = now_s
        self.heap: list[tuple[float, Flow]] = []
        self.version = 0


class Load:
    """What one channel carries: its groups, the sum of their caps, bytes carried, time with any flow on it."""

    __slots__ = ("busy_s", "busy_since_s", "capacity", "carried_bytes", "channel", "demand", "flows", "groups", "peaks")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.capacity = channel.bytes_per_s
        self.groups: dict[Group, int] = {}  # with how often each crosses the channel
        self.peaks: Peaks | None = None  # highest rate by priority if the channel is full, None if it is not
        self.demand = 0  # integer bytes/s, so that no rounding error builds up
        self.flows = 0
        self.carried_bytes = 0.0
        self.busy_s = 0.0
        self.busy_since_s = 0.0

    @property
    def binding(self) -> bool:
        """Whether the flows could ask for more than the channel carries; one that cannot bind connects nothing."""
        return self.demand > self.capacity
