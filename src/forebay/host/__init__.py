"""Host memory: slabs of exact size, a pool of buffers, limits asked before allocating, and a ledger.

The host kernels are in ``forebay.host.kernels``, which is imported by whoever needs them.
"""

from forebay.host.ledger import PURPOSES, Ledger, Tier
from forebay.host.limits import HostMemoryError, Limit, available_host_memory, check_host_memory, limits
from forebay.host.numa import affinity, cores_of_node, num_local_ranks, numa_node_of_pci_device, threads_per_rank
from forebay.host.pool import HostPool, PooledBuffer, size_class_bytes
from forebay.host.slab import HostSlab

__all__ = [
    "PURPOSES",
    "HostMemoryError",
    "HostPool",
    "HostSlab",
    "Ledger",
    "Limit",
    "PooledBuffer",
    "Tier",
    "affinity",
    "available_host_memory",
    "check_host_memory",
    "cores_of_node",
    "limits",
    "num_local_ranks",
    "numa_node_of_pci_device",
    "size_class_bytes",
    "threads_per_rank",
]
