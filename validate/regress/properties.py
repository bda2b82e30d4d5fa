"""Scheduler properties of a candidate: each case is run and watched; a broken one comes with the smallest workload that breaks it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import validate
from serving import policies, scenario
from serving.errors import InputError
from validate.regress.cases import BY_NAME, CASES, Case, serial_steps
from validate.regress.choice import Choice, apply
from validate.regress.drive import BrokenRuleError, Fault, OutOfTimeError, drive, fault_of, time_limit
from validate.regress.shrink import Row, shrink
from validate.regress.watch import Watch
from validate.regress.workers import Lost, Workers

LIMIT_S, HANG_LIMIT_S = 3.0, 0.3  # CPU seconds of a case, and of each attempt to shrink a workload that hangs
_HANG_ATTEMPTS = 40
_WHOLE = "seen in the whole run"
DETERMINISTIC, HONEST = "deterministic", "honest"
_TWICE = {
    DETERMINISTIC: "the same workload gives the same run in another process, at another time of day, under other hash and random seeds",
    HONEST: "steps taken one at a time and audited runs give the same times as promised runs: no promise is broken",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A property of a candidate: passed (``fault`` is None), broken, or skipped with a reason.

    ``rows`` is the minimal workload that breaks it and ``scenario`` what it runs on; ``baseline_too`` whether the baseline also breaks it.
    """

    name: str
    title: str
    policy: str
    fault: Fault | None = None
    skipped: str = ""
    rows: tuple[Row, ...] = ()
    scenario: dict[str, Any] | None = None
    baseline_too: bool = False

    @property
    def broken(self) -> bool:
        return self.fault is not None


def names() -> list[str]:
    """Names of all properties."""
    return [*(case.name for case in CASES), *_TWICE]


def check_properties(workers: Workers, choices: list[Choice], only: Sequence[str] | None = None) -> list[Finding]:
    """Check all properties (or those named) of the scheduler that ``choices`` make. Raises InputError for a policy that does not load."""
    wanted = list(names() if only is None else only)
    findings: dict[int, Finding] = {}
    for position, answer in workers.run([(check_property, (name, choices)) for name in wanted]):
        if isinstance(answer, Lost):
            case = BY_NAME.get(wanted[position], BY_NAME["storm-priority"])
            fault = Fault(None, "must decide in finite time", answer.reason)
            answer = Finding(wanted[position], case.rule, _shown(choices), fault, rows=case.rows, scenario=apply(case.scenario, choices))
        findings[position] = answer
    return [findings[position] for position in range(len(wanted))]


def broken_by_baseline(workers: Workers, findings: list[Finding], baseline: list[Choice]) -> list[Finding]:
    """Mark the broken properties that the baseline breaks too."""
    broken = [finding.name for finding in findings if finding.broken]
    too = {finding.name for finding in check_properties(workers, baseline, broken) if finding.broken}
    return [replace(finding, baseline_too=finding.name in too) for finding in findings]


def check_property(name: str, choices: list[Choice]) -> Finding:
    """Check one property, in a worker process, and shrink the workload if it is broken."""
    case = BY_NAME.get(name, BY_NAME["storm-priority"])
    title = _TWICE.get(name, case.rule)
    kinds = {choice.kind: choice for choice in choices}
    if case.needs and "batching" in kinds and case.needs not in policies.option_names("batching", kinds["batching"].name):
        return Finding(name, title, _shown(choices), skipped=f"{kinds['batching']} has no option {case.needs}")
    raw = apply({**case.scenario, "name": f"regress-{name}"}, choices)

    def fault(rows: Sequence[Row], limit_s: float = LIMIT_S) -> Fault | None:
        return _fault(name, case if list(rows) == list(case.rows) else replace(case, verify=None), raw, rows, limit_s)

    if name in _TWICE and _fault(case.name, case, raw, case.rows, LIMIT_S) is not None:
        return Finding(name, title, _shown(choices), skipped=f"{case.name} is broken already")
    found = fault(case.rows)
    if found is None:
        return Finding(name, title, _shown(choices))
    hangs = found.rule.startswith("must decide in finite time")
    limit_s = HANG_LIMIT_S if hangs else LIMIT_S

    def fails(rows: list[Row]) -> bool:
        seen = fault(rows, limit_s)
        return seen is not None and seen.rule == found.rule

    rows = shrink(case.rows, fails, attempts=_HANG_ATTEMPTS if hangs else 1000)
    final = fault(rows, limit_s) or found
    return Finding(name, title, _shown(choices), final, rows=tuple(rows), scenario=raw)


def _fault(name: str, case: Case, raw: dict[str, Any], rows: Sequence[Row], limit_s: float) -> Fault | None:
    """Run ``rows``; the rule that was broken, or None. Raises InputError for a mistake of the user."""
    try:
        with time_limit(limit_s), _traced(raw, rows) as loaded:
            if name == HONEST:
                drive(loaded, audit=1.0)  # every promise is put to the test; the simulator raises where one is broken
                return _compare(_digest(loaded), _digest(loaded, stepwise=True), "must keep its promises", "taken step by step the run differs")
            if name == DETERMINISTIC:
                return _compare(_digest(loaded), _elsewhere(raw, rows), "must be deterministic", "the same workload gave another run")
            watch = Watch(serial_steps(rows, raw))
            drive(loaded, attach=watch.attach, stepwise=True)
            watch.finish(len(rows))
            problem = case.verify(watch) if case.verify is not None else None
            problem = problem or (case.judge(watch, rows) if case.judge is not None else None)
            return None if problem is None else Fault(None, case.rule, problem, _WHOLE)
    except InputError:
        raise
    except (Exception, OutOfTimeError) as error:
        return fault_of(error, limit_s)


class _traced:
    """The scenario ``raw`` with ``rows`` as its trace, which exists inside the ``with``."""

    def __init__(self, raw: dict[str, Any], rows: Sequence[Row]) -> None:
        self._raw, self._rows = raw, rows

    def __enter__(self) -> scenario.Scenario:
        self._folder = tempfile.TemporaryDirectory(prefix="twinserve-regress-")
        path = Path(self._folder.name) / "trace.jsonl"
        path.write_text(jsonl(self._rows))
        return scenario.from_mapping({**self._raw, "workload": {"trace": {"file": str(path), "format": "plain-jsonl"}}})

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()


def jsonl(rows: Sequence[Row]) -> str:
    """The trace as text that ``twinserve run --trace`` replays."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def _digest(loaded: scenario.Scenario, *, stepwise: bool = False) -> str:
    """A digest of every time and count of every request."""
    columns = drive(loaded, stepwise=stepwise).columns
    return hashlib.sha256(b"".join(np.ascontiguousarray(column).tobytes() for column in columns.values())).hexdigest()


def _compare(one: str, other: str, rule: str, detail: str) -> Fault | None:
    return None if one == other else Fault(None, rule, detail, _WHOLE)


def _elsewhere(raw: dict[str, Any], rows: Sequence[Row]) -> str:
    """The digest of the same run in a fresh process whose clocks and seeds are others."""
    root = str(Path(validate.__file__).resolve().parents[1])
    variables = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    told = subprocess.run(
        [sys.executable, "-m", "validate.regress.elsewhere"], input=json.dumps([raw, list(rows)]), capture_output=True, text=True, env=variables,
        timeout=10 * LIMIT_S, check=False,
    )  # fmt: skip
    if told.returncode:
        lines = told.stderr.strip().splitlines() or ["no reason given"]
        raise BrokenRuleError(Fault(None, "must be deterministic", f"in another process the run failed: {lines[-1]}"))
    return told.stdout.strip()


def other_clocks() -> None:
    """Make this process's clocks run backwards from another year, and its random numbers others."""
    import random
    import time

    def backwards(clock: Any, unit: int) -> Any:
        start = clock()
        return lambda: 500_000_000 * unit + 3 * (start - clock())

    for name in ("time", "monotonic", "perf_counter", "process_time"):
        setattr(time, name, backwards(getattr(time, name), 1))
        setattr(time, f"{name}_ns", backwards(getattr(time, f"{name}_ns"), 10**9))
    random.seed(4242)
    np.random.seed(4242)


def run_elsewhere(text: str) -> str:
    """What ``validate.regress.elsewhere`` prints: the digest of the run that ``text`` (JSON: scenario and rows) describes."""
    raw, rows = json.loads(text)
    other_clocks()
    with _traced(raw, rows) as loaded:
        return _digest(loaded)


def _shown(choices: list[Choice]) -> str:
    return " and ".join(map(str, choices))


def files_of(finding: Finding, folder: Path) -> Iterator[tuple[Path, str]]:
    """The files that replay a broken property: its trace, and the scenario that reads it."""
    import yaml

    trace = folder / f"{finding.name}.jsonl"
    yield trace, jsonl(finding.rows)
    replay = {**(finding.scenario or {}), "workload": {"trace": {"file": trace.name}}}
    header = f"# {finding.policy} breaks {finding.name}: {finding.title}\n# {finding.fault}\n"
    yield folder / f"{finding.name}.yaml", header + yaml.safe_dump(replay, sort_keys=False, width=120)
