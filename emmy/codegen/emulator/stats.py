"""What one emulated run counted: exact, and with no GPU. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EmuStats:
    """Counts over the whole grid.

    A wave is one pass over the 32 banks of shared memory, 128 bytes; a sector is 32 bytes of global memory. `*_ideal` is what
    the same accesses would take without bank conflicts, or with neighbouring addresses.
    """

    smem_load_waves: int  # ordinary loads and ldmatrix; wgmma and TMA have engines of their own
    smem_load_waves_ideal: int
    smem_store_waves: int  # ordinary stores, stmatrix and cp.async
    smem_store_waves_ideal: int
    smem_load_bytes: int  # by the same; a word that several lanes read counts for each
    smem_store_bytes: int
    global_load_sectors: int  # ordinary loads and cp.async; TMA moves whole boxes
    global_load_sectors_ideal: int
    global_store_sectors: int
    global_store_sectors_ideal: int
    global_load_bytes: int
    global_store_bytes: int
    cp_async_bytes: int
    tma_load_bytes: int  # a multicast counts once
    tma_loads: int
    tma_store_bytes: int
    prefetch_bytes: int  # elements that the last-level cache is asked for
    dsmem_bytes: int  # to and from other blocks of a cluster
    mma: int  # warp-level instructions
    wgmma: int
    wgmma_macs: int
    wgmma_bytes: int  # operands in shared memory
    atomics: int
    block_syncs: int
    named_syncs: int
    mbar_arrivals: int
    mbar_waits: int
    cluster_syncs: int
    uninitialised_words: int  # 4-byte words of shared memory read before anyone wrote them
    switches: int  # of fibers: what the emulation itself took

    @property
    def bank_conflict(self) -> float:
        """Waves of shared memory as a multiple of the ideal; 1 without accesses."""
        ideal = self.smem_load_waves_ideal + self.smem_store_waves_ideal
        return (self.smem_load_waves + self.smem_store_waves) / ideal if ideal else 1.0
