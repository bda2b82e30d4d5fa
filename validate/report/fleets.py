"""A plan: the fleets that were worked out, what they cost and serve, what breaks first, and what stands against the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.errors import InputError
from serving.files import read_json_object
from validate.report.figure import Figure, axis, duration_axis
from validate.report.headline import Card, Table, number, percent
from validate.report.page import Notes, Page, Section

PLAN_FILE = "plan.json"
_ROWS = 400
_COLUMNS = (
    "fleet", "$ an hour", "GPUs", "$ per M output", "in SLO, %", "load", "peak load", "TTFT p99, ms", "TPOT p99, ms", "goodput per GPU", "head-room",
)  # fmt: skip

Plan = Mapping[str, Any]  # an entry of ``plans``: keys as in `twinserve plan --json`, of which only the first few are promised


def plan_page(folder: Path) -> Page:
    """The page of a plan; raises InputError when its file is broken."""
    path = folder / PLAN_FILE
    found = read_json_object(path)
    try:
        plans = [
            {**plan, "name": plan.get("name") or _config(plan["config"]), "feasible": bool(plan["feasible"])} for plan in found["plans"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(str(path), f"is no plan: {error}", "make one with `twinserve plan SCENARIO --json`") from error
    good = [plan for plan in plans if plan["feasible"]]
    rest = [plan for plan in plans if not plan["feasible"]]
    headline = found.get("headline") or [_sentence(good, len(plans))]
    notes = {"What breaks first": "breaks_first", "Trade-offs": "advice", "Operating points": "operating_point_lines"}
    parts = [Notes(title, lines) for title, key in notes.items() if (lines := found.get(key))]
    others = Table(f"{len(rest)} others" + (f", the first {_ROWS}" if len(rest) > _ROWS else ""), ["fleet", "$ an hour", "why not"],
                   [[plan["name"], number(plan.get("cost_per_hour_usd")), str(plan.get("binding_limit") or "-")] for plan in rest[:_ROWS]], words=1, text=1)  # fmt: skip
    sections = [
        Section("cost", "Cost and service", [figure for figure in (_cost(plans), _operating(good)) if figure]),
        Section("fleets", "Fleets that meet the objectives", [_table(good)] if good else []),
        Section("advice", "What follows", parts),
        Section("rest", "Not chosen", [others] if rest else []),
    ]
    name = str(found.get("scenario") or folder.resolve().name)
    words = headline[0].removeprefix(f"{name}: ")
    verdict = words[:1].upper() + words[1:].rstrip(".") + "."
    subtitle = "; ".join(headline[1:]) or f"{len(plans)} fleets"
    return Page(
        "plan",
        name,
        subtitle,
        verdict,
        "good" if good else "bad",
        _cards(good, len(plans)),
        sections,
        {"plan directory": folder.resolve().name},
    )


def _sentence(good: Sequence[Plan], count: int) -> str:
    if not good:
        return f"None of {count} fleets meets the objectives"
    best = good[0]
    return f"Cheapest fleet that meets the objectives: {best['name']} at ${number(best.get('cost_per_hour_usd'))} an hour, {len(good)} of {count} qualify"


def _config(config: object) -> str:
    return ", ".join(f"{key} {value}" for key, value in config.items()) if isinstance(config, Mapping) else str(config)


def _span(interval: Sequence[float] | None, factor: float = 1.0, digits: int = 2) -> str:
    return "" if not interval else f"{interval[0] * factor:.{digits}f} to {interval[1] * factor:.{digits}f}"


def _cards(good: Sequence[Plan], count: int) -> list[Card]:
    cards = [Card("Fleets", f"{count:,}", "", f"considered; {len(good)} meet the objectives")]
    if not good:
        return cards
    best = good[0]
    each = f"${number(best.get('usd_per_million_output_tokens'))} per million output tokens"
    cards.append(
        Card("Cost", f"${number(best.get('cost_per_hour_usd'))}", "an hour", f"{best['gpus']} GPUs; {each}" if best.get("gpus") else each)
    )
    if best.get("slo_attainment") is not None:
        cards.append(Card("Within SLO", percent(best["slo_attainment"]), "", _span(best.get("slo_attainment_interval"), 100.0) + " %"))
    if best.get("load_factor") is not None:
        cards.append(
            Card(
                "Load factor \u03c1",
                f"{best['load_factor']:.2f}",
                "",
                f"{_span(best.get('load_factor_interval'))}; {number(best.get('peak_load_factor'))} at the peak",
            )
        )
    if best.get("headroom") is not None:
        cards.append(
            Card("Head-room", f"+{best['headroom']:.0%}", "load", "then " + str(best.get("breaks_first") or "it breaks").partition(",")[0])
        )
    return cards


def _table(good: Sequence[Plan]) -> Table:
    def interval(plan: Plan, key: str, factor: float, digits: int) -> str:
        value, ends = plan.get(key), plan.get(f"{key}_interval")
        if value is None:
            return "-"
        return f"{value * factor:.{digits}f}" + (f" [{', '.join(f'{end * factor:.{digits}f}' for end in ends)}]" if ends else "")

    def scaled(plan: Plan, key: str, factor: float) -> str:
        return number(None if plan.get(key) is None else plan[key] * factor)

    rows = [
        [
            plan["name"], number(plan.get("cost_per_hour_usd")), str(plan.get("gpus") or "-"), number(plan.get("usd_per_million_output_tokens")),
            interval(plan, "slo_attainment", 100.0, 1), interval(plan, "load_factor", 1.0, 2), number(plan.get("peak_load_factor")),
            _span(plan.get("ttft_p99_range_s"), 1e3, 0) or scaled(plan, "ttft_p99_s", 1e3), scaled(plan, "tpot_p99_s", 1e3),
            scaled(plan, "goodput_rps_per_gpu", 1.0), "" if plan.get("headroom") is None else f"+{plan['headroom']:.0%}",
        ]
        for plan in good[:_ROWS]
    ]  # fmt: skip
    return Table("Cheapest first", list(_COLUMNS), rows)


def _dots(
    plans: Sequence[Plan], x: str, y: str, name: str, colour: str, symbol: str, hover: str, factor: float = 1.0
) -> dict[str, Any] | None:
    mine = [plan for plan in plans if plan.get(x) is not None and plan.get(y) is not None]
    if not mine:
        return None
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": [plan[x] for plan in mine], "y": [plan[y] * factor for plan in mine],
        "text": [plan["name"] for plan in mine], "marker": {"color": colour, "symbol": symbol, "size": 9}, "hovertemplate": f"%{{text}}<br>{hover}<extra></extra>",
    }  # fmt: skip


def _cost(plans: Sequence[Plan]) -> Figure | None:
    hover = "$%{x:,.2f} an hour, %{y:,.3~g} req/s"
    kinds = (("meets the objectives", True, "$blue", "circle"), ("does not", False, "$grey", "x-thin-open"))
    data = [
        _dots([plan for plan in plans if plan["feasible"] is wanted], "cost_per_hour_usd", "goodput_rps", name, colour, symbol, hover)
        for name, wanted, colour, symbol in kinds
    ]
    data = [each for each in data if each]
    layout = {"xaxis": axis("dollars an hour", rangemode="tozero"), "yaxis": axis("goodput, requests/s", rangemode="tozero")}
    return Figure("cost", "What a fleet costs and serves", "Left and up is better.", data, layout) if data else None


def _operating(good: Sequence[Plan]) -> Figure | None:
    """Saturated throughput against the slowest hundredth of answers: the fleets that nothing beats stand out."""
    hover = "%{x:,.0f} output tok/s, E2E p99 %{y:,.0f} ms"
    kinds = (("nothing beats these", True, "$vermillion", "diamond"), ("beaten by another", False, "$grey", "circle"))
    data = [
        _dots(
            [plan for plan in good if bool(plan.get("on_front")) is front],
            "output_tokens_per_s",
            "e2e_p99_s",
            name,
            colour,
            symbol,
            hover,
            1e3,
        )
        for name, front, colour, symbol in kinds
    ]
    data = [each for each in data if each]
    values = [value for each in data for value in each["y"]]
    if len(values) < 2:
        return None
    layout = {
        "xaxis": axis("output tokens/s at saturation", rangemode="tozero"),
        "yaxis": duration_axis("E2E p99", min(values), max(values)),
    }
    scored = len({plan.get("quality") for plan in good} - {None}) > 1
    note = "Right and down is better" + ("; so is quality, which is not drawn." if scored else ".")
    return Figure("operating", "Throughput against latency", note, data, layout)
