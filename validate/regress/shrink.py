"""The smallest workload that still fails: delta debugging over the requests, then over their sizes.

Source: A. Zeller and R. Hildebrandt, IEEE Trans. Software Eng. 28 (2002), algorithm ddmin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]  # a line of a plain-jsonl trace
Fails = Callable[[list[Row]], bool]


def shrink(rows: Sequence[Row], fails: Fails, *, requests: int = 8_000, attempts: int = 1000) -> list[Row]:
    """Return a part of ``rows``, simplified, that still fails.

    Without a budget no request could be left out of it. Stops after ``attempts`` calls of ``fails``, or once those have been
    given ``requests`` rows altogether: counts, not seconds, so that the result is the same on every machine.
    """
    spent = [0, 0]

    def still_fails(part: list[Row]) -> bool:
        if not part or spent[0] >= requests or spent[1] >= attempts:
            return False
        spent[0] += len(part)
        spent[1] += 1
        return fails(part)

    kept = _fewest(_shortest_beginning(list(rows), still_fails), still_fails)
    for index in range(len(kept)):
        kept = _simplest(kept, index, still_fails)
    return kept


def _shortest_beginning(rows: list[Row], fails: Fails) -> list[Row]:
    """What comes after the failure is of no interest: halve towards it."""
    fails_at, passes_at = len(rows), 0
    while fails_at - passes_at > 1:
        middle = (fails_at + passes_at) // 2
        fails_at, passes_at = (middle, passes_at) if fails(rows[:middle]) else (fails_at, middle)
    return rows[:fails_at]


def _fewest(rows: list[Row], fails: Fails) -> list[Row]:
    pieces = 2
    while len(rows) > 1:
        size = -(-len(rows) // pieces)
        for start in range(0, len(rows), size):
            rest = rows[:start] + rows[start + size :]
            if fails(rest):
                rows = rest
                pieces = max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(rows))
    return rows


def _simplest(rows: list[Row], index: int, fails: Fails) -> list[Row]:
    """Make one request smaller, less unusual and earlier, as long as it still fails."""
    for key in ("hash_ids", "class", "priority", "adapter"):
        if key in rows[index]:
            without = {name: value for name, value in rows[index].items() if name != key and not (key == "hash_ids" and name == "hash_tokens")}
            trial = [*rows[:index], without, *rows[index + 1 :]]
            rows = trial if fails(trial) else rows
    for key in ("output_tokens", "prompt_tokens"):
        while rows[index][key] > 1 and not (key == "prompt_tokens" and "hash_ids" in rows[index]):
            trial = [*rows[:index], {**rows[index], key: rows[index][key] // 2}, *rows[index + 1 :]]
            if not fails(trial):
                break
            rows = trial
    before = rows[index - 1]["arrival_s"] if index else 0.0
    if rows[index]["arrival_s"] > before:
        trial = [*rows[:index], {**rows[index], "arrival_s": before}, *rows[index + 1 :]]
        rows = trial if fails(trial) else rows
    return rows
