"""Images at the front of prompts: whole blocks, keys that everybody with the same image shares, and nobody else."""

from __future__ import annotations

import itertools

import pytest

from serving.errors import InputError
from serving.scenario.workload import Workload
from serving.workload import conversations, open_arrivals

TEXT = {"requests": 600, "arrivals": {"process": "poisson", "rate_rps": 5.0}, "prompt_tokens": {"dist": "uniform", "min": 40, "max": 300},
        "output_tokens": {"dist": "constant", "value": 30}, "prefix": {"groups": 3, "tokens": {"dist": "constant", "value": 96}}}  # fmt: skip
IMAGES = {"count": 20, "zipf_exponent": 1.0, "share": 0.6, "tokens": {"dist": "uniform", "min": 50, "max": 200}}


def draw(images: dict | None = None, **changes: object):
    spec = Workload(**{**TEXT, **({} if images is None else {"images": images})})
    options = {"seed": 3, "block_tokens": 16, "max_model_len": 4096, "prefix_caching": True, **changes}
    return [arrival.request for arrival in open_arrivals(spec, **options)]


def test_an_image_takes_whole_blocks_before_the_same_text():
    plain, pictured = draw(), draw(IMAGES)
    with_image = [request for request in pictured if request.image is not None]
    assert len(with_image) / len(pictured) == pytest.approx(0.6, abs=0.08)
    blocks: dict[int, int] = {}
    for before, after in zip(plain, pictured):
        if after.image is None:
            assert after == before
            continue
        added = after.prompt_tokens - before.prompt_tokens
        assert added % 16 == 0 and 50 <= added < 216
        assert blocks.setdefault(after.image, added // 16) == added // 16, "an image is as long whoever asks about it"
        assert len(after.prefix_hashes) == len(before.prefix_hashes) + added // 16 and after.arrival_s == before.arrival_s
    counts = [sum(request.image == image for request in with_image) for image in (0, 5, 19)]
    assert counts[0] > counts[1] > counts[2]


def test_keys_are_equal_where_image_and_text_are_and_nowhere_else():
    plain, pictured = draw(), draw(IMAGES)
    pairs = [(before, after) for before, after in zip(plain, pictured)][:120]
    for (text_a, a), (text_b, b) in itertools.combinations(pairs, 2):
        same = sum(1 for _ in itertools.takewhile(lambda keys: keys[0] == keys[1], zip(a.prefix_hashes, b.prefix_hashes)))
        if a.image != b.image:
            assert not set(a.prefix_hashes) & set(b.prefix_hashes)
            continue
        text = sum(1 for _ in itertools.takewhile(lambda keys: keys[0] == keys[1], zip(text_a.prefix_hashes, text_b.prefix_hashes)))
        assert same == text + len(a.prefix_hashes) - len(text_a.prefix_hashes)


def test_without_shared_pages_nothing_is_known_behind_an_image():
    for changes, images in (({}, {**IMAGES, "shared_pages": False}), ({"prefix_caching": False}, IMAGES)):
        for request in draw(images, **changes):
            assert request.image is None or (request.prefix_hashes == () and request.generated_hash_seed is None)


def test_a_session_keeps_its_image_and_its_history_is_found_behind_it():
    talk = {**TEXT, "prefix": None, "sessions": {"turns": {"dist": "constant", "value": 3}}, "images": {**IMAGES, "share": 1.0}}
    for session in itertools.islice(conversations(Workload(**talk), seed=3, block_tokens=16, max_model_len=4096, prefix_caching=True), 40):
        first, *later = [turn.arrival for turn in session.turns]
        computed = first.request.prefix_hashes
        for arrival in (first, *later):
            request = arrival.request
            assert request.image == first.request.image
            assert request.prefix_hashes[: len(computed)] == computed
            # What the scheduler will call the blocks that are generated now, by their place in the sequence.
            full = (request.prompt_tokens + arrival.output_tokens) // 16
            known = request.prefix_hashes
            computed = known + tuple((request.generated_hash_seed, index) for index in range(len(known), full))


@pytest.mark.parametrize(
    ("images", "where"),
    [
        ({**IMAGES, "tokens": {"dist": "exponential", "mean": 100}}, "workload.images.tokens"),
        ({**IMAGES, "tokens": {"dist": "constant", "value": 4090}}, "workload.images.tokens"),
    ],
)
def test_an_image_must_fit(images, where):
    with pytest.raises(InputError) as caught:
        draw(images)
    assert caught.value.where == where


def test_the_longest_image_leaves_room():
    """Prompts of up to 300 tokens and images of up to 208: answers are capped so that all fit into 515, if only by one token."""
    drawn = draw({**IMAGES, "share": 1.0}, max_model_len=515)
    assert max(request.prompt_tokens + request.max_output_tokens for request in drawn) <= 515
    assert min(request.max_output_tokens for request in drawn) < 30
