"""What autograd keeps in the place of a tensor that a layer saves for backward, and how that is decided."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import torch

from forebay.activations.ranges import Range, RangeStore, VersionWitness, byte_span, view_of
from forebay.activations.schedule import Pass, Schedule, Slot

logger = logging.getLogger("forebay")


# A packed tensor that stays where it is: itself, its version, and the path of the layer that saved it. Autograd leaves
# the check for in-place changes to whoever packs. A tuple, because most of what a layer saves may be tiny, and the time
# that each takes counts.
Kept = tuple[torch.Tensor, int, str]


class OffloadedTensor:
    """A packed tensor whose bytes are on the host.

    Args:
        tensor: as it was saved.
        saved: the range that holds its bytes.
        owner: the pass that saved it; it lives as long as one of its handles does.
        schedule: told when backward gets here.
        path: of the layer, for errors.
    """

    __slots__ = ("_dtype", "_owner", "_path", "_range", "_schedule", "_size", "_start_bytes", "_stride", "_witness")

    def __init__(self, tensor: torch.Tensor, saved: Range, owner: Pass, schedule: Schedule, path: str) -> None:
        self._range = saved
        self._owner = owner
        self._schedule = schedule
        self._path = path
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._start_bytes = int(tensor.storage_offset()) * tensor.element_size() - saved.begin
        self._witness = VersionWitness(tensor)

    def unpack(self) -> torch.Tensor:
        """Return the tensor on the device, for work that the compute lane enqueues from now on.

        Raises RuntimeError if it was changed in place since it was saved.
        """
        witness = self._witness
        with torch.no_grad():
            if witness.changed:
                raise _changed(self._dtype, self._size, witness.current_version, witness.version, self._path)
            self._schedule.reach(self._owner.number, self._owner.layer)
            data = self._range.use()
            return witness.give_version_to(view_of(data, self._dtype, self._size, self._stride, self._start_bytes))


def unpack(handle: Kept | OffloadedTensor) -> torch.Tensor:
    """Return the tensor that ``handle`` stands for; RuntimeError if it was changed in place since it was packed."""
    if isinstance(handle, OffloadedTensor):
        return handle.unpack()
    tensor, version, path = handle
    if tensor._version != version:
        raise _changed(tensor.dtype, tensor.size(), tensor._version, version, path)
    return tensor


@dataclasses.dataclass
class Rules:
    """Which tensors may leave the device.

    Attributes:
        device: whose tensors.
        min_elements: fewer stay.
        fraction: of each layer's bytes that may leave.
        root: module whose parameters and buffers never move.
    """

    device: torch.device
    min_elements: int
    fraction: float
    root: torch.nn.Module
    parameters: set[int] | None = None  # addresses of their storages, looked up when first asked for
    said: set[type] = dataclasses.field(default_factory=set)

    def span_to_offload(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the bytes of its storage that ``tensor`` uses if they may leave the device, else None."""
        if type(tensor) is not torch.Tensor:
            if type(tensor) is not torch.nn.Parameter:
                self._say(type(tensor))
            return None
        if tensor.device != self.device or tensor.layout is not torch.strided:
            return None
        # Lazy conjugation, negation and zeros are not in the bytes, and scales of quantization neither.
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor() or tensor.is_quantized:
            return None
        begin, end = byte_span(tensor)
        if end - begin < self.min_elements * tensor.element_size():
            return None
        return begin, end

    def is_parameter(self, storage: int) -> bool:
        """Return whether a parameter or buffer is in the storage at that address."""
        if self.parameters is None:
            self.parameters = resident_storages(self.root)
        return storage in self.parameters

    def _say(self, kind: type) -> None:
        tracing = torch.compiler.is_compiling() or kind.__module__.startswith("torch._subclasses")
        if kind in self.said or tracing:
            return
        self.said.add(kind)
        logger.warning(
            "activations: tensors of type %s stay on the device; only plain tensors are offloaded",
            f"{kind.__module__}.{kind.__qualname__}",
        )


class Packer:
    """Packs what one pass of a layer saves; ``pack`` is the hook.

    Args:
        owner: the pass.
        layer: its module, whose parameters stay.
        path: of the layer, for errors.
        rules: which tensors may leave.
        store: where they go.
        schedule: of the copies.
    """

    def __init__(
        self, owner: Pass, layer: torch.nn.Module, path: str, rules: Rules, store: RangeStore, schedule: Schedule
    ) -> None:
        self._owner = owner
        self._layer = layer
        self._path = path
        self._rules = rules
        self._min_elements = rules.min_elements
        self._store = store
        self._schedule = schedule
        self._parameters: set[int] | None = None
        self._num_candidates = 0
        self._seen_bytes = 0
        self._offloaded_bytes = 0

    def pack(self, tensor: torch.Tensor) -> Kept | OffloadedTensor:
        """Return what autograd keeps instead of ``tensor``."""
        if tensor.numel() < self._min_elements:
            return tensor, tensor._version, self._path
        return self._offload(tensor) or (tensor, tensor._version, self._path)

    def _offload(self, tensor: torch.Tensor) -> OffloadedTensor | None:
        span = self._rules.span_to_offload(tensor)
        if span is None or self._is_parameter(tensor):
            return None
        slot = Slot(self._owner.layer, self._num_candidates, tensor.dtype, tensor.dim())
        self._num_candidates += 1
        num_bytes = span[1] - span[0]
        self._seen_bytes += num_bytes
        if self._offloaded_bytes + num_bytes > self._rules.fraction * self._seen_bytes:
            return None
        # On a stream that the layer has switched to, dropping the original is not safe: its memory may belong to the
        # stream before, which does not wait for this one.
        if self._owner.stream != self._store.engine.compute_stream() or self._schedule.frees_nothing(slot):
            return None
        self._offloaded_bytes += num_bytes
        saved = self._store.save(tensor, span)
        self._owner.add(slot, saved)
        return OffloadedTensor(tensor, saved, self._owner, self._schedule, self._path)

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        if self._parameters is None:
            # Now and not before: FSDP puts the gathered parameters in place just before a layer's forward.
            self._parameters = resident_storages(self._layer)
        key = tensor.untyped_storage()._cdata
        return key in self._parameters or self._rules.is_parameter(key)


def resident_storages(module: torch.nn.Module) -> set[int]:
    """Return the addresses of the storages of a module's parameters and buffers, those of its children included."""
    return {
        storage._cdata
        for part in module.modules()
        for tensor in (*part._parameters.values(), *part._buffers.values())
        if tensor is not None
        for storage in _storages(tensor)
    }


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass around others, such as DTensor
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided and not torch.nn.parameter.is_lazy(tensor):
        yield tensor.untyped_storage()


def _changed(dtype: torch.dtype, size: torch.Size, version: int, expected: int, path: str) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)}] is at version {version}; expected version {expected} instead. It was saved by layer "
        f"{path!r} under forebay.offload_activations. Hint: enable anomaly detection to find the operation that failed "
        "to compute its gradient, with torch.autograd.set_detect_anomaly(True)"
    )
