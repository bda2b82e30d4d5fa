"""Rows follow their requests through growth, roll-back, release and reuse; what is uploaded is what changed."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from engine.block_tables import BlockTables

CPU = torch.device("cpu")


def test_tables_follow_any_history_of_growth_rollback_and_release():
    rng = random.Random(4)
    tables, held = BlockTables(4, 12, CPU), {}
    for _ in range(2000):
        request = rng.randrange(6)
        if request in held and rng.random() < 0.15:
            tables.release(request)
            del held[request]
            continue
        if request not in held and len(held) == 4:
            continue
        blocks = held.get(request, [])
        keep = len(blocks) - (rng.random() < 0.2) * rng.randint(0, 2)
        held[request] = blocks = blocks[: max(0, keep)] + [rng.randint(1, 99) for _ in range(rng.randint(0, 2))]
        held[request] = blocks = blocks[:12] or [rng.randint(1, 99)]
        row = tables.row(request, blocks)
        assert tables.table[row, : len(blocks)].tolist() == blocks
        assert row != 0 and not tables.table[0].any()
        rows = {tables.row(other, theirs): other for other, theirs in held.items()}
        assert len(rows) == len(held)


def test_rows_run_out_and_come_back():
    tables = BlockTables(2, 4, CPU)
    tables.row(1, [5])
    tables.row(2, [6])
    with pytest.raises(RuntimeError, match="request 3: all 2"):
        tables.row(3, [7])
    tables.release(1)
    tables.release(99)
    assert tables.row(3, [7])


def test_only_changes_are_uploaded():
    # The device table kept apart, as on CUDA, but in host memory.
    tables = BlockTables(2, 4, torch.device("meta"))
    tables.row(1, [5, 6])
    tables.row(1, [5, 6])
    tables.row(1, [5, 6, 7])
    row = tables.row(2, [8])
    assert tables._changed == [(1, 0, 2), (1, 2, 3), (row, 0, 1)] and row == 2
