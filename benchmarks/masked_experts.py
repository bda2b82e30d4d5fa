"""CPU time of a layer's experts, all of them for all rows against only what the rows chose, and with rows and experts dropped.

    python benchmarks/masked_experts.py [--repeats 40]

The torch reference on one thread at the shape of a small mixture (64 experts, 6 a token, hidden 512, 256 wide): the kernels of
``engine.kernels.chosen`` skip the same work on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.kernels.reference import experts

COUNT, PER_TOKEN, HIDDEN, WIDTH = 64, 6, 512, 256
CASES = {"all experts, all rows": (True, 0.0, 0), "chosen only": (False, 0.0, 0), "half of the rows dropped": (False, 0.5, 0), "half of each row's experts": (False, 0.0, 3)}


def main() -> None:
    """Print medians in milliseconds by number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(COUNT, 2 * WIDTH, HIDDEN, generator=generator), torch.randn(COUNT, HIDDEN, WIDTH, generator=generator)
    print(f"{'ms, rows':<30}" + "".join(f"{rows:>9}" for rows in (1, 8, 64)))
    for name, (fixed, rows_dropped, each_dropped) in CASES.items():
        cells = []
        for rows in (1, 8, 64):
            x, share = torch.randn(rows, HIDDEN, generator=generator), torch.full((rows, PER_TOKEN), 1 / PER_TOKEN)
            chosen = torch.stack([torch.randperm(COUNT, generator=generator)[:PER_TOKEN] for _ in range(rows)])
            chosen[: round(rows * rows_dropped)] = -1
            chosen[:, PER_TOKEN - each_dropped :] = -1
            times = []
            for _ in range(repeats):
                begin = time.thread_time()
                experts(x, gate_up, down, chosen, share, fixed=fixed)
                times.append(time.thread_time() - begin)
            cells.append(f"{statistics.median(times) * 1e3:>9.2f}")
        print(f"{name:<30}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
