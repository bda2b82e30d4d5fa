"""Stages and sites in the terminal's table and on the page."""

from __future__ import annotations

import io

from test_recall import TIERS, retrieval
from test_sites import scenario

from sim.front_tables import front_tables
from sim.run import simulate
from sim.tables import print_run
from validate.report.build import build

ASKED = scenario(stages=[retrieval(**TIERS)], workload={"queries": {"count": 50}})


def test_a_run_shows_its_stages_what_they_remember_and_its_sites(tmp_path):
    result = simulate(ASKED, out=tmp_path / "run")
    stages, caches, sites = front_tables(result.summary)
    assert [row[0] for row in stages.rows] == ["retrieval"] and stages.rows[0][2] == "300"
    assert [row[1] for row in caches.rows] == ["answers", "results", "texts"] * 2, "users enter at two sites, each with its own"
    assert [row[0] for row in sites.rows] == ["a", "b", "r", "c"]
    for rows in (stages, caches, sites):
        assert all(len(row) == len(rows.columns) for row in rows.rows)
    printed = io.StringIO()
    print_run(result.summary, result.fleet, ASKED.slo, printed)
    text = printed.getvalue()
    assert "Before the model" in text and "from outside" in text and max(map(len, text.splitlines())) <= 80
    page = build([tmp_path / "run"])
    assert [part.title for section in page.sections if section.key == "front" for part in section.parts] == ["Before the model", "Remembered", "Sites"]


def test_a_plain_run_shows_none_of_it():
    plain = ASKED.model_copy(update={"stages": (), "sites": None})
    assert not list(front_tables(simulate(plain).summary))
