"""What a link carries: PCIe packet arithmetic, the IOMMU's share, and what misaligned pieces waste.

Every factor is an input of a topology file with its source; this module only does the arithmetic.
"""

from __future__ import annotations

from serving.topology import LinkType, Pcie

# Transfers per second and lane, and payload bits per transferred bit (PCI-SIG base specifications: 128b/130b for
# generations 3 to 5; generation 6 sends 242 of 256 bytes of a flow-control unit).
_PCIE = {3: (8e9, 128 / 130), 4: (16e9, 128 / 130), 5: (32e9, 128 / 130), 6: (64e9, 242 / 256)}


def pcie_raw_bytes_per_s(link: Pcie) -> float:
    """Bytes per second one way after line coding, before packet overhead (Gen4 x16: 31.5e9)."""
    transfers_per_s, coding = _PCIE[link.generation]
    return transfers_per_s * coding * link.lanes / 8


def pcie_packet_efficiency(link: Pcie) -> float:
    """Share of the raw rate left for payload when every packet is full: payload / (payload + header, sequence, CRC, framing)."""
    return link.max_payload_bytes / (link.max_payload_bytes + link.packet_overhead_bytes)


def link_bytes_per_s(link: LinkType, iommu: bool = False) -> float:
    """Bytes per second one way that large, aligned transfers reach on ``link``."""
    if link.pcie is None:
        raw = float(link.bytes_per_s or 0.0)
    else:
        raw = pcie_raw_bytes_per_s(link.pcie) * pcie_packet_efficiency(link.pcie)
    return raw * link.efficiency * (link.iommu_efficiency if iommu else 1.0)


def link_latency_s(link: LinkType, iommu: bool = False) -> float:
    """Seconds before the first byte arrives over ``link``."""
    return link.latency_s + (link.iommu_latency_s if iommu else 0.0)


def alignment_efficiency(piece_bytes: float, offset_bytes: int, granule_bytes: int) -> float:
    """Useful share of the bytes moved when pieces start ``offset_bytes`` past a granule boundary, relative to aligned ones.

    A 64-byte access of 32-byte sectors at offset 16 touches three sectors instead of two: 2/3.
    """
    if granule_bytes <= 1 or offset_bytes % granule_bytes == 0:
        return 1.0
    offset = offset_bytes % granule_bytes
    aligned = -(-piece_bytes // granule_bytes)
    touched = -(-(piece_bytes + offset) // granule_bytes)
    return aligned / touched
