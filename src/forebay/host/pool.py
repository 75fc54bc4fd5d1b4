"""Host buffers that are used again and again, without allocating or pinning after the first steps.

Pinning runs at about 2 GB/s and can wait for the device, so the buffers of activations cannot be pinned when
they are needed. The pool pins large slabs and hands out pieces of them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

ALIGNMENT_BYTES = 256
_CLASSES_PER_OCTAVE = 8


class Passable(Protocol):
    """What a buffer may have to wait for; every ``forebay.engine.Event`` is one."""

    def query(self) -> bool:
        """Return True when all work before it has finished. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block until all work before it has finished."""
        ...


class Slab(Protocol):
    """What the pool carves: a :class:`forebay.host.HostSlab` or anything like it."""

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, flat uint8."""
        ...

    def close(self) -> None:
        """Let the memory go."""
        ...


def size_class_bytes(num_bytes: int) -> int:
    """Return the size that a request takes: the next of eight equal steps to each power of two.

    The waste is less than 12.5% of ``num_bytes``, or less than 256 bytes for requests below 2 KiB: classes are
    multiples of 256 bytes, so that every piece of a page-aligned slab is aligned for copies and vector loads.
    """
    assert num_bytes > 0, num_bytes
    octave = max(0, (num_bytes - 1).bit_length() - 1)
    step = max(ALIGNMENT_BYTES, (1 << octave) // _CLASSES_PER_OCTAVE)
    return -(-num_bytes // step) * step


@dataclasses.dataclass(eq=False)
class _Slab:
    slab: Slab
    num_bytes: int
    dedicated: bool
    used_bytes: int = 0  # carved from the front so far
    num_out: int = 0  # pieces lent or waiting for events
    generation: int = 0  # counts the times that the slab was carved anew


@dataclasses.dataclass(frozen=True, eq=False)
class _Piece:
    owner: _Slab
    offset: int
    class_bytes: int
    generation: int


class PooledBuffer:
    """Memory lent by a :class:`HostPool`, until it is released.

    A buffer that is dropped without a release stays lent: the pool cannot know which copies still use it.

    Attributes:
        num_bytes: as asked for.
        class_bytes: what it takes in the pool.
    """

    def __init__(self, piece: _Piece, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.class_bytes = piece.class_bytes
        self._piece = piece
        self._tensor: torch.Tensor | None = piece.owner.slab.tensor[piece.offset : piece.offset + num_bytes]

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, flat uint8, ``num_bytes`` long. Its content is whatever the last user left."""
        assert self._tensor is not None, "the buffer was released"
        return self._tensor

    def view(self, dtype: torch.dtype, num_elements: int, offset_bytes: int = 0) -> torch.Tensor:
        """Return ``num_elements`` of ``dtype`` that start ``offset_bytes`` into the buffer, as a view."""
        end = offset_bytes + num_elements * dtype.itemsize
        assert 0 <= offset_bytes <= end <= self.num_bytes, (offset_bytes, end, self.num_bytes)
        return self.tensor[offset_bytes:end].view(dtype)


class HostPool:
    """A pool of host buffers; safe to use from several threads, and to release to from finalizers.

    Requests up to a quarter of ``slab_bytes`` are carved from slabs of that size, larger ones get a slab of
    their own. A released buffer is kept for requests of its size class.

    Fragmentation: a piece keeps its size class until its whole slab is free; then the slab may be carved anew, for
    any class, and this is tried before a slab is added. There is no coalescing otherwise. The bound: let P be the
    most bytes of a class that were out (lent, or waiting for events) at once, summed over the classes. Slabs of
    their own hold at most the P of their classes. A carved slab is added only when less than a quarter is left in
    each of the others, so those hold less than 4/3 of the P of theirs, plus one slab. A workload that repeats adds
    nothing after its first round, given that its events pass as fast as then or that it acquires with ``wait``; one
    whose sizes have changed for good should :meth:`trim`.

    Args:
        allocate: returns a new slab of the given size, or raises; nothing has changed then. Such as
            ``lambda num_bytes: HostSlab(num_bytes, purpose="activations", ledger=ledger, ...)``.
        slab_bytes: size of the slabs that are carved, a multiple of 256. Default: 256 MiB.

    Attributes:
        num_allocations: slabs allocated so far.
    """

    def __init__(self, allocate: Callable[[int], Slab], *, slab_bytes: int = 256 * 2**20) -> None:
        assert slab_bytes >= 4 * ALIGNMENT_BYTES, slab_bytes
        assert slab_bytes % ALIGNMENT_BYTES == 0, slab_bytes
        self.num_allocations = 0
        self._allocate = allocate
        self._slab_bytes = slab_bytes
        # Held by all methods but `release`, which finalizers may call in the middle of any of them: it only appends
        # to `_released`, and appending to a deque is atomic.
        self._lock = threading.Lock()
        self._released: deque[tuple[_Piece, tuple[Passable, ...]]] = deque()
        self._slabs: list[_Slab] = []
        self._free: defaultdict[int, list[_Piece]] = defaultdict(list)
        self._pending: defaultdict[int, list[tuple[_Piece, tuple[Passable, ...]]]] = defaultdict(list)

    def acquire(self, num_bytes: int, *, wait: bool = False) -> PooledBuffer:
        """Lend ``num_bytes`` (above 0). All events of its last release have passed.

        Args:
            num_bytes: how much.
            wait: block on the events of a released buffer of this class rather than carve a new one. What the pool
                holds then depends only on what is lent, not on how fast events pass. Default False.

        Errors: those of ``allocate``.
        """
        class_bytes = size_class_bytes(num_bytes)
        with self._lock:
            self._take_released()
            piece = self._reuse(class_bytes) or (self._await(class_bytes) if wait else None)
            piece = piece or self._carve(class_bytes) or self._recycle(class_bytes)
            if piece is None:
                dedicated = self._needs_own_slab(class_bytes)
                size = class_bytes if dedicated else self._slab_bytes
                new = _Slab(self._allocate(size), size, dedicated)
                assert new.slab.tensor.numel() >= size, (new.slab.tensor.numel(), size)
                self.num_allocations += 1
                self._slabs.append(new)
                piece = _carve_from(new, class_bytes)
            piece.owner.num_out += 1
            return PooledBuffer(piece, num_bytes)

    def release(self, buffer: PooledBuffer, after: Sequence[Passable] = ()) -> None:
        """Take ``buffer`` back; it is lent again only when every event of ``after`` has passed.

        Never blocks, and may be called from a finalizer.
        """
        assert buffer._tensor is not None, "the buffer was released twice"
        buffer._tensor = None  # the pool lends this memory to others now
        self._released.append((buffer._piece, tuple(after)))

    def trim(self) -> int:
        """Close every slab of which nothing is lent or waiting for an event; return the bytes let go."""
        with self._lock:
            self._take_released()
            self._poll(list(self._pending))
            closed = [slab for slab in self._slabs if slab.num_out == 0]
            self._slabs = [slab for slab in self._slabs if slab.num_out != 0]
            for slab in closed:
                slab.generation += 1
                slab.slab.close()
            self._drop_stale()
            return sum(slab.num_bytes for slab in closed)

    @property
    def num_bytes(self) -> int:
        """What the pool holds, lent or not."""
        with self._lock:
            return sum(slab.num_bytes for slab in self._slabs)

    @property
    def num_out(self) -> int:
        """How many buffers are lent or wait for events."""
        with self._lock:
            self._take_released()
            self._poll(list(self._pending))
            return sum(slab.num_out for slab in self._slabs)

    # Everything below needs the lock.

    def _needs_own_slab(self, class_bytes: int) -> bool:
        return 4 * class_bytes > self._slab_bytes

    def _take_released(self) -> None:
        while self._released:
            piece, events = self._released.popleft()
            self._pending[piece.class_bytes].append((piece, events))

    def _poll(self, classes: Sequence[int]) -> None:
        """Move what has no event left to wait for to the free pieces."""
        for class_bytes in classes:
            waiting = []
            for piece, events in self._pending.pop(class_bytes, ()):
                left = tuple(event for event in events if not event.query())
                if left:
                    waiting.append((piece, left))
                else:
                    piece.owner.num_out -= 1
                    self._free[class_bytes].append(piece)
            if waiting:
                self._pending[class_bytes] = waiting

    def _reuse(self, class_bytes: int) -> _Piece | None:
        if not self._free.get(class_bytes):
            self._poll([class_bytes])
        free = self._free.get(class_bytes)
        return free.pop() if free else None  # the one used last, which the caches may still have

    def _await(self, class_bytes: int) -> _Piece | None:
        """Block until the piece that has been waiting longest is free; None if none waits."""
        if not self._pending.get(class_bytes):
            return None
        for event in self._pending[class_bytes][0][1]:
            event.synchronize()
        self._poll([class_bytes])
        return self._free[class_bytes].pop()

    def _carve(self, class_bytes: int) -> _Piece | None:
        if self._needs_own_slab(class_bytes):
            return None
        for slab in self._slabs:
            if not slab.dedicated and slab.num_bytes - slab.used_bytes >= class_bytes:
                return _carve_from(slab, class_bytes)
        return None

    def _recycle(self, class_bytes: int) -> _Piece | None:
        """Carve a wholly free slab anew: what bounds fragmentation when the sizes change."""
        if self._needs_own_slab(class_bytes):
            return None
        self._poll(list(self._pending))
        for slab in self._slabs:
            if not slab.dedicated and slab.num_out == 0:
                slab.generation += 1
                slab.used_bytes = 0
                self._drop_stale()
                return _carve_from(slab, class_bytes)
        return None

    def _drop_stale(self) -> None:
        """Forget the free pieces of slabs that were closed or are carved anew."""
        for class_bytes, pieces in list(self._free.items()):
            pieces[:] = [piece for piece in pieces if piece.generation == piece.owner.generation]
            if not pieces:
                del self._free[class_bytes]


def _carve_from(slab: _Slab, class_bytes: int) -> _Piece:
    piece = _Piece(slab, slab.used_bytes, class_bytes, slab.generation)
    slab.used_bytes += class_bytes
    return piece
