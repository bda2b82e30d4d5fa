"""The running sequences, grouped by priority in admission order, so that naming a victim costs O(classes)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from serving.sequence import DECODING, Sequence

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


class Running:
    """Insertion-ordered sets of sequences by priority (smaller is more urgent)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: dict[int, dict[Sequence, None]] = {}
        self.count = 0

    def add(self, seq: Sequence) -> None:
        """Append ``seq``; it is now the latest of its priority."""
        group = self._groups.get(seq.request.priority)
        if group is None:
            group = self._groups[seq.request.priority] = {}
        group[seq] = None
        self.count += 1

    def remove(self, seq: Sequence) -> None:
        """Remove ``seq``; KeyError when it is not here."""
        del self._groups[seq.request.priority][seq]
        self.count -= 1

    def latest(self, less_urgent_than: int | None = None) -> Sequence | None:
        """The sequence admitted last, among those strictly less urgent than the given priority."""
        last = None
        for priority, group in self._groups.items():
            if group and (less_urgent_than is None or priority > less_urgent_than):
                seq = next(reversed(group))
                if last is None or seq.admission_index > last.admission_index:
                    last = seq
        return last

    def least_urgent(self, less_urgent_than: int | None = None) -> Sequence | None:
        """The sequence admitted last within the least urgent priority, if that is strictly less urgent than the given one."""
        priorities = [priority for priority, group in self._groups.items() if group]
        if not priorities or (less_urgent_than is not None and max(priorities) <= less_urgent_than):
            return None
        return next(reversed(self._groups[max(priorities)]))

    def less_urgent(self, than: int | None) -> Iterator[Sequence]:
        """All running sequences strictly less urgent than ``than`` (all of them for None), in admission order."""
        return (seq for seq in self if than is None or seq.request.priority > than)

    def computed(self, seq: Sequence) -> int:
        """KV entries that ``seq`` holds now."""
        return self._scheduler.computed_at(seq, self._scheduler.clock) if seq.state == DECODING else seq.computed

    def __iter__(self) -> Iterator[Sequence]:
        groups = [group for group in self._groups.values() if group]
        if len(groups) == 1:
            return iter(list(groups[0]))
        return iter(sorted((seq for group in groups for seq in group), key=lambda seq: seq.admission_index))

    def __len__(self) -> int:
        return self.count
