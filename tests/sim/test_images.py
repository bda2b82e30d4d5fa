"""Images through an encoder into pages that are shared: what is computed once, and what it saves."""

from __future__ import annotations

import pytest
from test_stages import scenario

from serving.errors import InputError
from serving.records import open_run
from sim.run import simulate

ENCODER = {"name": "encoder", "encodes_images": True, "service_s": {"dist": "constant", "value": 0.05}, "servers": 4}
CACHE = {"cache": {"lookup_s": {"dist": "constant", "value": 0.001}, "capacity_bytes": 1e9, "entry_bytes": 1e6}}
IMAGES = {"count": 30, "zipf_exponent": 1.0, "tokens": {"dist": "uniform", "min": 100, "max": 800}}
ONE = {"replicas": 1, "gpu": "h100-sxm"}


def run(stages=(), images=IMAGES, workload=None, **options):
    return simulate(scenario(list(stages), {"images": images, **(workload or {})}, cluster=ONE), **options)


def test_the_same_image_is_encoded_once_and_its_pages_are_found(tmp_path):
    apart = {"requests": 4, "arrivals": {"process": "constant", "rate_rps": 0.2}, "prompt_tokens": {"dist": "constant", "value": 40}}
    images = {"count": 1, "tokens": {"dist": "constant", "value": 570}}
    run([ENCODER | CACHE], images, apart, out=tmp_path / "run")
    recorded = open_run(tmp_path / "run")
    assert recorded.requests["prompt_tokens"].tolist() == [576 + 40] * 4, "an image fills whole blocks"
    assert recorded.requests["cached_tokens"].tolist() == [0, 576, 576, 576]
    assert recorded.stages["outcome"].tolist() == ["miss", "hit", "hit", "hit"]
    ttft = recorded.requests["first_token_s"] - recorded.requests["arrival_s"]
    assert ttft[0] - ttft[1] > 0.05


def test_text_behind_the_same_image_is_found_turn_by_turn(tmp_path):
    talk = {"requests": 3, "arrivals": {"process": "constant", "rate_rps": 0.2}, "prompt_tokens": {"dist": "constant", "value": 40},
            "output_tokens": {"dist": "constant", "value": 33}, "sessions": {"turns": {"dist": "constant", "value": 3}}}  # fmt: skip
    run(images={"count": 1, "tokens": {"dist": "constant", "value": 512}}, workload=talk, out=tmp_path / "run")
    rows = open_run(tmp_path / "run").requests
    assert rows["prompt_tokens"].tolist() == [552, 625, 698]
    # All but the last token that was generated is in the cache, as far as it fills blocks of 16.
    assert rows["cached_tokens"].tolist() == [0, (552 + 32) // 16 * 16, (625 + 32) // 16 * 16]


def test_each_of_both_memories_saves_time_and_the_images_stay_the_same():
    busy = {"requests": 500, "arrivals": {"process": "poisson", "rate_rps": 20.0}}
    alone = {**IMAGES, "shared_pages": False}
    both, pages, outputs, none = (
        run([stage], images, busy).summary for stage, images in ((ENCODER | CACHE, IMAGES), (ENCODER, IMAGES), (ENCODER | CACHE, alone), (ENCODER, alone))
    )
    assert both["ttft_s"]["mean"] < min(pages["ttft_s"]["mean"], outputs["ttft_s"]["mean"]) < none["ttft_s"]["mean"]
    assert both["prefix_cache_hit_rate"] > 0.4 and none["prefix_cache_hit_rate"] == 0
    tokens = [summary["prompt_tokens_per_s"] * summary["duration_s"] for summary in (both, pages, outputs, none)]
    assert tokens == pytest.approx([tokens[0]] * 4)
    assert both["stages"][0]["served"] < 100 < pages["stages"][0]["served"] == 500


def test_only_requests_with_an_image_are_encoded():
    row = run([ENCODER], {**IMAGES, "share": 0.5}).summary["stages"][0]
    assert 120 < row["requests"] < 180


def test_fast_equals_stepwise_with_images():
    asked = scenario([ENCODER | CACHE], {"images": {**IMAGES, "share": 0.7}, "sessions": {"turns": {"dist": "constant", "value": 3}}})
    fast, stepwise = simulate(asked).summary, simulate(asked, stepwise=True).summary
    assert fast | {"events": 0} == stepwise | {"events": 0} and fast["requests"]["completed"] == 300


@pytest.mark.parametrize(
    ("stages", "workload", "where"),
    [
        ([ENCODER], {}, "stages[0].encodes_images"),
        ([{**ENCODER, "encodes_image": True}], {"images": IMAGES}, "stages[0].encodes_image"),
        ([], {"images": IMAGES, "reasoning": {"tokens": {"dist": "constant", "value": 9}}}, "workload"),
        ([], {"images": {**IMAGES, "count": 0}}, "workload.images.count"),
    ],
)
def test_a_mistake_names_its_place(stages, workload, where):
    with pytest.raises(InputError) as caught:
        scenario(stages, workload)
    assert caught.value.where.endswith(where)
