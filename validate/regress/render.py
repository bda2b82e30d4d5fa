"""A comparison for machines and for those who read it elsewhere: JSON, JUnit XML, GitHub annotations, a Markdown summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from validate.regress.gate import Objective, Verdict
from validate.regress.measure import BURN_WINDOWS_S, as_change, metric
from validate.regress.properties import Finding
from validate.regress.run import Failure, Report

_TIMES = 3.0  # from here on a change is told as so many times the baseline's value


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
    yield from mishaps(report, files)
    for verdict in report.verdicts:
        if verdict.regressed:
            yield f"{verdict.scenario}: {metric(verdict.metric).label} is worse", f"{change_text(verdict)}, corrected p {verdict.p:.1e}"


def mishaps(report: Report, files: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Those of the ``sentences`` that are no figures: runs that failed, properties that are broken."""
    for failure in report.failures:
        yield f"{failure.scenario}: the {failure.side} failed", f"{failure.policy}, {failure.fault}"
    for finding in report.properties:
        if finding.fault is not None:
            too = "; the baseline breaks it too" if finding.baseline_too else ""
            replay = f"; {_requests(len(finding.rows))} left, replay: twinserve run {files[finding.name][0]}" if finding.name in files else ""
            yield f"{finding.name} is broken", f"{finding.policy}, {finding.fault}{too}{replay}"


def _requests(count: int) -> str:
    return f"{count} request" + ("" if count == 1 else "s")


def change_words(verdict: Verdict) -> tuple[str, str]:
    """The change and its interval: per cent of the baseline, or how many times as much; points where shares are compared."""
    change, low, high = _interval(verdict)
    if not metric(verdict.metric).relative:
        return f"{change * 100:+.2f} points", f"[{low * 100:+.2f}, {high * 100:+.2f}]"
    if 1 + change >= _TIMES:
        return f"{1 + change:.3g} times", f"[{1 + low:.3g}, {1 + high:.3g}]"
    return f"{change * 100:+.2f}%", f"[{low * 100:+.2f}, {high * 100:+.2f}]"


def change_text(verdict: Verdict) -> str:
    """Both in one."""
    return " ".join(change_words(verdict))


def value_words(verdict: Verdict, value: float) -> str:
    """A metric's value with its unit."""
    unit = metric(verdict.metric).unit
    if unit == "%":
        return f"{value:.2%}"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    return f"{value:,.4g}{unit}"


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
        text = change_text(verdict) if verdict.regressed else ""
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
    gains = [f"- better: {_cell(each.scenario)}, {_cell(metric(each.metric).label)} {change_text(each)}" for each in better]
    lines += [*reasons, *gains, ""] if reasons or gains else []
    passed = sum(verdict_of(finding) == "passed" for finding in report.properties)
    lines += [
        f"Suite `{report.suite}`, {report.settings.replications} pairs a scenario; {passed} of {len(report.properties)} properties hold.", "",
        "<details><summary>All metrics</summary>", "",
        "| Scenario | Metric | Baseline | Candidate | Change | Verdict |", "|---|---|--:|--:|--:|---|",
    ]  # fmt: skip
    for each in report.verdicts:
        cells = (each.scenario, metric(each.metric).label, value_words(each, each.baseline), value_words(each, each.candidate), change_text(each), each.verdict)
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
