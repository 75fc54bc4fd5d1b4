"""Host memory: slabs of exact size, limits asked before allocating, and a ledger; and the host kernels."""

from forebay.host.ledger import Ledger, Tier
from forebay.host.limits import HostMemoryError, available_host_memory, check_host_memory, limits
from forebay.host.slab import HostSlab

__all__ = ["HostMemoryError", "HostSlab", "Ledger", "Tier", "available_host_memory", "check_host_memory", "limits"]
