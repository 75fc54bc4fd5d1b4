"""A parameter of HybridDeviceOptimizer with the tensors that stand for it where it is updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from forebay.engine import Buffer, Engine, Lane
from forebay.optim.dense import flat, is_dense, shaped
from forebay.optim.hybrid_arguments import OptimizerClass

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]

# Fields of a slab start at multiples of this many bytes: a cache line, an AVX-512 register.
_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(eq=False)
class Slot:
    """One parameter.

    Attributes:
        param: the user's parameter, on the device.
        group: number of its parameter group.
        offloaded: whether it is updated on the host.
        inner: what the sub-optimizer updates: the fp32 master, else the host copy, else ``param`` itself
            (another tensor object with the same memory).
        weight: on the host, in the dtype of ``param``: what is uploaded; None when not offloaded.
        has_master: whether ``inner`` is an fp32 master of a ``param`` of lower precision.
        kind: the class of the sub-optimizer.
        optimizer: the sub-optimizer.
        grad_memory: flat uint8 on the host, where gradients land.
        seen: version and address of ``param`` when the copies were last equal to it.
        layout: shape, strides, dtype and device of ``param`` when it was given to the optimizer.
    """

    param: torch.Tensor
    group: int
    offloaded: bool
    inner: torch.Tensor
    weight: torch.Tensor | None
    has_master: bool
    kind: OptimizerClass
    optimizer: Optimizer | None = None
    grad_memory: torch.Tensor | None = None
    seen: tuple[int, int] = (-1, -1)
    layout: _Layout = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.layout = _layout(self.param)

    def mark_current(self) -> None:
        """Note that the copies now are what ``param`` is."""
        self.seen = (self.param._version, self.param.data_ptr())

    def is_stale(self) -> bool:
        """Return whether someone else has written to ``param``, or replaced its memory, since the last note."""
        return self.seen != (self.param._version, self.param.data_ptr())


class PythonTask:
    """A host task for Python code, used for one call after the other.

    The engine remembers tasks until its next full synchronisation. It is therefore always the same object, and
    holds nothing once it has run.
    """

    function_address = 0
    argument_address = 0

    def __init__(self) -> None:
        self.label = ""
        self.work: Callable[[], None] | None = None

    def run(self) -> None:
        """Do the work that was set."""
        work, self.work = self.work, None
        assert work is not None, self.label
        work()

    def status(self) -> int:
        """Return 0: a Python task fails by raising."""
        return 0


def _needs_master(param: torch.Tensor) -> bool:
    """Return whether fp32 is more than the precision of ``param``."""
    return param.is_floating_point() and param.dtype.itemsize < torch.float32.itemsize


def check_param(param: torch.Tensor, device: torch.device) -> None:
    """Raise for a parameter that cannot be updated in copies."""
    if hasattr(param, "to_local"):
        raise TypeError(
            "a parameter is a DTensor; HybridDeviceOptimizer updates plain tensors, so give it the local shards "
            "(param.to_local()), or use forebay.AdamW"
        )
    if param.layout != torch.strided or not is_dense(param):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has layout {param.layout} and strides "
            f"{tuple(param.stride()) if param.layout == torch.strided else '-'}, with gaps or overlaps in memory; "
            "make it contiguous before building the optimizer"
        )
    if param.device != device:
        raise ValueError(
            f"all parameters must be on one device, but one is on {param.device} and others on {device}; move the "
            "model to one device before building the optimizer, or build one optimizer per device"
        )


def carve(
    allocate: Callable[[int], Buffer], shapes: Sequence[tuple[torch.dtype, int]]
) -> tuple[Buffer | None, list[torch.Tensor]]:
    """Allocate one buffer for fields of (dtype, elements); return it and the fields, flat."""
    offsets = []
    num_bytes = 0
    for dtype, num_elements in shapes:
        num_bytes += -num_bytes % _ALIGNMENT_BYTES
        offsets.append(num_bytes)
        num_bytes += dtype.itemsize * num_elements
    if num_bytes == 0:
        return None, [torch.empty(0, dtype=dtype) for dtype, _ in shapes]
    buffer = allocate(num_bytes)
    fields = zip(shapes, offsets, strict=True)
    return buffer, [buffer.view(dtype, elements, offset) for (dtype, elements), offset in fields]


def make_slots(
    engine: Engine,
    params: Sequence[torch.Tensor],
    *,
    groups: Sequence[int],
    kind: OptimizerClass,
    offloaded: bool,
    with_masters: bool,
    pinned: bool,
) -> tuple[list[Slot], list[Buffer]]:
    """Make the slots of ``params``, with memory that holds nothing yet.

    Args:
        engine: allocates.
        params: parameters that all are, or all are not, updated on the host.
        groups: the number of each one's parameter group.
        kind: the class that updates them.
        offloaded: whether that is on the host.
        with_masters: give those of low precision a master.
        pinned: whether host memory is pinned.

    Returns:
        The slots, and the buffers that must be kept as long as they are.
    """

    def allocate(purpose: str, shapes: Sequence[tuple[torch.dtype, int]]) -> list[torch.Tensor]:
        def host(num_bytes: int) -> Buffer:
            return engine.empty_host(num_bytes, purpose, pinned=pinned)

        def device(num_bytes: int) -> Buffer:
            return engine.empty_device(num_bytes, purpose)

        buffer, fields = carve(host if offloaded else device, shapes)
        if buffer is not None:
            buffers.append(buffer)
        return fields

    buffers: list[Buffer] = []
    has_master = [with_masters and _needs_master(param) for param in params]
    shapes = [(torch.float32, param.numel()) for param, has in zip(params, has_master, strict=True) if has]
    masters = iter(allocate("master_weights", shapes))
    if offloaded:
        weights = allocate("weights", [(param.dtype, param.numel()) for param in params])
    slots = []
    for index, (param, has) in enumerate(zip(params, has_master, strict=True)):
        weight = shaped(weights[index], param) if offloaded else None
        inner = shaped(next(masters), param) if has else param.detach() if weight is None else weight
        slots.append(Slot(param, groups[index], offloaded, inner, weight, has, kind))
    return slots, buffers


@torch.no_grad()
def refresh(engine: Engine, task: PythonTask, slots: Sequence[Slot], *, keep_residue: bool) -> None:
    """Copy the parameters into what stands for them on the host and in fp32; all is current on return.

    Args:
        engine: moves the bytes.
        task: for the host's part.
        slots: whose copies to refresh.
        keep_residue: leave a master as it is where it rounds to the parameter's value. What a write did not
            change keeps its full precision then; reloading a checkpoint's weights changes no master at all.
    """
    for slot in slots:
        _check_unchanged(slot)
    offloaded = [slot for slot in slots if slot.offloaded]
    for slot in slots:
        if slot.offloaded:
            continue
        if slot.has_master:
            _widen(slot.inner, slot.param, keep_residue)
        else:
            # The memory may have been replaced (`param.data = ...`); the object, by which the sub-optimizer
            # knows its state, stays.
            slot.inner.data = slot.param.detach()
    if offloaded:
        # Without this wait the copies would read weights that kernels enqueued before are still writing, and
        # write host weights that the last step's upload is still reading.
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        weights = []
        for slot in offloaded:
            assert slot.weight is not None
            weights.append(flat(slot.weight))
            engine.copy(Lane.DOWN, weights[-1], flat(slot.param))
        # Without this wait masters would be made from weights that have not arrived. (Where there is no master
        # the wait still matters: the task below keeps Python from going on before the copies are done.)
        engine.wait(Lane.HOST, engine.record(Lane.DOWN))
        masters = [slot for slot in offloaded if slot.has_master]

        def widen() -> None:
            for slot in masters:
                assert slot.weight is not None
                _widen(slot.inner, slot.weight, keep_residue)

        task.label, task.work = "refresh masters", widen
        engine.host_task(task, reads=weights, writes=[flat(slot.inner) for slot in masters])
    for slot in slots:
        slot.mark_current()


def _widen(master: torch.Tensor, weight: torch.Tensor, keep_residue: bool) -> None:
    if keep_residue:
        master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype)))
    else:
        master.copy_(weight)


def _layout(param: torch.Tensor) -> _Layout:
    return tuple(param.shape), tuple(param.stride()), param.dtype, param.device


def _check_unchanged(slot: Slot) -> None:
    now = _layout(slot.param)
    if now != slot.layout:
        then, now_text = (f"shape {a}, strides {b}, {c} on {d}" for a, b, c, d in (slot.layout, now))
        raise ValueError(
            f"a parameter was of {then} when it was given to the optimizer and is of {now_text} now, so its state "
            "does not fit any more; build the optimizer after changing or moving the model"
        )
