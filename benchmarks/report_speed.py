"""How long the report of a large run takes to build, how big it is, and how long a browser takes to open it.

    python -m benchmarks.report_speed                       100,000 requests, built and opened 5 times
    python -m benchmarks.report_speed --run DIR             of a run directory that is there already

Goals: built in 5 s, at most 5 MB, opened in 2 s. Each time is given as least and median; CPU seconds beside those by the clock, since
other work on the machine only adds to the latter. Opening is timed by the browser itself from the start of the navigation, a headless
Chromium with a profile of its own each time, so that it has nothing in store: until the document has loaded, until the figures of
the first screen are drawn (this is what "open" means), and until all are. The CPU seconds of the page's thread are its own account
of all that.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.headless_browser import Browser
from serving.scenario import load
from sim.cli import spare_the_collector
from sim.run import simulate
from validate.report.build import build
from validate.report.page import write

CPU = "everything drawn, CPU"
BUILT_S, BYTES, OPENED_S = 5.0, 5e6, 2.0
INSTANTS = {
    "document loaded": "performance.getEntriesByType('navigation')[0].loadEventEnd",
    "first screen drawn": "performance.getEntriesByName('twinserve-ready')[0].startTime",
    "everything drawn": "performance.getEntriesByName('twinserve-all')[0].startTime",
}


def told(label: str, seconds: list[float]) -> str:
    """One line of the result."""
    return f"{label:28} least {min(seconds):6.2f} s   median {statistics.median(seconds):6.2f} s"


def timed(times: int, work: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Seconds by the clock and of CPU of each of ``times`` calls."""
    wall_s, cpu_s = [], []
    for _ in range(times):
        began, spent = time.perf_counter(), time.process_time()
        work()
        wall_s.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - spent)
    return wall_s, cpu_s


def opened(page: Path, times: int, folder: Path) -> dict[str, list[float]]:
    """Seconds from the start of the navigation to each of INSTANTS, and of CPU, each time in a new browser."""
    seen: dict[str, list[float]] = {name: [] for name in (*INSTANTS, CPU)}
    for index in range(times):
        with Browser(folder / f"profile-{index}") as browser:
            browser.devtools("Performance.enable", timeDomain="threadTicks")
            browser.open(page)
            metrics = browser.devtools("Performance.getMetrics")["metrics"]
            seen[CPU].append(next(each["value"] for each in metrics if each["name"] == "ThreadTime"))
            for name, instant in INSTANTS.items():
                seen[name].append(browser.script(f"return {instant}") / 1e3)
    return seen


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its figures; 1 when a goal is missed even at best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--run", type=Path, help="a run directory, instead of simulating one")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder, run = Path(scratch), options.run
        if run is None:
            run = folder / "run"
            spare_the_collector()
            simulate(load("chat-8b", [f"workload.requests={options.requests}"]), out=run)
        page = folder / "report.html"
        wall_s, cpu_s = timed(options.times, lambda: write(build([run]), page))
        size = page.stat().st_size
        print(told("built, CPU", cpu_s), told("built, by the clock", wall_s), f"{'size':28} {size / 1e6:.2f} MB", sep="\n", flush=True)
        missed = min(cpu_s) > BUILT_S or size > BYTES
        if not (shutil.which("chromium") and shutil.which("chromedriver")):
            print("not opened: no chromium and chromedriver", file=sys.stderr)
            return int(missed)
        seen = opened(page, options.times, folder)
    for name, seconds in seen.items():
        print(told(name, seconds))
    return int(missed or min(seen["first screen drawn"]) > OPENED_S)


if __name__ == "__main__":
    sys.exit(main())
