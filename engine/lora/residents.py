"""Which slot holds which adapter: the scheduler's slots decide who stays (``serving.adapters``), here are the places."""

from __future__ import annotations

from serving.adapters import AdapterSlots

NO_SLOT = -1


class Residents:
    """Gives the adapters that the scheduler holds loaded a number each; one that stays keeps its number."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._at: dict[str, int] = {}
        self._free = list(range(slots.slots - 1, -1, -1))

    def refresh(self) -> list[tuple[int, str]]:
        """Follow the plan that was just made; returns what must be copied into which slot before its step."""
        loaded = self._slots.loaded()
        staying = set(loaded)
        for name in [name for name in self._at if name not in staying]:
            self._free.append(self._at.pop(name))
        fresh = [name for name in loaded if name not in self._at]
        for name in fresh:
            self._at[name] = self._free.pop()
        return [(self._at[name], name) for name in fresh]

    def slot(self, name: str) -> int:
        """The slot of a running sequence's adapter."""
        return self._at[name] if name else NO_SLOT
