"""Host memory of an exact size, pinned by whoever drives the device.

torch's own pinned allocator rounds to a power of two, which can double a 70 GiB request, and pins page by page.
A slab is mapped, backed by huge pages where it can be, touched by several threads, and then registered once.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import numpy
import torch

from forebay.host.ledger import Ledger, Tier
from forebay.host.limits import GIB, HostMemoryError, check_host_memory

_HUGE_PAGE_BYTES = 2 * 2**20
_PIECE_BYTES = 256 * 2**20

Register = Callable[[int, int], None]
Unregister = Callable[[int], None]


class HostSlab:
    """Zero-filled host memory of ``num_bytes``.

    The memory lives as long as the slab is open or any tensor views it, whichever is longer.

    Args:
        num_bytes: size, above 0.
        purpose: what for, a word of the ledger.
        ledger: where to account for it.
        register: pins ``(address, num_bytes)``; raises RuntimeError if it cannot. None leaves it pageable.
        unregister: undoes ``register`` for an address.
        progress: called with bytes touched so far and in all.

    Attributes:
        tensor: the memory, flat uint8.
        pinned: whether it is registered.

    Raises:
        HostMemoryError: if it cannot be had; nothing stays allocated.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        purpose: str,
        ledger: Ledger,
        register: Register | None = None,
        unregister: Unregister | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        assert num_bytes > 0, num_bytes
        assert (register is None) == (unregister is None)
        self.pinned = register is not None
        check_host_memory(num_bytes, purpose=purpose, pinned=self.pinned)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            # Fewer page table entries to pin and to miss; refused by kernels built without it.
            _ignore_os_error(lambda: memory.madvise(mmap.MADV_HUGEPAGE))
        array = numpy.frombuffer(memory, dtype=numpy.uint8)
        _touch(array, progress)
        address = array.ctypes.data
        if register is not None:
            try:
                register(address, num_bytes)
            except RuntimeError as error:
                raise HostMemoryError(
                    f"pinning {num_bytes / GIB:.2f} GiB of host memory for {purpose.replace('_', ' ')} failed: {error}; "
                    "raise the limit on locked memory (ulimit -l), offload less, or turn pinning off "
                    "(optimizer.pin_cpu_params=False, optimizer.pin_cpu_grads=False), which is slower"
                ) from error
        tier = Tier.PINNED if self.pinned else Tier.PAGEABLE
        ledger.add(tier, purpose, num_bytes)
        self.tensor = torch.from_numpy(array)
        # Tensors keep the array alive, so this runs when the last of them is gone: memory that is unregistered
        # or unmapped earlier would fault under a copy.
        self._finalizer = weakref.finalize(array, _free, ledger, tier, purpose, num_bytes, unregister, address)

    def close(self) -> None:
        """Let the memory go, as soon as no tensor views it."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _free(
    ledger: Ledger, tier: Tier, purpose: str, num_bytes: int, unregister: Unregister | None, address: int
) -> None:
    if unregister is not None:
        unregister(address)
    ledger.remove(tier, purpose, num_bytes)


def _touch(array: numpy.ndarray, progress: Callable[[int, int], None] | None) -> None:
    """Make the kernel provide every page now, from several threads: pinning does it on one."""
    address, num_bytes = array.ctypes.data, array.nbytes
    done_bytes = 0

    def fill(start: int) -> int:
        piece_bytes = min(_PIECE_BYTES, num_bytes - start)
        ctypes.memset(address + start, 0, piece_bytes)  # ctypes lets go of the GIL
        return piece_bytes

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for piece_bytes in pool.map(fill, range(0, num_bytes, _PIECE_BYTES)):
            done_bytes += piece_bytes
            if progress is not None:
                progress(done_bytes, num_bytes)


def _ignore_os_error(function: Callable[[], object]) -> None:
    try:
        function()
    except OSError:
        pass
