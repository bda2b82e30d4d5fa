"""Transfers over shared links: closed forms, max-min optimality, conservation of bytes, and the cases L2 and L3."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels.links import alignment_efficiency, pcie_packet_efficiency, pcie_raw_bytes_per_s
from serving.errors import InputError
from serving.topology import Pcie, parse_topology
from sim.environment import Environment
from sim.network import Flow, Network
from sim.topology import LinkGraph, build


def star(rates: list[float], trunk: float | None = None, duplex: str = "full", latency_s: float = 0.0) -> LinkGraph:
    """GPUs on one switch, each by a link of its own rate; with ``trunk`` the upper half sits behind a second switch."""
    half = len(rates) // 2 if trunk else len(rates)
    types = {
        f"r{i}": {"medium": "pcie", "source": "test", "latency_s": latency_s, "bytes_per_s": rate, "duplex": duplex}
        for i, rate in enumerate(rates)
    }
    wires = [{"ends": [f"gpu{i}", "hub0" if i < half else "hub1"], "type": f"r{i}"} for i in range(len(rates))]
    if trunk:
        types["trunk"] = {"medium": "pcie", "source": "test", "latency_s": 0.0, "bytes_per_s": trunk}
        wires.append({"ends": ["hub0", "hub1"], "type": "trunk"})
    parts = {"gpu": {"kind": "gpu", "count": len(rates)}, "hub": {"kind": "switch", "count": 2 if trunk else 1}}
    return LinkGraph(
        parse_topology(
            {
                "name": "star",
                "description": "",
                "sources": {},
                "link_types": types,
                "nodes": {"node": {"components": parts, "links": wires}},
            }
        )
    )


def drain(network: Network) -> None:
    while (due_s := network.next_completion_s()) < float("inf"):
        network.advance(due_s)


def test_n_flows_on_one_link_share_it_and_end_in_closed_form():
    network = Network(star([10.0, 10.0]))
    sizes = [10.0, 20.0, 40.0]
    flows = [network.start("gpu0", "gpu1", size) for size in sizes]
    drain(network)
    # 3 x 10 bytes at 10/3 each; then 2 x 10 at 5 each; then 20 alone at 10
    assert [flow.finish_s for flow in flows] == pytest.approx([3.0, 5.0, 7.0])
    network.check()


def test_three_flows_solved_by_hand():
    # f1 and f3 share the 4 into gpu1; f2 takes what f1 leaves of the 10 out of gpu0. f1 ends at 4 s (8 bytes at 2).
    network = Network(star([10.0, 4.0, 100.0, 100.0]))
    f1, f2, f3 = network.start("gpu0", "gpu1", 8.0), network.start("gpu0", "gpu2", 62.0), network.start("gpu3", "gpu1", 16.0)
    network.advance(0.0)
    assert [network.rate(flow) for flow in (f1, f2, f3)] == [2.0, 8.0, 2.0]
    drain(network)
    # after 4 s: f3 has 8 bytes left at 4 -> 6 s; f2 has 30 left at 10 -> 7 s
    assert [flow.finish_s for flow in (f1, f2, f3)] == pytest.approx([4.0, 7.0, 6.0])


def test_latency_and_operations_come_before_the_bytes():
    graph = build("dgx-h100")
    network = Network(graph)
    flow = network.start("gpu0", "dram0", 1 << 30, operations=100)
    route = graph.route("gpu0", "dram0")
    drain(network)
    assert flow.finish_s == pytest.approx(route.latency_s + 100 * route.operation_s + (1 << 30) / int(route.bytes_per_s), rel=1e-12)
    assert network.graph.route("gpu0", "dram0").operation_s > 0


def test_full_duplex_directions_are_free_of_each_other_and_half_duplex_ones_share():
    for duplex, finish_s in (("full", 1.0), ("half", 2.0)):
        network = Network(star([10.0, 10.0], duplex=duplex))
        flows = [network.start("gpu0", "gpu1", 10.0), network.start("gpu1", "gpu0", 10.0)]
        drain(network)
        assert [flow.finish_s for flow in flows] == pytest.approx([finish_s, finish_s])


def test_a_more_urgent_flow_takes_the_link_first():
    network = Network(star([10.0, 10.0]))
    late, urgent = network.start("gpu0", "gpu1", 10.0, priority=1), network.start("gpu0", "gpu1", 10.0, priority=0)
    drain(network)
    assert (urgent.finish_s, late.finish_s) == (1.0, 2.0)


def test_cancelling_gives_the_rate_back_and_keeps_the_bytes_moved():
    network = Network(star([10.0, 10.0]))
    gone, kept = network.start("gpu0", "gpu1", 100.0), network.start("gpu0", "gpu1", 10.0)
    network.advance(1.0)
    network.cancel(gone)
    drain(network)
    assert gone.state == "cancelled" and kept.finish_s == pytest.approx(1.5)
    network.check()
    assert network.link_report()[0]["carried_bytes"] == pytest.approx(15.0)


def test_a_cancelled_waiting_flow_never_starts():
    network = Network(star([10.0, 10.0], latency_s=1.0))
    flow = network.start("gpu0", "gpu1", 10.0)
    network.cancel(flow)
    assert network.next_completion_s() == float("inf") and flow.finish_s == 0.0


def test_a_degraded_link_slows_its_flows_and_a_dead_one_stalls_them():
    network = Network(star([10.0, 10.0]))
    flow = network.start("gpu0", "gpu1", 20.0)
    network.advance(1.0)
    network.set_link_factor("gpu0--hub0", 0.5)
    network.advance(2.0)
    network.set_link_factor("gpu0--hub0", 0.0)
    assert network.next_completion_s() == float("inf")
    network.advance(5.0)
    network.set_link_factor("gpu0--hub0", 1.0)
    drain(network)
    assert flow.finish_s == pytest.approx(5.5)
    network.check()


def test_empty_and_local_transfers_end_after_their_latency():
    network = Network(star([10.0, 10.0], latency_s=0.5))
    ended: list[Flow] = []
    network.start("gpu0", "gpu1", 0.0, ended.append)
    network.start("gpu0", "gpu0", 10.0, ended.append)
    drain(network)
    assert sorted(flow.finish_s for flow in ended) == [0.0, 1.0]


@pytest.mark.parametrize(("src", "dst", "size"), [("gpu0", "gpu9", 1.0), ("gpu0", "gpu1", -1.0), ("gpu0", "gpu1", float("inf"))])
def test_bad_transfers_are_refused(src, dst, size):
    with pytest.raises(InputError):
        Network(star([1.0, 1.0])).start(src, dst, size)


TRANSFERS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 50), st.integers(0, 20), st.integers(0, 1)).filter(
        lambda t: t[0] != t[1]
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    rates=st.lists(st.sampled_from([1.0, 3.0, 7.0, 10.0, 40.0]), min_size=6, max_size=6),
    trunk=st.sampled_from([None, 2.0, 15.0]),
    transfers=TRANSFERS,
    cancel=st.integers(0, 30),
)
def test_rates_are_max_min_fair_equal_a_full_solution_and_conserve_bytes(rates, trunk, transfers, cancel):
    network = Network(star(rates, trunk, duplex="half" if len(transfers) % 3 == 0 else "full"))
    flows: list[Flow] = []
    for at, (src, dst, size, start, priority) in enumerate(sorted(transfers, key=lambda t: t[3])):
        network.advance(max(network.now_s, start / 4))
        flows.append(network.start(f"gpu{src}", f"gpu{dst}", float(size), priority=priority))
        network.advance(network.now_s)
        if at == cancel:
            network.cancel(flows[-1])
        assert_max_min(network, flows)
        network.check()
    while (due_s := network.next_completion_s()) < float("inf"):
        network.advance(due_s)
        assert_max_min(network, flows)
        network.check()
    assert all(flow.state in ("done", "cancelled") for flow in flows)
    for row, total in zip(network.link_report(), carried_by_link(flows)):
        assert row["carried_bytes"] == pytest.approx(total, rel=1e-9, abs=1e-6)


def assert_max_min(network: Network, flows: list[Flow]) -> None:
    """Every moving flow has a bottleneck: its cap, or a full channel where nobody of its class is faster and no lower class moves."""
    moving = [flow for flow in flows if flow.state == "moving"]
    full = network.full_rates()
    for flow in moving:
        assert network.rate(flow) == pytest.approx(full[flow.id], rel=1e-7)
        bottleneck = network.rate(flow) >= flow.key[1] * (1 - 1e-7)
        for channel, _ in flow.route.channels:
            here = [(other, dict(other.route.channels)[channel]) for other in moving if channel in dict(other.route.channels)]
            used = sum(times * network.rate(other) for other, times in here)
            assert used <= channel.bytes_per_s * (1 + 1e-7)
            fastest = max(network.rate(other) for other, _ in here if other.priority == flow.priority)
            lower = sum(network.rate(other) for other, _ in here if other.priority > flow.priority)
            bottleneck |= used >= channel.bytes_per_s * (1 - 1e-7) and network.rate(flow) >= fastest * (1 - 1e-7) and lower <= 1e-7
        assert bottleneck, f"flow {flow.id} at {network.rate(flow)} could be faster"


def carried_by_link(flows: list[Flow]) -> list[float]:
    """Bytes by channel from the flows alone: all of those that ended, none of those cancelled at the instant they began."""
    totals: dict[int, float] = {}
    for flow in flows:
        for channel, times in flow.route.channels:
            totals[channel.index] = totals.get(channel.index, 0.0) + (times * flow.bytes if flow.state == "done" else 0.0)
    return [totals[index] for index in sorted(totals)]


def test_like_flows_cost_one_group_however_many_share_the_link():
    costs = []
    for count in (50, 500):
        network = Network(star([10.0, 10.0]))
        for i in range(count):
            network.start("gpu0", "gpu1", 1.0 + i)
        drain(network)
        costs.append(network.settled / network.events)
    assert costs[1] <= costs[0] <= 1.1  # groups solved per event do not grow with the flows on the link


def test_a_start_settles_only_what_it_reaches():
    graph = build("dgx-h100", nodes=128)
    network = Network(graph)
    for i in range(0, 512, 2):  # one transfer on each of 256 disjoint pairs of GPUs
        network.start(graph.gpus[i], graph.gpus[512 + i], 1e9)
    network.advance(0.001)
    before = network.settled
    network.start(graph.gpus[0], graph.gpus[512], 1e9, priority=1)
    network.advance(0.002)
    assert network.settled - before <= 2


def test_a_simpy_environment_drives_the_same_times_as_the_bare_clock():
    finishes = []
    for env in (None, Environment()):
        network = Network(star([10.0, 3.0, 7.0], latency_s=0.25), env)
        ended: list[tuple[float, int]] = []

        def again(flow: Flow, network: Network = network, ended: list = ended) -> None:
            ended.append((flow.finish_s, flow.id))
            if flow.id < 6:
                network.start(flow.dst, "gpu0" if flow.dst != "gpu0" else "gpu2", flow.bytes / 2, again)

        for dst, size in (("gpu1", 9.0), ("gpu2", 30.0), ("gpu1", 2.0)):
            network.start("gpu0", dst, size, again)
        drain(network) if env is None else env.run()
        finishes.append(ended)
    assert finishes[0] == finishes[1] and len(finishes[0]) > 6


# --- cases and claims --------------------------------------------------------------------------------------------------


def test_case_l2_host_link_nvlink_and_gen4():
    h100, a100 = Network(build("dgx-h100")), Network(build("dgx-a100"))
    token = 144 * 1024
    load = h100.start("dram0", "gpu0", 10_010 * token, operations=10_010)
    drain(h100)
    store = h100.start("gpu0", "dram0", 3_866 * token, operations=3_866)
    drain(h100)
    assert (load.finish_s - load.start_s) == pytest.approx(33.43e-3, rel=0.15)
    assert (store.finish_s - store.start_s) == pytest.approx(11.95e-3, rel=0.15)
    assert h100.graph.route("gpu0", "dram0").bytes_per_s == pytest.approx(52.8e9, rel=0.01)
    assert h100.graph.route("gpu0", "gpu1").bytes_per_s == pytest.approx(380e9, rel=0.01)
    assert a100.graph.route("gpu0", "dram0").bytes_per_s == pytest.approx(25e9, rel=0.01)


@pytest.mark.parametrize("overlapping", [1, 4, 16])
def test_case_l3_throughput_is_over_wall_time_not_over_the_sum_of_durations(overlapping):
    network = Network(star([7.098e9, 7.098e9]))
    flows = [network.start("gpu0", "gpu1", 70.0e6) for _ in range(overlapping)]
    drain(network)
    assert network.link_report()[0]["throughput_bytes_per_s"] == pytest.approx(7.098e9, rel=1e-6)
    under_reported = sum(flow.bytes for flow in flows) / sum(flow.finish_s - flow.start_s for flow in flows)
    assert under_reported == pytest.approx(7.098e9 / overlapping, rel=1e-6)
    if overlapping == 1:
        assert flows[0].finish_s == pytest.approx(9.862e-3, rel=0.001)


def test_c1_gen4_x16_both_ways_and_with_the_iommu():
    link = Pcie(generation=4, lanes=16)
    assert 2 * pcie_raw_bytes_per_s(link) * pcie_packet_efficiency(link) == pytest.approx(58.2e9, rel=0.02)  # claim: 58.2 GB/s
    plain, guarded = (iommu_graph(iommu).route("gpu0", "dram0") for iommu in (False, True))
    assert guarded.bytes_per_s / plain.bytes_per_s == pytest.approx(52.7 / 58.2, rel=0.01)
    assert guarded.latency_s > plain.latency_s


def iommu_graph(iommu: bool) -> LinkGraph:
    from serving.catalog import read_entry

    data, _ = read_entry("topologies", "dgx-a100", "test")
    return LinkGraph(parse_topology(data | {"iommu": iommu}))


def switch_graph(gpus: int) -> LinkGraph:
    """GPUs on Gen4 x8 ports of one switch, whose x16 uplink leads to host memory."""
    types = {
        "x8": {"medium": "pcie", "source": "test", "latency_s": 1e-6, "pcie": {"generation": 4, "lanes": 8}},
        "x16": {"medium": "pcie", "source": "test", "latency_s": 1e-6, "pcie": {"generation": 4, "lanes": 16}},
    }
    parts = {
        "gpu": {"kind": "gpu", "count": gpus},
        "plx": {"kind": "switch"},
        "root": {"kind": "root_complex"},
        "dram": {"kind": "host_memory"},
    }
    ends = f"gpu[0-{gpus - 1}]"
    links = [
        {"ends": [ends, "plx0"], "type": "x8"},
        {"ends": ["plx0", "root0"], "type": "x16"},
        {"ends": ["root0", "dram0"], "type": "x16"},
    ]
    return LinkGraph(
        parse_topology(
            {"name": "c2", "description": "", "sources": {}, "link_types": types, "nodes": {"node": {"components": parts, "links": links}}}
        )
    )


def test_c2_four_gpus_behind_one_switch_halve_and_a_small_message_waits_longer():
    alone = switch_graph(4).route("gpu0", "dram0").bytes_per_s
    assert alone == pytest.approx(14.2e9, rel=0.03)  # claim: 14.2 GB/s with one
    network = Network(switch_graph(4))
    flows = [network.start(f"gpu{i}", "dram0", 1e9) for i in range(4)]
    network.advance(1e-3)
    uplink = 2 * alone
    assert [network.rate(flow) for flow in flows] == pytest.approx([min(alone, uplink / 4)] * 4, rel=1e-6)
    assert network.rate(flows[0]) == pytest.approx(7.1e9, rel=0.03)  # claim: 7.1 GB/s with four
    crowded = network.start("gpu0", "dram0", 1 << 20)
    drain(network)
    quiet_network = Network(switch_graph(4))
    quiet = quiet_network.start("gpu0", "dram0", 1 << 20)
    drain(quiet_network)
    # claim: acknowledgements +320 %. A fifth of the uplink instead of a whole port is +150 %: fluids hold no queue of packets
    assert (crowded.finish_s - crowded.start_s) / (quiet.finish_s - quiet.start_s) == pytest.approx(2.5, rel=0.05)


def test_d7_misaligned_pieces_touch_more_granules():
    assert alignment_efficiency(64, 16, 32) == pytest.approx(1327 / 1982, rel=0.01)  # claim: 1982 -> 1327 GB/s at 16 B
    assert alignment_efficiency(64, 32, 32) == 1.0
    graph = build("dgx-h100")
    times = []
    for offset in (0, 16):
        network = Network(graph)
        flow = network.start("gpu0", "dram0", 128 * 10_000, operations=10_000, offset_bytes=offset)
        drain(network)
        times.append(flow.finish_s)
    assert times[1] > times[0]


def test_a12_near_shards_beat_random_ones_in_latency_and_spread():
    graph = build("pcie-8gpu")
    near, far = ("gpu0", "gpu1"), ("gpu0", "gpu6")
    assert graph.latency_s(*near) < graph.latency_s(*far)
    assert graph.capacity_bytes_per_s(*near) == pytest.approx(0.8 * graph.route(*near).bytes_per_s)
    finish: dict[str, list[float]] = {}
    for name, pairs in {"near": [(0, 1), (2, 3), (4, 5), (6, 7)], "crossed": [(0, 4), (1, 5), (2, 6), (3, 7)]}.items():
        network = Network(graph)
        flows = [network.start(f"gpu{a}", f"gpu{b}", 64e6) for a, b in pairs]
        drain(network)
        finish[name] = [flow.finish_s for flow in flows]
    assert max(finish["near"]) < max(finish["crossed"]) / 3  # four crossed shards share one uplink
