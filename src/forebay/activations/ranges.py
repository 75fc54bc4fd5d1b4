"""Bytes of activations on the host: copied down once, and back up when backward asks for them.

A :class:`Range` owns all there is of an offloaded activation: the host buffer, the events of its copies and the
copy on the device that backward reads. Only packed handles refer to it, and those belong to autograd's graph. So it
goes when the last graph node that needs it goes, however that comes about: after backward, without backward, or
because an exception dropped the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from forebay.engine import Buffer, Engine, Event, Lane
from forebay.host import HostPool

_PURPOSE = "activations"
_SETTING_HINT = "offload fewer layers (a Policy with more 'keep' or 'recompute'), or smaller batches"
# Kernels choose how they read by the alignment of their arguments, and with it the bits of a result. So what comes
# back is aligned as the original was, whose allocator aligns to this or more.
_ALIGNMENT_BYTES = 256


class VersionWitness:
    """Sees in-place changes of a tensor without keeping its memory.

    It is a tensor with the version counter of the one that was saved, and no memory.

    Args:
        tensor: what was saved for backward.
    """

    __slots__ = ("_tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version: int = tensor._version
        self._tensor = tensor.detach()  # a view: it shares the version counter
        self._tensor.data = torch.empty(0, dtype=torch.uint8, device=tensor.device)  # changes no counter

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since."""
        return self._tensor._version != self.version

    @property
    def current_version(self) -> int:
        """The version that the tensor has now."""
        return self._tensor._version

    def give_version_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` with the version counter of the saved one.

        What backward does to it is then seen by later reads of the saved tensor, and the other way round, as if
        both were still one.
        """
        twin = self._tensor.detach()
        twin.data = tensor
        return twin


class RangeStore:
    """Makes ranges, and finds the one that has a tensor's bytes already.

    Args:
        engine: that copies.
        slab_bytes: see :class:`forebay.host.HostPool`.
    """

    def __init__(self, engine: Engine, *, slab_bytes: int) -> None:
        self.engine = engine
        self.pool = HostPool(lambda num_bytes: _PoolSlab(engine, num_bytes), slab_bytes=slab_bytes)
        self._ranges: dict[int, list[weakref.ref[Range]]] = {}
        self._num_ranges = 0

    def save(self, tensor: torch.Tensor, span: tuple[int, int]) -> Range:
        """Return the range that holds ``tensor``; its copy down is enqueued if it is new.

        Args:
            tensor: strided, on the engine's device.
            span: first byte of its storage that it uses, and the one after the last.
        """
        storage = tensor.untyped_storage()
        begin, end = span
        # A living range keeps a weak reference to its storage, so no other storage can have the same key.
        known = [found for ref in self._ranges.get(storage._cdata, ()) if (found := ref()) is not None]
        for found in known:
            if found.begin <= begin and end <= found.end and not found.stale:
                return found
        if _has_gaps(tensor, end - begin):
            # What lies between is mostly saved as well (query, key and value of one projection): one copy for all.
            begin, end = 0, storage.nbytes()
        else:
            begin -= begin % _ALIGNMENT_BYTES
        new = Range(self, self._num_ranges, tensor, storage, begin, end)
        self._num_ranges += 1
        self._ranges[storage._cdata] = [weakref.ref(found) for found in [*known, new]]
        return new

    def sweep(self) -> None:
        """Forget ranges that are gone."""
        self._ranges = {
            key: living for key, refs in self._ranges.items() if (living := [r for r in refs if r() is not None])
        }

    def load(self, ranges: Iterable[Range]) -> None:
        """Enqueue the copies up of those ``ranges`` that are not on the device."""
        # Each once, though several views may have been saved of it.
        missing = [found for found in dict.fromkeys(ranges) if not found.on_device]
        if not missing:
            return
        for found in missing:
            found._allocate()
        # Memory that the compute lane has just allocated may be in use by kernels it enqueued earlier: a copy
        # that starts before them would overwrite what they read.
        self.engine.wait(Lane.UP, self.engine.record(Lane.COMPUTE))
        for found in missing:
            found._copy_up()


class Range:
    """Bytes of one storage, on the host; made by :meth:`RangeStore.save`.

    Attributes:
        number: counts up, as copies down do.
        begin: first byte in the storage.
        end: the one after the last byte.
        down: passes when the bytes are on the host.
    """

    def __init__(
        self,
        store: RangeStore,
        number: int,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        begin: int,
        end: int,
    ) -> None:
        engine = store.engine
        self.number = number
        self.begin = begin
        self.end = end
        self._store = store
        self._source = StorageWeakRef(storage)
        self._witness = VersionWitness(tensor)
        self._device: Buffer | None = None
        self._stream = 0
        self._events: list[Event] = []
        self._host = store.pool.acquire(end - begin, wait=True)
        # The kernel that writes the tensor may still run: the copy would read what is not there yet.
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        # Speculative: whoever changes the tensor while it is copied changes its version too, and the unpack raises.
        engine.copy(Lane.DOWN, self._host.tensor, _bytes_of(storage, begin, end), speculative=True)
        self.down = engine.record(Lane.DOWN)
        self._events.append(self.down)

    def __del__(self) -> None:
        # No engine call here: the garbage collector may come by in the middle of another one.
        if hasattr(self, "_host"):  # else the pool had no memory
            self._store.pool.release(self._host, self._events)

    @property
    def num_bytes(self) -> int:
        """How many bytes it is."""
        return self.end - self.begin

    @property
    def stale(self) -> bool:
        """Whether the tensor was changed since its bytes were copied."""
        return self._witness.changed

    @property
    def source_is_alive(self) -> bool:
        """Whether someone still holds the original, so that the copy has freed nothing so far."""
        return not self._source.expired()

    @property
    def on_device(self) -> bool:
        """Whether the compute lane can have the bytes without another copy."""
        loaded = self._device is not None and self._stream == self._store.engine.compute_stream()
        return loaded or self.source_is_alive

    def use(self) -> torch.Tensor:
        """Return the bytes on the device, flat uint8, for work that the compute lane enqueues from now on."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._source.cdata)
        if storage is not None:
            return _bytes_of(storage, self.begin, self.end)
        engine = self._store.engine
        # What was loaded for one stream must not be read on another: the allocator may give the memory away on the
        # first while the second still reads.
        if self._device is None or self._stream != engine.compute_stream():
            self._store.load([self])
        assert self._device is not None
        # Without this wait backward would read memory that the copy has not filled yet.
        engine.wait(Lane.COMPUTE, self._events[-1])
        return self._device.tensor

    def _allocate(self) -> None:
        # On the compute lane, which uses it: the allocator may take it back the moment the last reference goes. It
        # is never released by hand, because views of it may outlive the range (a graph of second derivatives).
        self._stream = self._store.engine.compute_stream()
        self._device = self._store.engine.empty_device(self.num_bytes, _PURPOSE)

    def _copy_up(self) -> None:
        assert self._device is not None
        engine = self._store.engine
        engine.wait(Lane.UP, self.down)  # else the copy could overtake the one that fills the host buffer
        engine.copy(Lane.UP, self._device.tensor, self._host.tensor)
        self._events.append(engine.record(Lane.UP))


class _PoolSlab:
    """A slab of the pool, pinned by the engine."""

    def __init__(self, engine: Engine, num_bytes: int) -> None:
        self._buffer = engine.empty_host(num_bytes, _PURPOSE, setting_hint=_SETTING_HINT)

    @property
    def tensor(self) -> torch.Tensor:
        return self._buffer.tensor

    def close(self) -> None:
        self._buffer.release()


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that ``tensor`` (strided, not empty) uses, and the one after the last."""
    item_bytes = tensor.element_size()
    begin = int(tensor.storage_offset()) * item_bytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * item_bytes


def view_of(
    data: torch.Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset_bytes: int
) -> torch.Tensor:
    """Return a tensor of that geometry, ``offset_bytes`` into ``data`` (flat uint8)."""
    whole_bytes = data.numel() - data.numel() % dtype.itemsize
    start = data.storage_offset() // dtype.itemsize + offset_bytes // dtype.itemsize
    return data[:whole_bytes].view(dtype).as_strided(size, stride, start)


def _has_gaps(tensor: torch.Tensor, span_bytes: int) -> bool:
    num_apart = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0:  # an expanded dimension has the same elements again
            num_apart *= size
    return num_apart * tensor.element_size() < span_bytes


def _bytes_of(storage: torch.UntypedStorage, begin: int, end: int) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, begin, (end - begin,), (1,))
