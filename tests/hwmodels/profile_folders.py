"""Small synthetic profiles whose right answers are known, for the tests of the table model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from hwmodels.profiles.layerwise import PER_LAYER, PER_SEQUENCE, PER_STEP

CHUNKS, BEFORE, DECODES, KV = (16, 64, 256), (0, 128, 1024), (1, 4, 16), (16, 256, 2048)


SKEWED = ((0, 0), (16, 0), (16, 1024), (256, 0), (256, 1024))


def skew_alpha(decodes: int, chunk: float, before: float) -> float:
    """Alpha jumps with the batch, and falls with the chunk and its context."""
    return (0.1 if decodes < 8 else 0.5) * (1.0 - 0.001 * chunk if chunk else 1.0) * (1.0 - 0.0005 * before)


def attention_us(chunk: int, before: int, decodes: int, kv: int) -> float:
    """An attention that is linear in each coordinate, so that linear interpolation is exact."""
    return 5.0 + 0.02 * chunk + 1e-5 * chunk * before + 2e-3 * decodes * kv + 1e-4 * chunk * decodes


def write_layerwise(folder: Path, *, tensor_parallel: int = 1, attention: Callable[..., float] = attention_us) -> Path:
    """Write a profile of a linear GPU: each layer takes 1 us + 0.01 us a token."""
    inside = folder / f"tp{tensor_parallel}"
    inside.mkdir(parents=True)
    dense = [(name, tokens, 1.0 + 0.01 * tokens) for name in (*PER_LAYER, *PER_STEP) for tokens in (1, 8, 64, 512)]
    write_csv(inside / "dense.csv", "layer,tokens,time_us", dense)
    rows = [(name, sequences, 10.0 + sequences) for name in PER_SEQUENCE for sequences in (1, 16, 64)]
    write_csv(inside / "per_sequence.csv", "layer,sequences,time_us", rows)
    points = [(0, 0, n, kv) for n in DECODES for kv in KV]
    points += [(q, c, 0, 0) for q in CHUNKS for c in BEFORE]
    points += [(q, c, n, kv) for q in CHUNKS for c in BEFORE for n in DECODES for kv in KV]
    write_csv(inside / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", [(*p, attention(*p)) for p in points])
    skew = [(n, r, pc, kp, skew_alpha(n, pc, kp)) for pc, kp in SKEWED for n in (2, 4, 8, 16) for r in (0.25, 0.5, 0.75)]
    write_csv(inside / "skew.csv", "n,ratio,pc,kp,alpha", skew)
    return folder


def write_csv(path: Path, header: str, rows: Iterable[tuple]) -> None:
    """Write a CSV file of a header line and rows."""
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def edit(path: Path, line: int, text: str) -> None:
    """Replace one line (1-based) of a file; an empty text removes it."""
    lines = path.read_text().splitlines()
    lines[line - 1 : line] = [text] if text else []
    path.write_text("\n".join(lines) + "\n")
