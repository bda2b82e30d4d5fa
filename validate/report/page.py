"""The HTML page: sections of cards, figures and tables put into one file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import NamedTuple

from serving.files import write_whole
from serving.version import version
from validate.report import plotly_js
from validate.report.figure import Figure
from validate.report.headline import Card, Table


class Notes(NamedTuple):
    """Sentences under a title."""

    title: str
    lines: Sequence[str]


class Section(NamedTuple):
    """One part of the page, reached from the navigation by ``key``; its parts stand in the order given."""

    key: str
    title: str
    parts: Sequence[Figure | Table | Notes]
    lead: str = ""


class Page(NamedTuple):
    """All that a report shows. ``tone`` colours the verdict; ``provenance`` is what the footer states."""

    kind: str
    heading: str
    subtitle: str
    verdict: str
    tone: str
    cards: Sequence[Card]
    sections: Sequence[Section]
    provenance: Mapping[str, str]
    scenario: str = ""


def _card(card: Card) -> str:
    unit = f"<small>{escape(card.unit)}</small>" if card.unit else ""
    return (
        f'<div class="card {card.tone}"><div class="label">{escape(card.label)}</div>'
        f'<div class="value">{escape(card.value)}{unit}</div><div class="note">{escape(card.note)}</div></div>'
    )


def _figure(figure: Figure) -> str:
    note = f"<p>{escape(figure.note)}</p>" if figure.note else ""
    wide = " wide" if figure.wide else ""
    return (
        f'<figure class="figure{wide}"><figcaption><h3>{escape(figure.title)}</h3>{note}</figcaption>'
        f'<div class="plot" id="plot-{figure.key}" role="img" aria-label="{escape(figure.title)}" style="height:{figure.height_px}px"></div></figure>'
    )


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}{kind(i)}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells)) + "</tr>"

    def kind(column: int) -> str:
        return " class=w" if column < table.words else " class=t" if column >= len(table.columns) - table.text else ""

    body = "".join(row(cells, "td") for cells in table.rows)
    return (
        f'<div class="table wide"><h3>{escape(table.title)}</h3><div class="scroll" tabindex="0"><table><thead>{row(table.columns, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div></div>"
    )


def _notes(notes: Notes) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in notes.lines)
    return f'<div class="table wide"><h3>{escape(notes.title)}</h3><ul>{items}</ul></div>'


def _part(part: Figure | Table | Notes) -> str:
    return _figure(part) if isinstance(part, Figure) else _notes(part) if isinstance(part, Notes) else _table(part)


def _section(section: Section) -> str:
    lead = f'<p class="lead">{escape(section.lead)}</p>' if section.lead else ""
    parts = "".join(map(_part, section.parts))
    return f'<section id="{section.key}"><h2>{escape(section.title)}</h2>{lead}<div class="grid">{parts}</div></section>'


def _json_for_html(value: object) -> str:
    """Return JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def render(page: Page) -> str:
    """Return the whole HTML document; equal pages give equal text."""
    sections = [section for section in page.sections if section.parts]
    figures = [part for section in sections for part in section.parts if isinstance(part, Figure)]
    body = f'<section class="cards" aria-label="Headline figures">{"".join(map(_card, page.cards))}</section>' if page.cards else ""
    body += "".join(map(_section, sections))
    if page.scenario:
        body += f"<details><summary>The resolved scenario</summary><pre>{escape(page.scenario)}</pre></details>"
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in page.provenance.items())
    static = resources.files("validate.report")
    parts = {
        "version": escape(version()), "title": escape(f"{page.heading} · twinserve"), "kind": escape(page.kind), "heading": escape(page.heading),
        "subtitle": escape(page.subtitle), "verdict": escape(page.verdict), "tone": page.tone, "body": body,
        "nav": "".join(f'<a href="#{section.key}">{escape(section.title)}</a>' for section in sections),
        "footer": f"<strong>Where this comes from</strong><dl>{facts}</dl>",
        "style": (static / "page.css").read_text(encoding="utf-8"), "script": (static / "page.js").read_text(encoding="utf-8"),
        "figures": _json_for_html([{"key": f.key, "data": f.data, "layout": f.layout, "height": f.height_px, "wide": f.wide} for f in figures]),
        "plotly": plotly_js.packed(),
    }  # fmt: skip
    return Template((static / "page.html").read_text(encoding="utf-8")).substitute(parts)


def write(page: Page, out: Path) -> int:
    """Write the page whole or not at all; return its size in bytes. Raises InputError when the disk refuses."""
    text = render(page).encode("utf-8")
    write_whole(out, text)
    return len(text)
