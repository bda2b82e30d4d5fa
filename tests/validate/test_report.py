"""Reports: self-contained, complete, small, honest about what is missing, and the same bytes for the same run."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest

import twinserve
from serving.errors import InputError
from sim.study.pareto import front, select
from validate.report import changes, plotly_js, study, timeline
from validate.report.build import build, run_page, runs_page
from validate.report.figure import duration_axis
from validate.report.headline import difference, number, percent, verdict
from validate.report.page import render, write
from validate.run_data import read_run

pytest.importorskip("plotly", reason="reports need plotly: pip install 'twinserve[study]'")


class Outline(HTMLParser):
    """Collects what a page is made of: ids, headings, links to elsewhere, table cells, script types."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.outside, self.open, self.headings, self.cells = [], [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.outside += [values[key] for key in ("src", "href") if key in values and not values[key].startswith("#")]
        self.cells += tag == "td"
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


def figures_of(text: str) -> list[dict]:
    return json.loads(re.search(r'id="figures">(.*?)</script>', text, re.S).group(1))


def unpack(array: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["bdata"]), "<" + array["dtype"])


@pytest.fixture(scope="module")
def page(make_run) -> str:
    return render(build([make_run()]))


class TestOnePage:
    def test_needs_nothing_else(self, page):
        outline = Outline(page)
        assert not outline.open and outline.outside == []
        assert len(outline.ids) == len(set(outline.ids))
        outside_script = re.sub(r'<script type="application/octet-stream".*?</script>', "", page, flags=re.S)
        assert not re.search(r"https?://|@import|url\(", outside_script)

    def test_shows_every_section(self, page):
        headings = Outline(page).headings
        wanted = ["chat-8b", "Latency", "Objectives", "Over time", "Why the slowest were slow", "A slice", "Percentile ladder", "SLO attainment by class"]
        assert [text for text in wanted if text not in headings] == []
        figures = {figure["key"] for figure in figures_of(page)}
        assert figures == {"ladder", "cdf", "slo", "class-ttft", "class-tpot", "series", "causes", "gantt"}
        assert all(f'id="plot-{key}"' in page for key in figures)

    def test_colours_are_tokens_of_both_themes(self, page):
        tokens = set(re.findall(r'"\$([a-z-]+)"', re.search(r'id="figures">(.*?)</script>', page, re.S).group(1)))
        light, dark = re.search(r":root \{(.*?)\}", page, re.S).group(1), re.search(r'data-theme="dark"\] \{(.*?)\}', page, re.S).group(1)
        assert tokens and all(f"--{token}:" in light and f"--{token}:" in dark for token in tokens)
        assert "prefers-color-scheme" in page and "@media print" in page and "width=device-width" in page

    def test_the_script_is_the_installed_one(self, page):
        embedded = re.search(r'id="plotly">(.*?)</script>', page, re.S).group(1)
        assert embedded == plotly_js.packed()
        assert b"plotly.js" in gzip.decompress(base64.b64decode(embedded))[:200]

    def test_same_run_same_bytes_and_small(self, page, make_run):
        assert render(build([make_run()])) == page
        assert len(page) < 3e6

    def test_text_cannot_leave_its_place(self, make_run):
        run = read_run(make_run())
        evil = "</script><img src=x onerror=alert(1)>"
        requests = {**run.requests, "class": np.where(run.requests["class"] == "p0", evil, run.requests["class"]).astype(object)}
        text = render(run_page(replace(run, scenario={**run.scenario, "name": evil}, requests=requests)))
        assert "<img src=x" not in text and not Outline(text).open

    def test_curves_end_at_the_maximum_and_are_thinned(self, page, make_run):
        run = read_run(make_run())
        ladder = next(figure for figure in figures_of(page) if figure["key"] == "ladder")
        for trace, metric in zip(ladder["data"], ("ttft_s", "tpot_s", "e2e_s", "queue_s")):
            drawn = unpack(trace["y"])
            assert len(drawn) <= 240 and (np.diff(drawn) >= 0).all()
            values = run.latency_s(metric)[run.completed]
            assert drawn[-1] <= np.nanmax(values) * 1e3 * 1.0001
            at = np.argmin(np.abs(unpack(trace["customdata"]) - 90))
            assert drawn[at] == pytest.approx(np.nanquantile(values, unpack(trace["customdata"])[at] / 100) * 1e3, rel=1e-3, abs=0.011)


class TestMissingParts:
    def test_a_run_without_records_keeps_its_summary(self, make_run):
        page = run_page(replace(read_run(make_run()), requests={}, steps={}))
        outline = Outline(render(page))
        assert "Latency" in outline.headings and "Over time" not in outline.headings and page.cards

    def test_a_run_without_objectives(self, make_run):
        run = read_run(make_run())
        page = run_page(replace(run, scenario={"name": "bare"}))
        assert "no objective" in page.verdict and "SLO attainment by class" not in Outline(render(page)).headings

    def test_nothing_completed(self, make_run):
        run = read_run(make_run())
        none = {"mean": None, "p50": None, "p90": None, "p95": None, "p99": None, "max": None}
        summary = {**run.summary, "requests": {**run.summary["requests"], "completed": 0}, **dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"), none),
                   "goodput_rps": None, "requests_per_s": None, "slo_attainment": {"overall": None, "by_class": {"p0": None}}}  # fmt: skip
        status = np.full(len(run.requests["status"]), "rejected", dtype=object)
        text = render(run_page(replace(run, summary=summary, requests={**run.requests, "status": status})))
        assert "No request completed" in text and not Outline(text).open

    @pytest.mark.parametrize("kept", ["none of it", "summary.json"])
    def test_a_folder_that_is_no_run_is_named(self, tmp_path, kept):
        if kept == "summary.json":
            (tmp_path / kept).write_text("{}")
        with pytest.raises(InputError, match=re.escape(str(tmp_path))):
            build([tmp_path])

    def test_a_disk_that_refuses(self, make_run, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="cannot be written"):
            write(build([make_run()]), tmp_path / "file" / "r.html")


class TestSeveralRuns:
    def test_real_against_simulated(self, make_run):
        real, simulated = make_run(device="NVIDIA H200", speed=0.9, name="chat"), make_run(name="chat")
        for order in ([real, simulated], [simulated, real]):
            page = build(order)
            assert page.kind == "real against simulated" and page.verdict.startswith("Simulated against real:")
            assert "TPOT p50 -" in page.verdict  # the simulated one is faster, in whichever order they came
            keys = {figure["key"] for figure in figures_of(render(page))}
            assert {"differences", "pairs-ttft", "pairs-tpot", "pairs-e2e", "overlay-ttft", "series-0", "series-1"} <= keys

    def test_different_requests_are_not_paired(self, make_run):
        keys = {figure["key"] for figure in figures_of(render(build([make_run(seed=7), make_run(seed=8)])))}
        assert "differences" in keys and not any(key.startswith("pairs") for key in keys)

    def test_three_runs_are_a_table(self, make_run):
        runs = [read_run(make_run(seed=seed)) for seed in (7, 8, 9)]
        assert "Side by side" in Outline(render(runs_page(runs))).headings


class TestStudies:
    @pytest.fixture
    def sweep(self, tmp_path):
        import pandas as pd

        rows = [
            {"workload.arrivals.rate_rps": rate, "cluster.replicas": replicas, "seed": 1, "ttft_s.p99": 0.1 * rate / replicas, "goodput_rps": min(rate, 10.0 * replicas),
             "output_tokens_per_s": 180.0 * min(rate, 10.0 * replicas), "usd_per_million_output_tokens": replicas / rate}
            for rate in (4.0, 8.0, 16.0) for replicas in (1, 2)
        ]  # fmt: skip
        pd.DataFrame(rows).to_parquet(tmp_path / "sweep.parquet")
        return tmp_path

    def test_a_sweep(self, sweep):
        columns = study.read_sweep(sweep)
        assert study.varied(columns) == ["workload.arrivals.rate_rps", "cluster.replicas"]
        text = render(build([sweep]))
        figures = {figure["key"]: figure for figure in figures_of(text)}
        assert figures["moves-ttft_s-p99"]["data"][0]["y"] == pytest.approx([400.0, 800.0, 1600.0])
        assert "front-output_tokens_per_s" in figures and Outline(text).cells >= 6 * 6

    def test_a_study_is_reported_alone(self, sweep, make_run):
        with pytest.raises(InputError, match="alone"):
            build([sweep, make_run()])

    def test_a_plan(self, tmp_path):
        plans = [{"config": {"gpu": "h100-sxm", "replicas": n}, "feasible": n > 1, "binding_limit": None if n > 1 else "ttft p99", "cost_per_hour_usd": 3.0 * n,
                  "usd_per_million_output_tokens": 0.5, "goodput_rps": 4.0 * n, "load_factor": 1 / n} for n in (2, 3, 1)]  # fmt: skip
        (tmp_path / "plan.json").write_text(json.dumps({"plans": plans}))
        page = build([tmp_path])
        assert "gpu h100-sxm, replicas 2 at $6.00 an hour, 2 of 3 qualify" in page.verdict and "cost" in {f["key"] for f in figures_of(render(page))}
        (tmp_path / "plan.json").write_text("{}")
        with pytest.raises(InputError, match="is no plan"):
            build([tmp_path])


    def test_a_plan_tells_what_the_command_told(self, tmp_path):
        fleet = {"config": {"gpu": "h100-sxm"}, "feasible": True, "cost_per_hour_usd": 6.0, "gpus": 2, "slo_attainment": 0.971, "slo_attainment_interval": [0.953, 0.989],
                 "load_factor": 0.7, "load_factor_interval": [0.6, 0.8], "peak_load_factor": 0.82, "ttft_p99_s": 0.4, "e2e_p99_s": 9.0, "output_tokens_per_s": 9000.0,
                 "goodput_rps": 20.0, "headroom": 0.07, "breaks_first": "TTFT p95 is 316 ms, asked are 300 ms"}  # fmt: skip
        other = {**fleet, "name": "dearer", "cost_per_hour_usd": 7.0, "e2e_p99_s": 12.0, "on_front": True}
        none = {"name": "too dear", "config": {}, "feasible": False, "binding_limit": "cost: at least $9.30 an hour", "cost_per_hour_usd": 9.3}
        told = {"scenario": "chat", "headline": ["chat: two H100s are the cheapest", "3 candidates"], "plans": [{**fleet, "name": "two H100s", "on_front": True}, other, none],
                "breaks_first": ["two H100s: TTFT"], "advice": ["gpu l40s: as dear"], "operating_point_lines": ["balanced: two H100s"]}  # fmt: skip
        (tmp_path / "plan.json").write_text(json.dumps(told))
        page = build([tmp_path])
        text = render(page)
        assert page.heading == "chat" and page.verdict == "Two H100s are the cheapest." and {"cost", "operating"} == {figure["key"] for figure in figures_of(text)}
        assert all(words in text for words in ("97.1 [95.3, 98.9]", "0.70 [0.60, 0.80]", "+7%", "gpu l40s: as dear", "balanced: two H100s", "cost: at least $9.30 an hour"))
        Outline(text)


FLEET = {"faults": [{"at_s": 2.0, "kind": "replica_loss", "replica": 1, "recovery_s": 1.5}, {"at_s": 5.0, "kind": "slow_link", "link": "nic", "recovery_s": None}],
         "retried": 3, "failed": 0, "changes": [{"at_s": 2.0, "replica": 1, "state": "lost"}, {"at_s": 2.0, "replica": 2, "state": "ready"},
                                                {"at_s": 4.0, "replica": 1, "state": "starting"}, {"at_s": 6.0, "replica": 1, "state": "ready"}]}  # fmt: skip


class TestChanges:
    def test_faults_are_marked_and_replicas_in_service_counted(self, make_run):
        run = read_run(make_run())
        run = replace(run, summary={**run.summary, "fleet": FLEET, "duration_s": 9.0}, scenario={**run.scenario, "cluster": {"replicas": 2}})
        assert changes.in_service(run) == ([0.0, 2.0, 4.0, 6.0, 9.0], [2, 2, 2, 3, 3])
        text = render(run_page(run))
        series = next(figure for figure in figures_of(text) if figure["key"] == "series")
        assert [shape["x0"] for shape in series["layout"]["shapes"]] == [2.0, 5.0] and series["data"][-1]["name"] == "replicas in service"
        assert all(words in text for words in ("Faults; 3 requests were tried again, 0 failed", "replica lost", "1.50 s", "slow links", "not before the end"))

    def test_a_release_is_told_stage_by_stage(self, make_run):
        run = read_run(make_run())
        seen = {"outcomes": 1200, "failed": 0, "slo_attainment": 1.0, "ttft_s": {"p99": 0.1}, "tpot_s": {"p99": None}}
        stage = {"name": "probe", "check": "probe", "share": 0.25, "from_s": 0.0, "to_s": 30.0, "passed": True, "reason": "", "candidate": seen, "baseline": seen}
        last = {**stage, "name": "comparison", "passed": False, "reason": "TPOT p99 is 1.36 times the baseline's"}
        release = {"outcome": "rolled_back", "reason": "", "ended_s": 330.0, "stages": [stage, last], "variants": {}}
        table = changes.release_table(replace(run, summary={**run.summary, "rollout": release}))
        assert table.title.endswith("rolled back after 330 s") and table.rows[0][:6] == ["probe", "25%", "0 to 30", "1,200 / 1,200", "100 / 100", "- / -"]
        assert [row[-1] for row in table.rows] == ["passed", last["reason"]]

    def test_a_fleet_that_stays_as_it_is_has_none_of_it(self, make_run):
        run = read_run(make_run())
        assert changes.in_service(run) is None and not changes.marks(run) and changes.fault_table(run) is None and changes.release_table(run) is None


class TestAxes:
    @pytest.mark.parametrize(("low", "high"), [(112, 147), (8.3, 12), (300, 316), (10, 31), (0.9, 1.1), (950, 1020), (3, 800), (0.02, 90_000)])
    def test_a_logarithmic_axis_has_figures_to_read_by(self, low, high):
        made = duration_axis("x", low, high)
        seen = [tick for tick in made["tickvals"] if made["range"][0] <= np.log10(tick) <= made["range"][1]]
        assert 3 <= len(seen) <= 9 and len(made["tickvals"]) == len(made["ticktext"])

    def test_a_price_is_no_colour(self):
        script = (resources.files("validate.report") / "page.js").read_text()
        token = re.compile(re.search(r"/(\^.*?)/\.test\(value\)", script).group(1))
        assert token.match("$blue") and token.match("$blue-wash") and not token.match("$ an hour") and not token.match("$5.56")


class TestPareto:
    def test_front_against_its_definition(self):
        points = np.random.Generator(np.random.PCG64(1)).random((200, 3)).round(1)
        kept = front(points, [True, False, True])
        cost = points * [1, -1, 1]
        for i in range(len(points)):
            beaten = any((cost[j] <= cost[i]).all() and (cost[j] < cost[i]).any() for j in range(len(points)))
            assert kept[i] == (not beaten)

    def test_the_three_operating_points(self):
        """Error %, throughput, P99 ms: each is on the front; a bound on latency picks the low-latency one, a looser one the accurate one."""
        points = np.array([[3.8, 42, 210], [1.9, 67, 380], [0.7, 29, 640], [3.9, 41, 400]])
        assert front(points, [True, False, True]).tolist() == [True, True, True, False]
        columns = {"error": points[:, 0], "throughput": points[:, 1], "p99_ms": points[:, 2]}
        below = lambda limit: select(columns, "error", smaller_is_better=True, bounds={"p99_ms": (0, limit)})  # noqa: E731
        assert [below(250), below(400), below(700), below(100)] == [0, 1, 2, None]
        assert select(columns, "throughput", smaller_is_better=False, bounds={}) == 1

    def test_unknown_points_never_win(self):
        assert front(np.array([[np.nan, 1.0], [2.0, 2.0]]), [True, True]).tolist() == [False, True]


class TestTimeSeries:
    def test_binned_means_keep_the_integral(self):
        source = np.random.Generator(np.random.PCG64(2))
        start = np.cumsum(source.exponential(1.0, 500))
        duration, values = np.diff(np.append(start, start[-1] + 1)) * source.random(500), source.random(500)
        edges = np.linspace(0, start[-1] + 1, 38)
        mean = timeline.binned_mean(start, duration, values, edges)
        assert (mean * np.diff(edges)).sum() == pytest.approx((values * duration).sum())

    def test_waiting_obeys_littles_law_and_its_definition(self):
        source = np.random.Generator(np.random.PCG64(3))
        arrival = np.sort(source.random(300) * 100)
        scheduled = arrival + source.exponential(2.0, 300)
        edges = np.linspace(0, 120, 61)
        mean, peak = timeline.waiting(arrival, scheduled, edges)
        assert (mean * np.diff(edges)).sum() == pytest.approx(np.minimum(scheduled, 120).sum() - arrival.sum())
        for index in range(60):
            inside = np.concatenate([edges[index : index + 1], arrival[(arrival >= edges[index]) & (arrival < edges[index + 1])]])
            assert peak[index] == max(((arrival <= t) & (scheduled > t)).sum() for t in inside)

    def test_large_fleets_are_a_band(self, make_run):
        figure = timeline.series(read_run(make_run(replicas=6)))
        assert {"mean", "peak", "range of 6 replicas"} <= {trace["name"] for trace in figure.data}

    def test_pools_and_power_are_shown(self, make_run):
        run = read_run(make_run())
        pools = [{"role": "decode", "replicas": 1}, {"role": "prefill", "replicas": 1}]
        pooled = replace(run, scenario={**run.scenario, "cluster": {"pools": pools}}, steps={**run.steps, "power_w": np.full(len(run.steps["step"]), 650.0)})
        names, _, panels = timeline.panels(pooled)
        assert names == ["prefill pool", "decode pool"] and panels[-1].title == "power, W" and panels[-1].values.max() == pytest.approx(650)
        assert panels[0].values[0].max() > 0 and panels[0].values[1].max() == 0  # prompts wait before the prefill pool


class TestWords:
    @pytest.mark.parametrize(("value", "text"), [(None, "-"), (0, "0"), (0.01234, "0.0123"), (1.5, "1.50"), (1234.5, "1,234"), (float("nan"), "-")])
    def test_number(self, value, text):
        assert number(value) == text

    def test_percent_and_difference(self):
        assert percent(0.9999, 2) == "99.99%" and percent(-0.0001, 0) == "0%" and percent(0.99, 4) == "99%"
        assert difference(2.0, 1.9) == "-5.0%" and difference(0.0, 1.0) == "-"

    def test_verdict_warns_near_saturation_and_of_losses(self, make_run):
        run = read_run(make_run())
        busy = {**run.summary, "load_factor": 0.97, "requests": {**run.summary["requests"], "rejected": 3}}
        _, sentence = verdict(replace(run, summary=busy))
        assert "0.97 of saturation" in sentence and "3 of 300 requests were rejected" in sentence

    def test_verdict_blames_a_class(self, make_run):
        run = read_run(make_run())
        missed = {**run.summary, "slo_attainment": {"overall": 0.93, "by_class": {"p0": 0.8, "p1": 0.96}}}
        tone, sentence = verdict(replace(run, summary=missed))
        assert tone == "bad" and "class p0 does worst at 80.00%" in sentence


class TestCommand:
    def test_report_explain_and_trace(self, make_run, tmp_path, capsys):
        folder = str(make_run(spike="host_stall"))
        out, trace = tmp_path / "r.html", tmp_path / "t.json"
        assert twinserve.main(["report", folder, "--out", str(out), "--explain", "--trace-out", str(trace)]) == 0
        printed = capsys.readouterr()
        assert out.stat().st_size > 1e6 and json.loads(trace.read_text())["traceEvents"]
        assert "replica stood idle" in printed.out and "MB in" in printed.err
        assert twinserve.main(["report", folder, "--explain", "--metric", "ttft_s", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["metrics"]["ttft_s"]
        assert rows[0]["cause"] == "host_stall" and abs(sum(row["share"] for row in rows) - 1) < 1e-9

    @pytest.mark.parametrize("arguments", [[], ["--explain", "--metric", "ttft"], ["--explain", "--quantile", "2"]])
    def test_mistakes(self, make_run, arguments, capsys):
        assert twinserve.main(["report", str(make_run()), *arguments]) == 2
        assert capsys.readouterr().err.startswith("error:")


CHROMIUM = shutil.which("chromium") and shutil.which("chromedriver")
VISIBLE = "return [...document.querySelectorAll('.plot')].map(p => [p.id, p.querySelectorAll('.main-svg').length, p.scrollWidth > p.clientWidth + 1])"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from benchmarks.headless_browser import Browser

    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def files(make_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write(build([make_run(spike="host_stall")]), folder / "one.html")
    write(build([make_run(device="NVIDIA H200", speed=0.9, name="chat"), make_run(name="chat")]), folder / "two.html")
    return folder


@pytest.mark.skipif(not CHROMIUM, reason="no chromium and chromedriver: apt-get install chromium chromium-driver")
class TestInABrowser:
    @pytest.mark.parametrize(("name", "width", "scheme"), [("one.html", 1280, "dark"), ("one.html", 375, "light"), ("two.html", 375, "dark")])
    def test_draws_everything_within_the_screen(self, browser, files, name, width, scheme):
        browser.open(files / name, width=width, scheme=scheme)
        assert browser.complaints() == []
        drawn = browser.script(VISIBLE)
        assert len(drawn) >= 8 and all(layers > 0 and not wider for _, layers, wider in drawn), drawn
        assert browser.script("return document.documentElement.scrollWidth") <= width
        assert browser.script("return document.documentElement.dataset.theme") == scheme
        assert browser.script("return performance.getEntriesByName('twinserve-ready')[0].startTime") < 60_000  # a page that hangs; speed is measured elsewhere

    def test_the_button_changes_the_theme(self, browser, files):
        browser.open(files / "one.html", scheme="light")
        ink = "return getComputedStyle(document.querySelector('#plot-ladder .xtick text')).fill"
        before = browser.script(ink)
        browser.script("document.getElementById('theme').click()")
        assert browser.script("return document.documentElement.dataset.theme") == "dark" and browser.script(ink) != before
        browser.script("localStorage.clear()")

    def test_prints_light_and_whole(self, browser, files, tmp_path):
        browser.open(files / "one.html", scheme="dark")
        assert 3 <= browser.paper(tmp_path / "r.pdf") <= 8
        assert browser.script("return document.documentElement.dataset.theme") == "dark"
