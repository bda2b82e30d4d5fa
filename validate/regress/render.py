"""A comparison for people and machines: JSON, a terminal table, JUnit XML, GitHub annotations, a Markdown summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any
from xml.etree import ElementTree

from validate.regress.gate import Objective, Verdict
from validate.regress.measure import BURN_WINDOWS_S, as_change, metric
from validate.regress.properties import Finding
from validate.regress.run import Failure, Report

_WIDTH = 150  # columns where there is no terminal
_MARKS = {"regressed": "FAIL", "improved": "better", "unchanged": "same", "undecided": "undecided"}


def as_json(report: Report, files: dict[str, list[str]]) -> str:
    """One JSON object; ``files`` names what was written for each broken property."""
    settings = report.settings
    value = {
        "regressed": report.regressed,
        "suite": report.suite,
        "baseline": [f"{choice.kind}={choice.shown}" for choice in report.baseline],
        "candidate": [f"{choice.kind}={choice.shown}" for choice in report.candidate],
        "replications": settings.replications,
        "effect": settings.effect,
        "alpha": settings.alpha,
        "metrics": [_metric_json(verdict) for verdict in report.verdicts],
        "properties": [_property_json(finding, files.get(finding.name, [])) for finding in report.properties],
        "slo": [_objective_json(row) for row in report.objectives],
        "failures": [
            {"scenario": each.scenario, "side": each.side, "policy": each.policy, "replication": each.replication,
             "step": each.fault.step, "rule": each.fault.rule, "detail": each.fault.detail}
            for each in report.failures
        ],
    }  # fmt: skip
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _metric_json(verdict: Verdict) -> dict[str, Any]:
    change, low, high = _interval(verdict)
    return {
        "scenario": verdict.scenario, "metric": verdict.metric, "baseline": verdict.baseline, "candidate": verdict.candidate,
        "change": change, "low": low, "high": high, "level": verdict.change.level, "relative": metric(verdict.metric).relative,
        "p": verdict.p, "verdict": verdict.verdict, "replications_to_settle": verdict.required,
    }  # fmt: skip


def _interval(verdict: Verdict) -> tuple[float, float, float]:
    """The change and the ends of its interval as people say it: up is up, whichever way is worse."""
    compared, change = metric(verdict.metric), verdict.change
    low, high = sorted((as_change(compared, change.low), as_change(compared, change.high)))
    return as_change(compared, change.estimate), low, high


def _property_json(finding: Finding, files: list[str]) -> dict[str, Any]:
    value: dict[str, Any] = {"name": finding.name, "title": finding.title, "verdict": verdict_of(finding)}
    if finding.skipped:
        value["reason"] = finding.skipped
    if finding.fault is not None:
        value |= {
            "policy": finding.policy, "step": finding.fault.step, "rule": finding.fault.rule, "detail": finding.fault.detail,
            "requests": len(finding.rows), "baseline_too": finding.baseline_too, "files": files,
        }  # fmt: skip
    return value


def _objective_json(row: Objective) -> dict[str, Any]:
    windows = ["overall", *(f"worst_{seconds:g}_s" for seconds in BURN_WINDOWS_S)]
    return {
        "scenario": row.scenario, "class": row.class_name, "asked": row.asked, "baseline": row.baseline, "candidate": row.candidate,
        "burn_baseline": dict(zip(windows, row.burn_baseline)), "burn_candidate": dict(zip(windows, row.burn_candidate)), "verdict": row.verdict,
    }  # fmt: skip


def verdict_of(finding: Finding) -> str:
    """``passed``, ``broken`` or ``skipped``."""
    return "broken" if finding.broken else "skipped" if finding.skipped else "passed"


def sentences(report: Report, files: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of everything that makes the candidate fail: what annotations and summaries say."""
    for failure in report.failures:
        yield f"{failure.scenario}: the {failure.side} failed", f"{failure.policy}, {failure.fault}"
    for finding in report.properties:
        if finding.fault is not None:
            too = "; the baseline breaks it too" if finding.baseline_too else ""
            replay = f"; {_requests(len(finding.rows))} left, replay: twinserve run {files[finding.name][0]}" if finding.name in files else ""
            yield f"{finding.name} is broken", f"{finding.policy}, {finding.fault}{too}{replay}"
    for verdict in report.verdicts:
        if verdict.regressed:
            yield f"{verdict.scenario}: {metric(verdict.metric).label} is worse", f"{_change(verdict)}, corrected p {verdict.p:.1e}"


def _requests(count: int) -> str:
    return f"{count} request" + ("" if count == 1 else "s")


def _change(verdict: Verdict) -> str:
    change, low, high = _interval(verdict)
    unit = "%" if metric(verdict.metric).relative else " points"
    return f"{change * 100:+.2f}{unit} [{low * 100:+.2f}, {high * 100:+.2f}]"


def _value(verdict: Verdict, value: float) -> str:
    unit = metric(verdict.metric).unit
    if unit == "%":
        return f"{value:.2%}"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    return f"{value:,.4g}{unit}"


def print_report(report: Report, files: dict[str, list[str]], file: IO[str]) -> None:
    """Print the tables. Plain text of a fixed width where ``file`` is no terminal: the same bytes for the same input."""
    from rich.markup import escape

    from sim.tables import console_for

    console = console_for(file, None if file.isatty() else _WIDTH)
    with console.capture() as printed:
        title = f"{', '.join(map(str, report.candidate))} against {', '.join(each.shown for each in report.baseline)}"
        console.print(f"[bold]{escape(title)}[/bold]: suite {escape(report.suite)}, {report.settings.replications} pairs a scenario", highlight=False)
        for table in (_metric_table(report), _slo_table(report), _property_table(report)):
            if table is not None:
                console.print()
                console.print(table)
        console.print()
        for heading, text in sentences(report, files):
            console.print(f"[red]{escape(heading)}[/red]: {escape(text)}", highlight=False, soft_wrap=True)
        console.print("[bold red]REGRESSED[/bold red]" if report.regressed else "[green]no regression[/green]", highlight=False)
    file.writelines(line.rstrip() + "\n" for line in printed.get().splitlines())


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _metric_table(report: Report) -> Any:
    from rich.markup import escape

    if not report.verdicts:
        return None
    table = _table("Scenario", "Metric", "Baseline", "Candidate", f"Change [{1 - 2 * report.settings.alpha:.0%} interval]", "p", "")
    before = None
    for each in report.verdicts:
        style = {"regressed": "bold red", "improved": "green"}.get(each.verdict, "")
        more = each.verdict == "undecided" and each.required > report.settings.replications
        mark = _MARKS[each.verdict] + (f": {each.required} pairs would tell" if more else "")
        name = "" if each.scenario == before else escape(each.scenario)
        before = each.scenario
        cells = (metric(each.metric).label, _value(each, each.baseline), _value(each, each.candidate), _change(each), f"{each.p:.1g}", mark)
        table.add_row(name, *map(escape, cells), style=style)
    return table


def _slo_table(report: Report) -> Any:
    from rich.markup import escape

    if not report.objectives:
        return None
    windows = " ".join(f"{seconds:g} s" for seconds in BURN_WINDOWS_S)
    table = _table("Scenario", "Class", "Asked", "Baseline", "Candidate", f"Burn, all {windows}: baseline", "candidate", "")
    for row in report.objectives:
        burns = [" ".join(f"{burn:.1f}" for burn in side) for side in (row.burn_baseline, row.burn_candidate)]
        style = "bold red" if row.verdict == "broken" else ""
        cells = (row.scenario, row.class_name, f"{row.asked:.2%}", f"{row.baseline:.2%}", f"{row.candidate:.2%}", *burns, row.verdict)
        table.add_row(*map(escape, cells), style=style)
    return table


def _property_table(report: Report) -> Any:
    from rich.markup import escape

    if not report.properties:
        return None
    table = _table("Property", "", "What must hold")
    table.columns[2].no_wrap = False
    for finding in report.properties:
        verdict = verdict_of(finding)
        table.add_row(finding.name, verdict, escape(finding.skipped or finding.title), style="bold red" if finding.broken else "")
    return table


def annotations(report: Report, files: dict[str, list[str]]) -> Iterator[str]:
    """Yield GitHub workflow commands: one error for each sentence, one warning for each objective newly missed."""
    for title, text in sentences(report, files):
        yield f"::error title={_escaped(title, properties=True)}::{_escaped(text)}"
    for row in report.objectives:
        if row.verdict == "broken":
            text = f"{row.class_name} attains {row.candidate:.2%} of {row.asked:.2%} asked, {row.baseline:.2%} before"
            yield f"::warning title={_escaped(row.scenario + ': objective newly missed', properties=True)}::{_escaped(text)}"


def _escaped(text: str, *, properties: bool = False) -> str:
    """As the runner wants it: line ends and per cent signs as codes, in properties also what separates them."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if properties else text


def junit(report: Report, files: dict[str, list[str]]) -> str:
    """JUnit XML: a test case for every metric of every scenario, every property and every scenario that failed to run."""
    root = ElementTree.Element("testsuites", name="twinserve regress")
    groups: dict[str, list[tuple[str, str, str, str]]] = {}
    for verdict in report.verdicts:
        text = _change(verdict) if verdict.regressed else ""
        groups.setdefault(verdict.scenario, []).append((metric(verdict.metric).label, "failure" if text else "", text, ""))
    for finding in report.properties:
        text = f"{finding.policy}, {finding.fault}" if finding.broken else finding.skipped
        kind = "failure" if finding.broken else "skipped" if finding.skipped else ""
        groups.setdefault("properties", []).append((finding.name, kind, text, "\n".join(files.get(finding.name, []))))
    for failure in report.failures:
        groups.setdefault(failure.scenario, []).append((f"the {failure.side} runs", "error", f"{failure.policy}, {failure.fault}", ""))
    for name, cases in groups.items():
        counts = {f"{kind}s" if kind != "skipped" else kind: str(sum(case[1] == kind for case in cases)) for kind in ("failure", "error", "skipped")}
        suite = ElementTree.SubElement(root, "testsuite", name=_printable(name), tests=str(len(cases)), **counts)
        for label, kind, text, more in cases:
            case = ElementTree.SubElement(suite, "testcase", classname=_printable(f"regress.{name}"), name=_printable(label))
            if kind:
                ElementTree.SubElement(case, kind, message=_printable(text)).text = _printable(more)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _printable(text: str) -> str:
    """Without the control characters that XML cannot hold: a policy's exception may say anything."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def markdown(report: Report, files: dict[str, list[str]]) -> str:
    """A summary for a pull request: the verdict, its reasons, the table folded."""
    candidate, baseline = (", ".join(f"`{choice.kind}={choice.shown}`" for choice in side) for side in (report.candidate, report.baseline))
    lines = [f"## {'❌ Regressed' if report.regressed else '✅ No regression'}: {candidate} against {baseline}", ""]
    reasons = [f"- **{_cell(title)}**: {_cell(text)}" for title, text in sentences(report, files)]
    better = [verdict for verdict in report.verdicts if verdict.verdict == "improved"]
    gains = [f"- better: {_cell(each.scenario)}, {_cell(metric(each.metric).label)} {_change(each)}" for each in better]
    lines += [*reasons, *gains, ""] if reasons or gains else []
    passed = sum(verdict_of(finding) == "passed" for finding in report.properties)
    lines += [
        f"Suite `{report.suite}`, {report.settings.replications} pairs a scenario; {passed} of {len(report.properties)} properties hold.", "",
        "<details><summary>All metrics</summary>", "",
        "| Scenario | Metric | Baseline | Candidate | Change | Verdict |", "|---|---|--:|--:|--:|---|",
    ]  # fmt: skip
    for each in report.verdicts:
        cells = (each.scenario, metric(each.metric).label, _value(each, each.baseline), _value(each, each.candidate), _change(each), each.verdict)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    lines += ["", "| Scenario | Class | Asked | Baseline | Candidate | Objective |", "|---|---|--:|--:|--:|---|"]
    for row in report.objectives:
        cells = (row.scenario, row.class_name, f"{row.asked:.2%}", f"{row.baseline:.2%}", f"{row.candidate:.2%}", row.verdict)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join([*lines, "", "</details>", ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def failed_baselines(report: Report) -> list[Failure]:
    """Scenarios that could not be compared because the baseline itself failed."""
    return [failure for failure in report.failures if failure.side == "baseline"]
