"""Pipelines, experts, sequence parallelism and KV shards: closed forms and the claims of B6 and M5."""

from __future__ import annotations

import pytest

from hwmodels.collectives import sent_bytes
from hwmodels.parallel import (
    expert_exchange_bytes,
    expert_imbalance,
    kv_capacity_tokens,
    kv_shards,
    pipeline_bubble,
    pipeline_s,
    sequence_parallel,
    split_layers,
)
from serving.errors import InputError

LLAMA_8B = {"layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "context_tokens": 8192}


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 1), (4, 8), (8, 64)])
def test_bubble_is_the_idle_share_of_the_pipeline(stages, micro_batches):
    total = pipeline_s([1.0] * stages, micro_batches)
    assert pipeline_bubble(stages, micro_batches) == pytest.approx(1 - micro_batches / total)


def test_the_slowest_stage_and_its_send_set_the_pace():
    assert pipeline_s([1.0, 3.0, 1.0], 5) == 5.0 + 4 * 3.0
    assert pipeline_s([1.0, 1.0], 3, transfer_s=0.5) == 2.5 + 2 * 1.5


def test_layers_split_evenly_and_too_many_stages_are_refused():
    assert split_layers(33, 4) == [9, 8, 8, 8]
    with pytest.raises(InputError, match=r"cluster.pipeline_parallel: 5 stages cannot share 4 layers"):
        split_layers(4, 5)


def test_expert_exchange_counts_top_k_copies_of_every_token():
    vector = expert_exchange_bytes(1024, 4096, experts_per_token=2, ranks=8)
    assert vector == 128 * 2 * 4096 * 2
    assert sent_bytes("all_to_all", "library", vector, 8) == vector * 7 / 8


def test_imbalance_is_the_busiest_rank_over_the_mean():
    assert expert_imbalance([10, 10, 10, 10], 2) == 1.0
    assert expert_imbalance([30, 10, 0, 0], 2) == 2.0
    with pytest.raises(InputError, match=r"cluster.expert_parallel"):
        expert_imbalance([1, 1, 1], 2)


def test_sequence_parallelism_moves_the_bytes_of_a_ring_and_shards_activations():
    parts = sequence_parallel(2048, 4096, 4)
    moved = sent_bytes("reduce_scatter", "library", parts.reduce_scatter_bytes, 4) + sent_bytes(
        "all_gather", "library", parts.all_gather_bytes, 4
    )
    assert moved == sent_bytes("all_reduce", "two_shot", 2048 * 4096 * 2, 4)
    assert parts.activation_bytes == 2048 * 4096 * 2 / 4


def test_b6_every_sharding_saves_three_quarters_on_four_gpus_when_it_divides_evenly():
    for sharding in ("layer", "head", "sequence"):
        shards = kv_shards(sharding, **LLAMA_8B, ranks=4)
        assert shards.saved == pytest.approx(0.75) and shards.balance == pytest.approx(1.0)


def test_b6_what_each_sharding_exchanges_and_where_it_is_uneven():
    layer, head, sequence = (kv_shards(kind, **LLAMA_8B, ranks=4) for kind in ("layer", "head", "sequence"))
    assert (layer.all_reduces, layer.hops) == (0, 3)
    assert head.all_reduces == sequence.all_reduces == 32 and head.all_reduce_bytes < sequence.all_reduce_bytes
    assert kv_shards("layer", **(LLAMA_8B | {"layers": 33}), ranks=4).balance == pytest.approx(33 / 36)
    copied = kv_shards("head", **LLAMA_8B, ranks=16)  # eight KV heads on sixteen ranks: two copies of each
    assert copied.saved == pytest.approx(1 - 1 / 8) and kv_shards("sequence", **LLAMA_8B, ranks=16).saved == pytest.approx(1 - 1 / 16)
    short = kv_shards("sequence", **(LLAMA_8B | {"context_tokens": 20}), ranks=4)  # two blocks cannot fill four ranks
    assert short.saved == pytest.approx(0.2)
    with pytest.raises(InputError, match=r"kv_cache.sharding: there is no sharding 'heads' .*head"):
        kv_shards("heads", **LLAMA_8B, ranks=4)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_m5_doubling_tensor_parallelism_saves_one_copy_of_the_weights(degree):
    memory, weights, kv = 71.3e9, 141e9, 320 * 1024
    doubled = kv_capacity_tokens(memory, weights, kv, 2 * degree)
    assert doubled == pytest.approx(2 * kv_capacity_tokens(memory, weights, kv, degree) + weights / kv)
