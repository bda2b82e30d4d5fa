"""The coldest page leaves, of those about as cold the one used longest ago; what is hot enough stays."""

from __future__ import annotations

from collections import OrderedDict

from serving.errors import InputError

HOTTEST = 255
LEVELS = HOTTEST.bit_length() + 1  # by the bits of a page's heat: 0, 1, 2 to 3, 4 to 7, ..., 128 to 255


class Heat:
    """Heat counts the times that a page was read back, 0 to 255. It halves for all when one would exceed that, and after ``decay_uses`` reads.

    Pages of a tier queue by the bits of their heat, so that a page that is wanted again and again outlives long prompts that are
    read once, and halving is one shift of the queues. Without decay, pages of talks that are over stay for ever. With ``pin_at``, a power of two, a page as hot is pinned until it has cooled.
    """

    def __init__(self, *, decay_uses: int | None = 20_000, pin_at: int | None = None) -> None:
        if decay_uses is not None and decay_uses < 1:
            raise InputError("decay_uses", f"must be at least 1, got {decay_uses}")
        if pin_at is not None and pin_at not in [1 << bit for bit in range(LEVELS - 1)]:
            raise InputError("pin_at", f"must be a power of two up to {(HOTTEST + 1) // 2}, got {pin_at}")
        self._decay_uses = decay_uses
        self._cold_levels = LEVELS if pin_at is None else pin_at.bit_length()
        self._heat: dict[object, tuple[int, int]] = {}  # with how often all had cooled when it was noted
        self._queues: dict[int, list[OrderedDict[object, None]]] = {}  # by tier, by level, the oldest first
        self._cooled = self._uses = 0

    def heat(self, key: object) -> int:
        """Of a page now."""
        noted = self._heat.get(key)
        return 0 if noted is None else noted[0] >> (self._cooled - noted[1])

    def stored(self, tier: int, key: object) -> None:
        """The newest of its level."""
        queues = self._queues.get(tier)
        if queues is None:
            queues = self._queues[tier] = [OrderedDict() for _ in range(LEVELS)]
        queues[self.heat(key).bit_length()][key] = None

    def used(self, key: object) -> None:
        """Hotter by one."""
        self._uses += 1
        if self._decay_uses is not None and self._uses % self._decay_uses == 0:
            self._cool()
        if self.heat(key) == HOTTEST:
            self._cool()
        self._heat[key] = self.heat(key) + 1, self._cooled

    def left(self, tier: int, key: object) -> None:
        """Not to be named again."""
        del self._queues[tier][self.heat(key).bit_length()][key]

    def forgotten(self, key: object) -> None:
        """If it comes back it is cold."""
        self._heat.pop(key, None)

    def victim(self, tier: int) -> object | None:
        """The oldest of the coldest level."""
        for queue in self._queues.get(tier, ())[: self._cold_levels]:
            if queue:
                return next(iter(queue))
        return None

    def _cool(self) -> None:
        self._cooled += 1
        for queues in self._queues.values():
            queues[0].update(queues[1])
            queues[1:] = [*queues[2:], OrderedDict()]
