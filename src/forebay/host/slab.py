"""Host memory of an exact size, pinned by whoever drives the device.

torch's own pinned allocator rounds to a power of two, which can double a 70 GiB request, and pins page by page.
A slab is mapped, backed by huge pages where it can be, touched by several threads, and then registered once: a
copy must not cross from one registration into another.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable, Iterable

import numpy
import torch

from forebay.host.ledger import Ledger, Tier
from forebay.host.limits import DEFAULT_SETTING_HINT, HostMemoryError, check_host_memory, in_gib, in_words
from forebay.host.numa import threads_per_rank

_HUGE_PAGE_BYTES = 2 * 2**20
_PIECE_BYTES = 64 * 2**20  # whole huge pages, so that two threads never wait for the same one
_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers; the C library has no function for it
_MPOL_PREFERRED = 1
_MADV_HUGEPAGE, _MADV_WIPEONFORK = 14, 18  # Python's mmap has no name for the second
_BITS_PER_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)

Register = Callable[[int, int], None]
Unregister = Callable[[int], None]
Progress = Callable[[int, int], None]


class HostSlab:
    """Zero-filled host memory of ``num_bytes``.

    The memory lives as long as the slab is open or any tensor views it, whichever is longer; it is unregistered,
    unmapped and taken out of the ledger then. Linux rounds it up to whole pages; the tensor and the ledger have
    ``num_bytes``.

    A pinned slab reads as zeros in processes forked after it (data workers): Linux would copy all of it at the fork.

    Args:
        num_bytes: size, above 0.
        purpose: what for, a word of the ledger.
        ledger: where to account for it.
        register: pins ``(address, num_bytes)``; raises RuntimeError or OSError if it cannot. Default None: the
            slab stays pageable.
        unregister: undoes ``register`` for an address.
        progress: called with bytes touched so far and in all.
        numa_node: where the memory should be. Default None: where the threads that touch it run.
        num_threads: that touch it. Default: :func:`forebay.host.numa.threads_per_rank`.
        budget_bytes: see :func:`forebay.host.limits.limits`; what the ledger has on the host counts against it.
        setting_hint: see :func:`forebay.host.limits.check_host_memory`.

    Attributes:
        num_bytes: the size.
        purpose: what it is for.
        pinned: whether it is registered.
        numa_node: the node that the memory was asked to be on; None if none was, or if the system refused to be
            told (no such node, a container that forbids it).

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
        progress: Progress | None = None,
        numa_node: int | None = None,
        num_threads: int | None = None,
        budget_bytes: int | None = None,
        setting_hint: str = DEFAULT_SETTING_HINT,
    ) -> None:
        assert num_bytes > 0, num_bytes
        assert (register is None) == (unregister is None)
        assert numa_node is None or numa_node >= 0, numa_node
        self.num_bytes = num_bytes
        self.purpose = purpose
        self.pinned = register is not None
        tier = Tier.PINNED if self.pinned else Tier.PAGEABLE
        check_host_memory(
            num_bytes,
            purpose=purpose,
            pinned=self.pinned,
            budget_bytes=budget_bytes,
            used_bytes=ledger.num_bytes(Tier.PINNED) + ledger.num_bytes(Tier.PAGEABLE),
            setting_hint=setting_hint,
        )
        memory = self._map(setting_hint)
        array = numpy.frombuffer(memory, dtype=numpy.uint8)
        address = array.ctypes.data
        try:
            # Before the first touch, which is when a page gets its place.
            placed = numa_node is not None and _prefer_node(address, num_bytes, numa_node)
            self.numa_node = numa_node if placed else None
            _touch(address, num_bytes, num_threads or threads_per_rank(), progress)
            if register is not None:
                self._pin(register, address, setting_hint)
        except BaseException:
            # By hand: the error keeps this frame, and with it the memory, for as long as someone holds on to it.
            del array
            memory.close()
            raise
        ledger.add(tier, purpose, num_bytes)
        self._tensor: torch.Tensor | None = torch.from_numpy(array)
        # Tensors keep the array alive, so this runs when the last of them is gone: memory that is unregistered
        # or unmapped earlier would fault under a copy.
        finalizer = weakref.finalize(array, _free, ledger, tier, purpose, num_bytes, unregister, address, os.getpid())
        # At exit the system takes it all back at once; the device may still be copying.
        finalizer.atexit = False

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, flat uint8."""
        assert self._tensor is not None, f"{self.purpose}: the slab is closed"
        return self._tensor

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._tensor is None

    def close(self) -> None:
        """Let the memory go, as soon as no tensor views it."""
        self._tensor = None

    def _map(self, setting_hint: str) -> mmap.mmap:
        try:
            memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise HostMemoryError(
                f"mapping {in_gib(self.num_bytes)} of host memory for {in_words(self.purpose)} failed: {error}; "
                f"nothing was allocated. Raise the limit on address space (ulimit -v) or let memory be overcommitted "
                f"(vm.overcommit_memory), or {setting_hint}"
            ) from error
        if self.num_bytes >= _HUGE_PAGE_BYTES:
            # Fewer page table entries to pin and to miss.
            _advise(memory, _MADV_HUGEPAGE)
        if self.pinned:
            # A fork copies pinned pages there and then instead of sharing them: 100 GiB for each data worker. Not
            # MADV_DONTFORK: the worker's garbage collector could unmap what it has mapped into the gap meanwhile.
            _advise(memory, _MADV_WIPEONFORK)
        return memory

    def _pin(self, register: Register, address: int, setting_hint: str) -> None:
        try:
            register(address, self.num_bytes)
        except (RuntimeError, OSError) as error:
            raise HostMemoryError(
                f"pinning {in_gib(self.num_bytes)} of host memory for {in_words(self.purpose)} failed: {error}; "
                "nothing stays allocated. Raise the limit on locked memory (ulimit -l, or --ulimit memlock=-1 for a "
                f"container), {setting_hint}, or turn pinning off (optimizer.pin_cpu_params=False, "
                "optimizer.pin_cpu_grads=False), which is slower"
            ) from error


def _free(
    ledger: Ledger, tier: Tier, purpose: str, num_bytes: int, unregister: Unregister | None, address: int, pid: int
) -> None:
    if os.getpid() != pid:
        return  # a forked process: the registration is its parent's
    try:
        if unregister is not None:
            unregister(address)
    finally:
        ledger.remove(tier, purpose, num_bytes)


def _touch(address: int, num_bytes: int, num_threads: int, progress: Progress | None) -> None:
    """Make the kernel provide every page now, from several threads: pinning does it on one."""
    starts = range(0, num_bytes, _PIECE_BYTES)

    def fill(start: int) -> int:
        piece_bytes = min(_PIECE_BYTES, num_bytes - start)
        ctypes.memset(address + start, 0, piece_bytes)  # ctypes lets go of the GIL
        return piece_bytes

    with contextlib.ExitStack() as stack:
        pieces: Iterable[int] = map(fill, starts)
        if num_threads > 1 and len(starts) > 1:
            pool = concurrent.futures.ThreadPoolExecutor(min(num_threads, len(starts)))
            # After an error no thread may still be writing when the memory is unmapped.
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            pieces = pool.map(fill, starts)
        done_bytes = 0
        for piece_bytes in pieces:
            done_bytes += piece_bytes
            if progress is not None:
                progress(done_bytes, num_bytes)


def _prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Ask for pages of a NUMA node; return whether the system accepted it."""
    number = _MBIND.get(platform.machine())
    if number is None or sys.platform != "linux":
        return False
    words = (ctypes.c_ulong * (node // _BITS_PER_WORD + 1))()
    words[node // _BITS_PER_WORD] = 1 << node % _BITS_PER_WORD
    # Preferred, not bound: when the node is full a page elsewhere is slower, a bound one kills the process.
    # The kernel reads one bit less than it is told.
    arguments = (address, num_bytes, _MPOL_PREFERRED, ctypes.addressof(words), len(words) * _BITS_PER_WORD + 1, 0)
    return ctypes.CDLL(None).syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) == 0


def _advise(memory: mmap.mmap, advice: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # kernels built without it refuse it, and nothing depends on it
            memory.madvise(advice)
