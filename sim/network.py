"""Transfers over the links of a topology, as flows that share every link max-min fairly.

A transfer of n operations waits its route's latency plus n times the link's per-operation time, then moves its bytes at a
rate that changes only when some flow on a connected link starts or ends. Flows with the same route, cap and priority form
a group with one rate and one clock of bytes served per flow, so that an event costs O(log flows) plus a re-solve of the
*groups* whose rates it changes (``sim.settle``). The core runs on virtual time; with a SimPy environment it
arms one versioned wake at its next event.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

from hwmodels.links import alignment_efficiency
from serving.errors import InputError, nearest
from sim.environment import TRANSFER, Environment
from sim.fair_share import max_min_rates
from sim.flows import INFINITY, Flow, Group, GroupKey, Load
from sim.settle import settle
from sim.topology import Channel, LinkGraph


class Network:
    """Flows over a link graph. Pure virtual time: ``next_completion_s`` says when to call ``advance`` next."""

    def __init__(self, topology: LinkGraph, env: Environment | None = None) -> None:
        """``env``, where given, drives this clock: it is woken after arrivals and before step ends of the same instant."""
        self.graph = topology
        self.now_s = float(env.now) if env is not None else 0.0
        self.events = 0  # flow starts and ends processed
        self.settled = 0  # groups that were solved again, over all events
        self._env = env
        self._armed_s = INFINITY
        self._wake_version = 0
        self._inside = False
        self._next_flow = 0
        self._next_group = 0
        self._starts: list[tuple[float, int, Flow]] = []
        self._ends: list[tuple[float, int, Group, int]] = []
        self._groups: dict[GroupKey, Group] = {}
        self._loads: dict[int, Load] = {}
        self._dirty_groups: dict[Group, None] = {}
        self._dirty_loads: dict[Load, None] = {}
        self._factors: dict[str, float] = {}  # of degraded links, by the beginning of their names
        self._moved_bytes: dict[int, float] = {}  # by channel, of flows that ended: the other side of check()

    # --- transfers ---------------------------------------------------------------------------------------------------

    def start(
        self,
        src: str,
        dst: str,
        size_bytes: float,
        on_done: Callable[[Flow], None] | None = None,
        priority: int = 0,
        *,
        operations: int = 1,
        offset_bytes: int = 0,
    ) -> Flow:
        """Start a transfer now. ``on_done(flow)`` is called at its end and may start others.

        A smaller ``priority`` takes bandwidth first. ``operations`` is the number of copies the bytes are cut into (each
        pays the link's per-operation time), ``offset_bytes`` how far each starts off a granule boundary.
        Raises InputError for unknown components, no route, or sizes below zero.
        """
        if size_bytes < 0 or operations < 1 or not math.isfinite(size_bytes):
            raise InputError(
                "transfer", f"{size_bytes} bytes in {operations} operations", "bytes must be finite and not negative, operations at least 1"
            )
        self._follow_clock()
        route = self.graph.route(src, dst)
        aligned = alignment_efficiency(size_bytes / operations, offset_bytes, route.granule_bytes)
        uses = tuple((channel.index, times) for channel, times in route.channels)
        for channel, _ in route.channels:
            if channel.index not in self._loads:
                load = self._loads[channel.index] = Load(channel)
                load.capacity = self._capacity(channel)
        cap = max(1, int(route.bytes_per_s * aligned)) if uses else INFINITY
        flow = Flow(self._next_flow, src, dst, size_bytes, route, (uses, cap, priority), self.now_s)
        self._next_flow += 1
        flow.on_done = on_done
        heapq.heappush(self._starts, (self.now_s + route.latency_s + operations * route.operation_s, flow.id, flow))
        self._arm()
        return flow

    def cancel(self, flow: Flow) -> None:
        """Stop a transfer; what it has moved stays counted on its links. Does nothing when it has ended."""
        if flow.state not in ("waiting", "moving"):
            return
        self._follow_clock()
        if flow.state == "moving":
            group = flow.group
            self._sync(group)
            self._count_moved(flow, flow.bytes - max(0.0, flow.target - group.served))
            self._leave(group)
            self._resolve()
        flow.state = "cancelled"
        flow.finish_s = self.now_s
        self._arm()

    def moved_bytes(self, flow: Flow) -> float:
        """Bytes that ``flow`` has moved by now."""
        if flow.state != "moving":
            return flow.bytes if flow.state == "done" else 0.0
        self._follow_clock()
        served = flow.group.served + flow.group.rate * (self.now_s - flow.group.at_s)
        return min(flow.bytes, max(0.0, flow.bytes - (flow.target - served)))

    def rate(self, flow: Flow) -> float:
        """Bytes per second that ``flow`` moves at now."""
        return flow.group.rate if flow.state == "moving" else 0.0

    def set_link_factor(self, name: str, factor: float) -> None:
        """Degrade (or restore, 1.0) every channel whose name starts with ``name`` to ``factor`` of its rate; 0 stalls its flows.

        Factors of different names that both match a channel multiply. Channels exist once somebody has asked for a route over them
        (``check_link``). Raises InputError when none matches or the factor is not in [0, 1].
        """
        if not 0.0 <= factor <= 1.0:
            raise InputError("link", f"factor {factor} is outside [0, 1]")
        self.check_link(name, "link")
        self._follow_clock()
        if factor == 1.0:
            self._factors.pop(name, None)
        else:
            self._factors[name] = factor
        for load in self._loads.values():
            if not load.channel.name.startswith(name):
                continue
            load.capacity = self._capacity(load.channel)
            load.peaks = {}  # whatever it carries is solved again
            self._dirty_loads[load] = None
        self._resolve()
        self._arm()

    def check_link(self, name: str, where: str) -> None:
        """Raise InputError, blaming ``where``, unless the name of some channel that a route has crossed begins with ``name``."""
        known = [channel.name for channel in self.graph.channels()]
        if not any(channel.startswith(name) for channel in known):
            raise InputError(where, f"no link that is crossed is named '{name}'", nearest(name, known))

    def _capacity(self, channel: Channel) -> float:
        return channel.bytes_per_s * math.prod(factor for name, factor in self._factors.items() if channel.name.startswith(name))

    # --- time --------------------------------------------------------------------------------------------------------

    def next_completion_s(self) -> float:
        """The instant to advance to next: a flow starts to move or completes. Infinity when nothing is under way."""
        while self._ends and self._stale(self._ends[0]):
            heapq.heappop(self._ends)
        while self._starts and self._starts[0][2].state != "waiting":
            heapq.heappop(self._starts)
        first_end = self._ends[0][0] if self._ends else INFINITY
        return min(first_end, self._starts[0][0]) if self._starts else first_end

    def advance(self, now_s: float) -> None:
        """Run all flow events up to and including ``now_s`` and set the clock to it. Raises ValueError when that is in the past."""
        if now_s < self.now_s:
            raise ValueError(f"cannot advance to {now_s}: the network is at {self.now_s}")
        self._inside = True
        while (due_s := self.next_completion_s()) <= now_s:
            self.now_s = max(self.now_s, due_s)
            done = self._run_instant(due_s)
            self._resolve()
            for flow in done:
                if flow.on_done is not None:
                    flow.on_done(flow)
        self._inside = False
        self.now_s = now_s

    def _run_instant(self, due_s: float) -> list[Flow]:
        """Process every start and end at ``due_s``; return the flows that completed, by id."""
        done: list[Flow] = []
        while self._ends and self._ends[0][0] <= due_s:
            entry = heapq.heappop(self._ends)
            if not self._stale(entry):
                self._complete(entry[2], done)
        while self._starts and self._starts[0][0] <= due_s:
            flow = heapq.heappop(self._starts)[2]
            if flow.state == "waiting":
                self._begin(flow, done)
        done.sort()
        return done

    def _begin(self, flow: Flow, done: list[Flow]) -> None:
        self.events += 1
        if flow.bytes == 0 or flow.key[1] == INFINITY:
            self._finish(flow, done)
            return
        group = flow.group = self._group_of(flow.key)
        self._sync(group)
        flow.state = "moving"
        flow.target = group.served + flow.bytes
        heapq.heappush(group.heap, (flow.target, flow))
        group.count += 1
        for index, times in group.uses:
            load = self._loads[index]
            load.groups[group] = times
            load.demand += times * group.cap
            if load.flows == 0:
                load.busy_since_s = self.now_s
            load.flows += 1
            if load.binding:
                self._dirty_loads[load] = None
        self._dirty_groups[group] = None

    def _complete(self, group: Group, done: list[Flow]) -> None:
        """Take the flows whose bytes have all moved out of ``group``."""
        self._drop_cancelled(group)
        self._sync(group, group.heap[0][0])
        while group.heap and group.heap[0][0] <= group.served:
            flow = heapq.heappop(group.heap)[1]
            if flow.state == "moving":
                self._count_moved(flow, flow.bytes)
                self._leave(group)
                self.events += 1
                self._finish(flow, done)

    def _finish(self, flow: Flow, done: list[Flow]) -> None:
        flow.state = "done"
        flow.finish_s = self.now_s
        done.append(flow)

    def _leave(self, group: Group) -> None:
        """One flow leaves ``group``; links that could bind before are solved again."""
        for index, times in group.uses:
            load = self._loads[index]
            if load.binding:
                self._dirty_loads[load] = None
            load.demand -= times * group.cap
            load.flows -= 1
            if load.flows == 0:
                load.busy_s += self.now_s - load.busy_since_s
        group.count -= 1
        self._dirty_groups[group] = None
        if group.count == 0:
            for index, _ in group.uses:
                self._loads[index].groups.pop(group, None)
            self._groups.pop(group.key, None)
            group.version += 1
            self._dirty_groups.pop(group)

    # --- groups ------------------------------------------------------------------------------------------------------

    def _group_of(self, key: GroupKey) -> Group:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(self._next_group, key, self.now_s)
            self._next_group += 1
        return group

    def _sync(self, group: Group, served: float | None = None) -> None:
        """Bring the group's clock and its links' counters to now; ``served`` states the clock where it is known exactly."""
        new = group.served + group.rate * (self.now_s - group.at_s) if served is None else max(served, group.served)
        moved = (new - group.served) * group.count
        if moved:
            for index, times in group.uses:
                self._loads[index].carried_bytes += times * moved
        group.served = new
        group.at_s = self.now_s

    def _count_moved(self, flow: Flow, size_bytes: float) -> None:
        for index, times in flow.group.uses:
            self._moved_bytes[index] = self._moved_bytes.get(index, 0.0) + times * size_bytes

    def _drop_cancelled(self, group: Group) -> None:
        while group.heap and group.heap[0][1].state != "moving":
            heapq.heappop(group.heap)

    def _resolve(self) -> None:
        """Give new rates to the groups that the last events reach, and to nothing else."""
        if not self._dirty_groups and not self._dirty_loads:
            return
        for group, rate in settle(self._dirty_groups, self._dirty_loads, self._loads).items():
            self.settled += 1
            if rate != group.rate or group in self._dirty_groups:
                self._sync(group)
                group.rate = rate
                self._schedule(group)
        self._dirty_groups.clear()
        self._dirty_loads.clear()

    def _schedule(self, group: Group) -> None:
        """Put the group's next completion into the queue; older entries become stale."""
        group.version += 1
        self._drop_cancelled(group)
        if group.rate > 0:
            end_s = group.at_s + (group.heap[0][0] - group.served) / group.rate
            heapq.heappush(self._ends, (end_s, group.number, group, group.version))
        if len(self._ends) > 64 + 4 * len(self._groups):
            self._ends = [entry for entry in self._ends if not self._stale(entry)]
            heapq.heapify(self._ends)

    @staticmethod
    def _stale(entry: tuple[float, int, Group, int]) -> bool:
        return entry[3] != entry[2].version

    # --- SimPy -------------------------------------------------------------------------------------------------------

    def _follow_clock(self) -> None:
        """Catch up with the environment's clock before something changes at its present instant."""
        if self._env is not None and not self._inside and self._env.now > self.now_s:
            self.advance(self._env.now)

    def _arm(self) -> None:
        """Schedule one wake at the next event unless the one that is armed is already right."""
        if self._env is None or self._inside:
            return
        due_s = self.next_completion_s()
        if due_s == self._armed_s:
            return
        self._armed_s = due_s
        self._wake_version += 1
        if due_s < INFINITY:
            version = self._wake_version
            self._env.at(due_s, lambda _: self._wake(version), TRANSFER)

    def _wake(self, version: int) -> None:
        if version != self._wake_version:
            return
        self._armed_s = INFINITY
        self.advance(self._env.now)
        self._arm()

    # --- reports and checks ------------------------------------------------------------------------------------------

    def link_report(self) -> list[dict[str, Any]]:
        """Per channel used: bytes carried, seconds with a flow on it, and throughput over that *wall* time.

        Wall time is what counts: dividing by the sum of the transfers' durations under-reports by the number that overlap.
        """
        self._follow_clock()
        for group in self._groups.values():
            self._sync(group)
        rows = []
        for load in sorted(self._loads.values(), key=lambda load: load.channel.index):
            busy_s = load.busy_s + (self.now_s - load.busy_since_s if load.flows else 0.0)
            rate = load.carried_bytes / busy_s if busy_s else 0.0
            rows.append(
                {
                    "link": load.channel.name,
                    "carried_bytes": load.carried_bytes,
                    "busy_s": busy_s,
                    "throughput_bytes_per_s": rate,
                    "utilisation": rate / load.channel.bytes_per_s,
                }
            )
        return rows

    def check(self) -> None:
        """Raise AssertionError unless bytes are conserved on every link and no link carries more than its rate."""
        for group in self._groups.values():
            self._sync(group)
        under_way: dict[int, float] = {}
        rates: dict[int, float] = {}
        for group in self._groups.values():
            moved = sum(flow.bytes - max(0.0, target - group.served) for target, flow in group.heap if flow.state == "moving")
            for index, times in group.uses:
                under_way[index] = under_way.get(index, 0.0) + times * moved
                rates[index] = rates.get(index, 0.0) + times * group.count * group.rate
        for index, load in self._loads.items():
            expected = self._moved_bytes.get(index, 0.0) + under_way.get(index, 0.0)
            slack = 1e-6 + 1e-9 * expected
            assert abs(load.carried_bytes - expected) <= slack, (
                f"{load.channel.name} carried {load.carried_bytes} bytes, its flows moved {expected}"
            )
            assert rates.get(index, 0.0) <= load.capacity * (1 + 1e-9), f"{load.channel.name} carries more than its rate"
            assert load.flows == sum(group.count for group in load.groups), load.channel.name

    def full_rates(self) -> dict[int, float]:
        """Rates of all moving flows by id, solved afresh over the whole network: what the incremental rates must equal."""
        groups = sorted((group for group in self._groups.values() if group.count), key=_number)
        capacity = {index: load.capacity for index, load in self._loads.items()}
        solved = dict(zip(groups, max_min_rates(groups, capacity))) if groups else {}
        return {flow.id: rate for group, rate in solved.items() for _, flow in group.heap if flow.state == "moving"}


def _number(group: Group) -> int:
    return group.number
