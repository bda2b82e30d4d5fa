"""The sweep over prefill-decode ratios: what is read, what the client sends, which ratio counts as best, what is refused."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest

from serving.errors import InputError
from serving.instants import ARRIVAL
from sim.environment import Environment
from validate.accuracy import accuracy
from validate.accuracy_tables import print_rows
from validate.measured import pd_ratio, pd_replay
from validate.measured.pd_replay import Deployment, Load
from validate.measured.row import row

NAME = "sglang_pd_gpt-oss-120b_8xh200"


@pytest.fixture(scope="module")
def sweep(data_dir):
    (found,) = pd_ratio.find(data_dir / "measured" / NAME)
    return found


@pytest.fixture
def copy(data_dir, tmp_path):
    """Write a copy of the sweep with changed records and settings: ``copy(change, **settings)``; a setting of None is dropped."""

    def write(change=lambda records: records, **changed):
        import yaml

        source = data_dir / "measured" / NAME
        records = change(list(csv.DictReader(io.StringIO((source / "results.csv").read_text()))))
        with (tmp_path / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
        settings = yaml.safe_load((source / "settings.yaml").read_text()) | changed
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
        return tmp_path

    return write


def altered(**values):
    """A change of the first record."""
    return lambda records: [records[0] | values, *records[1:]]


def test_the_sweep_is_read_with_the_lengths_that_were_served(sweep):
    assert (sweep.llm, sweep.gpu, sweep.topology, sweep.gpus, sweep.tensor_parallel) == ("gpt-oss-120b", "h200-sxm", "dgx-h200", 8, 2)
    assert len(sweep.runs) == 57 and [run.failed for run in sweep.runs if run.failed] == [120]
    first = sweep.runs[0]
    assert first.load == Load(128, 500, 128, pytest.approx(696.94), 2048) and first.tpot_s == pytest.approx(0.01036, abs=1e-5)
    assert len({(run.shape, run.load.users) for run in sweep.runs}) == 15


def test_only_a_ratio_that_leaves_gpus_idle_is_also_put_on_all_of_them(sweep):
    degrees = {ratio: [each.tensor_parallel for each in sweep.deployments(ratio)] for ratio in ((1, 1), (1, 3), (2, 2), (3, 1))}
    assert degrees == {(1, 1): [2, 4], (1, 3): [2], (2, 2): [2], (3, 1): [2]}
    assert [each.gpus for each in sweep.deployments((1, 1))] == [4, 8]


@pytest.mark.parametrize(("mean", "limit"), [(62.0, 128), (697.0, 2048), (11_955.5, 32_784), (49.4, 2048), (120.0, 128)])
def test_output_lengths_have_the_measured_mean_and_assume_no_more(mean, limit):
    lengths = np.array(pd_replay.output_lengths(Load(32, 500, 128, mean, limit)))
    assert len(lengths) == 500 and lengths.min() >= 1 and lengths.max() <= limit
    assert lengths.mean() == pytest.approx(mean, rel=0.005)
    # log frequency falls or rises in a straight line: the middle third of the range holds the geometric mean of the outer ones
    outer, middle, other = np.histogram(lengths, bins=3, range=(0.5, limit + 0.5))[0]
    if min(outer, other) > 20:
        assert middle == pytest.approx(np.sqrt(outer * other), rel=0.05)


def test_output_lengths_without_room_are_all_alike():
    assert pd_replay.output_lengths(Load(1, 3, 128, 128.0, 128)) == [128] * 3
    assert pd_replay.output_lengths(Load(1, 3, 128, 1.0, 128)) == [1] * 3


class Stub:
    """Answers each request a second after it came."""

    def __init__(self):
        self.env, self.open, self.most, self.order, self.watch = Environment(), 0, 0, [], None

    def on_outcome(self, watcher):
        self.watch = watcher

    def submit(self, request, output_tokens):
        self.open += 1
        self.most = max(self.most, self.open)
        self.order.append((request.request_id, request.arrival_s, request.prefix_hashes))
        self.env.at(self.env.now + 1.0, lambda event: self._answer(request), ARRIVAL)

    def _answer(self, request):
        self.open -= 1
        self.watch(request.request_id, self.env.now, "stop")


def test_the_client_tests_first_then_keeps_its_number_open_and_sends_the_same_prompts_again():
    fleet = Stub()
    client = pd_replay.Client(fleet)
    assert client.run(Load(3, 7, 32, 5.0, 9)) == (1, 8)
    assert fleet.most == 3 and [each[0] for each in fleet.order] == list(range(8))
    assert [each[1] for each in fleet.order] == [0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0]
    assert client.run(Load(2, 7, 32, 5.0, 9)) == (9, 16)
    contents = [each[2] for each in fleet.order]
    assert contents[0] == contents[1] and contents[:8] == contents[8:] and len(set(contents)) == 7


def test_a_later_run_finds_its_prompts_cached_where_the_router_sends_them_to_the_same_server():
    load = Load(8, 24, 2048, 4.0, 8)  # 25 requests with the test: odd, so two servers swap their prompts
    one, _ = pd_replay.replay(Deployment("gpt-oss-120b", "h200-sxm", "dgx-h200", 1, 1, 2), [load, load])
    two, _ = pd_replay.replay(Deployment("gpt-oss-120b", "h200-sxm", "dgx-h200", 2, 1, 2), [load, load, load])
    assert one[1].ttft_s < 0.3 * one[0].ttft_s
    assert two[1].ttft_s > 0.8 * two[0].ttft_s and two[2].ttft_s < 0.3 * two[0].ttft_s


def test_the_roofline_steps_in_where_the_package_cannot_price(monkeypatch):
    monkeypatch.setattr(pd_replay, "PRICED_AS", "no-such-engine")
    deployment, load = Deployment("gpt-oss-120b", "h200-sxm", "dgx-h200", 1, 1, 2), Load(2, 4, 256, 4.0, 8)
    (figures,), words = pd_replay.replay(deployment, [load])
    assert words == "roofline" and figures.output_tokens_per_s > 0
    with pytest.raises(InputError, match="the topology has 8 h200-sxm"):
        pd_replay.replay(Deployment("gpt-oss-120b", "h200-sxm", "dgx-h200", 2, 3, 2), [load])


def test_a_few_rows_replayed_name_the_measured_best_ratio(copy):
    def short_answers(records):
        kept = [each for each in records if (each["isl"], each["osl"]) == ("2048", "128") and each["conc"] != "64"]
        return [each for each in kept if (each["prefill"], each["decode"]) in (("3", "1"), ("1", "3"))]

    found = accuracy(copy(short_answers))
    assert len(found) == 4 * 3 and {each.metric for each in found} == {"ttft_s", "tpot_s", "output_tokens_per_s"}
    cells = pd_ratio.readings(found)["servers as the settings say"]
    assert {cell.name: (cell.chosen, cell.best, cell.right) for cell in cells} == {
        "2048+128 x 128": ("3:1", ["3:1"], True),
        "2048+128 x 32": ("1:3", ["1:3"], True),
    }
    text = io.StringIO()
    print_rows(found, None, text)
    assert "servers as the settings say: 2 of 2 right (always 1:3: 1); wrong: none" in text.getvalue()


def rates(cell, **by_part):
    parts = {"one4": "1:1 on 4 GPUs", "one8": "1:1 on 8 GPUs", "three8": "1:3 on 8 GPUs"}
    return [row(f"x/{parts[part]}/{cell}", "s", "m", "output_tokens_per_s", "mean", *pair, "nothing") for part, pair in by_part.items()]


def test_the_best_ratio_is_by_gpu_second_and_a_tie_within_five_per_cent_counts():
    found = rates("a x 1", one4=(400.0, 300.0), one8=(400.0, 700.0), three8=(764.0, 620.0))
    stated, whole, needing = pd_ratio.readings(found).values()
    assert (
        stated[0].real == {"1:1": 100.0, "1:3": 95.5} and stated[0].best == ["1:1", "1:3"] and stated[0].chosen == "1:3" and stated[0].right
    )
    assert whole[0].chosen == "1:1" and whole[0].best == ["1:3"] and not whole[0].right
    assert needing[0].real == {"1:3": 95.5}
    beyond = rates("a x 1", one4=(400.0, 300.0), one8=(400.0, 700.0), three8=(759.0, 620.0))
    assert not pd_ratio.readings(beyond)["servers as the settings say"][0].right
    lines = pd_ratio.verdicts(found)
    assert "1 of 1 right" in lines[0] and "0 of 1 right (always 1:3: 1); wrong: a x 1: 1:1, not 1:3" in lines[1]


def test_rows_of_other_data_have_no_ratios():
    assert pd_ratio.readings([row("t/policy/3 rps", "s", "m", "output_tokens_per_s", "mean", 1.0, 1.0, "nothing")]) == {}


@pytest.mark.parametrize(
    ("change", "settings", "problem"),
    [
        (
            lambda records: [{key: value for key, value in each.items() if key != "completed"} for each in records],
            {},
            "column 'completed' is missing",
        ),
        (altered(total_output_tokens="lots"), {}, r"results.csv:2: 'total_output_tokens' is 'lots', not a number"),
        (altered(output_throughput="0"), {}, "column 'output_throughput' is 0"),
        (altered(total_output_tokens="5000000"), {}, "10000 tokens on average, more than the 2048"),
        (altered(completed="501"), {}, "501 of 500 requests completed"),
        (altered(decode="2"), {}, "ratio 1:2 is not among those"),
        (lambda records: [records[0], *records], {}, r"1:1, 128\+2048 x 128: there are two rows"),
        (altered(), {"workers": "TP 4"}, "needs more than the 8 GPUs"),
        (altered(), {"workers": "two each"}, "settings.yaml:workers"),
        (altered(), {"gpus": None}, "does not state gpus"),
        (altered(), {"gpus": "8 x H201 SXM5 in one host"}, "no 'h201-sxm'"),
        (altered(), {"engine": "SGLang, its own model"}, "names no language model"),
    ],
)
def test_a_broken_sweep_is_refused_with_the_place(copy, change, settings, problem):
    with pytest.raises(InputError, match=problem):
        pd_ratio.find(copy(change, **settings))
