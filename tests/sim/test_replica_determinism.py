"""Equal input gives equal bytes: in another process, and whatever the seed of Python's hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:3]
from drivers import random_aborts, random_arrivals, random_case, serve
for seed in (2, 7, 8, 20, 31, 104, 105):
    case = random_case(seed, replicas=1 + seed % 3)
    arrivals = random_arrivals(seed, case)
    print(serve(case, arrivals, aborts=random_aborts(seed, arrivals)).comparable())
"""


def test_across_processes_and_hash_seeds():
    outputs = []
    for hash_seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", SCRIPT, str(HERE.parent.parent), str(HERE)]
        outputs.append(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len(outputs[0]) > 10_000
    assert outputs[0] == outputs[1] == outputs[2]
