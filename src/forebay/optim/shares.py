"""The three shares of an optimizer's state, one class per placement, each knowing how to update its chunks.

A share only enqueues: nothing here blocks Python in a steady step. What a step needs to know is in
:class:`StepContext`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import torch

from forebay.engine import Buffer, Engine
from forebay.optim import device_update
from forebay.optim.chunk_state import ChunkState, flat, region_bytes, rows_of
from forebay.optim.device_update import GroupValues, StepScalars
from forebay.optim.layout import Chunk


@dataclasses.dataclass
class StepContext:
    """What one step works with.

    Attributes:
        params: all parameters, by number.
        grads: their gradients, flat and contiguous; None where a parameter has none in this step.
        groups: the parameter groups' hyperparameters in this step.
        group_of: each parameter's group.
        scalars: the per-segment numbers on the device.
        grad_scale: fp32 (1,) on the device, multiplies every gradient; None for 1.
        skip: fp32 (1,) on the device, nonzero to update nothing; None for never.
        limit_bytes: device memory that state may use for visits during the update.
    """

    params: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor | None]
    groups: Sequence[GroupValues]
    group_of: Sequence[int]
    scalars: StepScalars
    grad_scale: torch.Tensor | None
    skip: torch.Tensor | None
    limit_bytes: int


class Share(abc.ABC):
    """State of one placement.

    Attributes:
        chunks: its chunks, in forward order.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.chunks: list[ChunkState] = []

    @abc.abstractmethod
    def extend(self, chunks: Sequence[Chunk], first_row: int, params: Sequence[torch.Tensor]) -> None:
        """Allocate state for more chunks, zero moments, masters equal to the parameters."""

    @abc.abstractmethod
    def step(self, context: StepContext) -> None:
        """Enqueue the update of all chunks."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Block until ``region`` of every chunk is current and may be read and written by Python."""

    def step_counter(self, number: int, index: int, scalars: StepScalars) -> torch.Tensor:
        """Return, as a view, the count of updates of segment ``index`` of chunk ``number``."""
        return scalars.steps[self.chunks[number].first_row + index]

    def refresh(self, numbers: set[int], params: Sequence[torch.Tensor]) -> None:
        """Set the masters of the numbered parameters to the parameters' values."""
        self.settle()
        for state in self.chunks:
            for segment, fields in zip(state.chunk.segments, state.segment_fields(state.region), strict=True):
                if segment.param in numbers:
                    set_master(fields, flat(params[segment.param], segment))


def init_masters(state: ChunkState, params: Sequence[torch.Tensor]) -> None:
    """Zero a chunk's state and set its fp32 masters, where it has them, to the parameters."""
    for segment, fields in zip(state.chunk.segments, state.segment_fields(state.region), strict=True):
        for field in fields.values():
            field.zero_()
        set_master(fields, flat(params[segment.param], segment))


def set_master(fields: dict[str, torch.Tensor], weight: torch.Tensor) -> None:
    """Make a segment's master equal to its weight."""
    if "remainder" in fields:
        fields["remainder"].zero_()
    elif "master" in fields:
        fields["master"].copy_(weight)


def update_segments(state: ChunkState, region: torch.Tensor, context: StepContext, engine: Engine, label: str) -> None:
    """Update a chunk on the compute lane, its state being in ``region`` on the device."""
    for index, (segment, fields) in enumerate(zip(state.chunk.segments, state.segment_fields(region), strict=True)):
        grad = context.grads[segment.param]
        if grad is None:
            continue
        weight = flat(context.params[segment.param], segment)
        engine.declare(label, reads=[grad], writes=[weight, *fields.values()])
        device_update.adamw(
            weight,
            grad[segment.start : segment.stop],
            fields,
            context.scalars.rows[state.first_row + index],
            context.groups[context.group_of[segment.param]],
            context.grad_scale,
            context.skip,
        )


def is_active(chunk: Chunk, context: StepContext) -> bool:
    """Return whether any parameter of the chunk has a gradient in this step."""
    return any(context.grads[segment.param] is not None for segment in chunk.segments)


class DeviceShare(Share):
    """State that stays on the device."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._buffers: list[Buffer] = []

    def extend(self, chunks: Sequence[Chunk], first_row: int, params: Sequence[torch.Tensor]) -> None:
        """See :meth:`Share.extend`."""
        for chunk, row in zip(chunks, rows_of(chunks, first_row), strict=True):
            buffer = self.engine.empty_device(region_bytes(chunk), "optimizer_state")
            self._buffers.append(buffer)
            state = ChunkState(chunk, row, buffer.tensor)
            init_masters(state, params)
            self.chunks.append(state)

    def step(self, context: StepContext) -> None:
        """See :meth:`Share.step`."""
        for state in self.chunks:
            update_segments(state, state.region, context, self.engine, "device update")

    def settle(self) -> None:
        """See :meth:`Share.settle`; the compute lane orders everything here."""


def allocate_on_host(
    engine: Engine, chunks: Sequence[Chunk], first_row: int, slabs: list[Buffer], *, pinned: bool
) -> list[ChunkState]:
    """Carve the regions of ``chunks`` from one new slab, which is appended to ``slabs``."""
    num_bytes = sum(region_bytes(chunk) for chunk in chunks)
    if num_bytes == 0:
        return []
    slab = engine.empty_host(num_bytes, "optimizer_state", pinned=pinned)
    slabs.append(slab)
    states, start = [], 0
    for chunk, row in zip(chunks, rows_of(chunks, first_row), strict=True):
        states.append(ChunkState(chunk, row, slab.tensor[start : start + region_bytes(chunk)]))
        start += region_bytes(chunk)
    return states
