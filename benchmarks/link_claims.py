"""The figures of the links' rows of docs/systems.md and docs/links.md: closed forms and flows, beside what others claim.

    python -m benchmarks.link_claims
"""

from __future__ import annotations

from itertools import pairwise

from hwmodels.links import alignment_efficiency, pcie_packet_efficiency, pcie_raw_bytes_per_s
from hwmodels.patterns import LinkRate, hierarchical_allreduce_s, linear_broadcast_s, ring_allreduce_s, tree_broadcast_s
from serving.topology import Pcie, parse_topology
from sim.network import Network
from sim.topology import LinkGraph

NVLINK, PCIE = LinkRate(253e9, 3e-6), LinkRate(25e9, 8e-6)
GIGABIT = LinkRate(125e6, 1e-3)
REDUCED_BYTES, GROUPS, GPUS_IN_GROUP = 142e6, 2, 4  # the claim's 12.7 ms at 11.2 GB/s
RECEIVERS, CHUNK_BYTES = 12, 4096


def switch(gpus: int) -> LinkGraph:
    """GPUs on Gen4 x8 ports of one switch, whose x16 uplink leads to host memory."""
    types = {
        f"x{lanes}": {"medium": "pcie", "source": "C2", "latency_s": 1e-6, "pcie": {"generation": 4, "lanes": lanes}} for lanes in (8, 16)
    }
    parts = {"gpu": {"kind": "gpu", "count": gpus}, "plx": {"kind": "switch"}, "root": {"kind": "root_complex"}, "dram": {"kind": "host_memory"}}
    ends = (f"gpu[0-{gpus - 1}]", "plx0", "root0", "dram0")
    links = [{"ends": list(pair), "type": type_} for pair, type_ in zip(pairwise(ends), ("x8", "x16", "x16"))]
    node = {"components": parts, "links": links}
    return LinkGraph(parse_topology({"name": "c2", "description": "", "sources": {}, "link_types": types, "nodes": {"node": node}}))


def shared_rate(sending: int) -> float:
    """Bytes per second of each of ``sending`` GPUs behind one switch, all writing to host memory."""
    network = Network(switch(4))
    flows = [network.start(f"gpu{gpu}", "dram0", 1e9) for gpu in range(sending)]
    network.advance(1e-3)
    return network.rate(flows[0])


def main() -> None:
    link = Pcie(generation=4, lanes=16)
    print(f"C1  Gen4 x16, both ways: {2 * pcie_raw_bytes_per_s(link) * pcie_packet_efficiency(link) / 1e9:.1f} GB/s")
    print(f"C2  GPUs behind one switch, each: {shared_rate(1) / 1e9:.1f} GB/s alone, {shared_rate(4) / 1e9:.1f} with four")
    flat = ring_allreduce_s(REDUCED_BYTES, GROUPS * GPUS_IN_GROUP, PCIE)
    by_link = [hierarchical_allreduce_s(REDUCED_BYTES, GPUS_IN_GROUP, GROUPS, NVLINK, PCIE, shared=shared) for shared in (True, False)]
    print(f"C3  all-reduce of 142 MB: {flat * 1e3:.1f} ms flat, {by_link[0] * 1e3:.1f} by hierarchy over one PCIe link, {by_link[1] * 1e3:.1f} over one each")
    for name, size, changed in (("1 KiB", 1 << 10, 1.0), ("1 MiB, half unchanged", 1 << 20, 0.5)):
        tree_s = tree_broadcast_s(size, RECEIVERS, GIGABIT, CHUNK_BYTES, changed)
        print(f"C5  {name}: {linear_broadcast_s(size, RECEIVERS, GIGABIT) * 1e3:.1f} ms one after the other, {tree_s * 1e3:.1f} by a tree")
    print(f"D7  64-byte pieces at 16 B offset: x {alignment_efficiency(64, 16, 32):.3f}")


if __name__ == "__main__":
    main()
