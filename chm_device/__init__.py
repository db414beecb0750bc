"""CXL-hybrid memory devices: a little DRAM in front of a large, slow, byte-addressed region.

A device takes objects of one length at one final address. Reads are issue-wait-release
(HyMCache, section 4: `chm_prefetch_object`, `chm_prefetch_wait`, `chm_prefetch_release`): an
object is staged in the device's DRAM, read from there one-sidedly, and released. Writes go to a
buffer that is apart from the staging window and are flushed when reads leave room; a full buffer
is an answer, not a wait. The address space is a log of segments, free again as a whole.

The devices are C++ and are driven by a storage node's event loop.
`csrc/device.h` is the interface, `csrc/file_device.h` the device emulated on a file or a block
device: O_DIRECT through io_uring, or through threads where io_uring is not allowed.

`Region` is memory that several hosts map and that needs no node: docs/region-format.md.
"""

from __future__ import annotations

from hymcache.chm_device.region import Region, RegionFormat

__all__ = ["Region", "RegionFormat"]
