"""The shares of an optimizer's state, one class per placement, each knowing how its chunks come to be updated.

A share only enqueues: nothing here blocks Python in a steady step. What a step needs to know is in
:class:`StepContext`, what the state is in the :class:`UpdateRule`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forebay.engine import Buffer, Engine
from forebay.optim.chunk_state import ChunkState, flat, region_bytes
from forebay.optim.layout import Chunk
from forebay.optim.update_rule import StepContext, UpdateRule


class Share(abc.ABC):
    """State of one placement.

    Args:
        engine: moves it.
        rule: what the state is and how it is updated.

    Attributes:
        chunks: its chunks, in forward order.
    """

    def __init__(self, engine: Engine, rule: UpdateRule) -> None:
        self.engine = engine
        self.rule = rule
        self.chunks: list[ChunkState] = []

    @abc.abstractmethod
    def extend(self, chunks: Sequence[Chunk], params: Sequence[torch.Tensor]) -> None:
        """Allocate state for more chunks, zero moments, masters equal to the parameters."""

    @abc.abstractmethod
    def step(self, context: StepContext) -> None:
        """Enqueue the update of all chunks."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Block until ``region`` of every chunk is current and may be read and written by Python."""

    def kept(self, number: int, index: int) -> tuple[str, ...] | None:
        """Return which moments segment ``index`` of chunk ``number`` has; see :class:`UpdateRule`."""
        return self.rule.kept(self.chunks[number].first_row + index)

    def scalars(self, number: int, index: int) -> dict[str, Any]:
        """Return what segment ``index`` of chunk ``number`` has beside its fields; see :class:`UpdateRule`."""
        return self.rule.scalars(self.chunks[number].first_row + index)

    def set_scalars(self, number: int, index: int, values: Mapping[str, Any] | None) -> None:
        """Set what :meth:`scalars` returns; see :class:`UpdateRule`."""
        self.rule.set_scalars(self.chunks[number].first_row + index, values)

    def refresh(self, numbers: set[int], params: Sequence[torch.Tensor]) -> None:
        """Set the masters of the numbered parameters to the parameters' values."""
        self.settle()
        for state in self.chunks:
            for segment, fields in zip(state.chunk.segments, state.segment_fields(state.region), strict=True):
                if segment.param in numbers:
                    set_master(fields, flat(params[segment.param], segment))

    def _allocate_on_host(
        self, chunks: Sequence[Chunk], slabs: list[Buffer], params: Sequence[torch.Tensor], *, pinned: bool
    ) -> list[ChunkState]:
        """Carve the regions of ``chunks`` from one new slab, which is appended to ``slabs``."""
        if not chunks:
            return []
        num_bytes = sum(region_bytes(chunk, self.rule) for chunk in chunks)
        slab = self.engine.empty_host(num_bytes, "optimizer_state", pinned=pinned)
        slabs.append(slab)
        states, start = [], 0
        for chunk in chunks:
            end = start + region_bytes(chunk, self.rule)
            states.append(ChunkState(chunk, self.rule.fields(chunk.dtype), slab.tensor[start:end]))
            init_masters(states[-1], params)
            start = end
        return states


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


def is_active(chunk: Chunk, context: StepContext) -> bool:
    """Return whether any parameter of the chunk has a gradient in this step."""
    return any(context.grads[segment.param] is not None for segment in chunk.segments)


class DeviceShare(Share):
    """State that stays on the device."""

    def __init__(self, engine: Engine, rule: UpdateRule) -> None:
        super().__init__(engine, rule)
        self._buffers: list[Buffer] = []

    def extend(self, chunks: Sequence[Chunk], params: Sequence[torch.Tensor]) -> None:
        """See :meth:`Share.extend`."""
        for chunk in chunks:
            buffer = self.engine.empty_device(region_bytes(chunk, self.rule), "optimizer_state")
            self._buffers.append(buffer)
            state = ChunkState(chunk, self.rule.fields(chunk.dtype), buffer.tensor, self.rule.register(chunk))
            init_masters(state, params)
            self.chunks.append(state)

    def step(self, context: StepContext) -> None:
        """See :meth:`Share.step`."""
        for state in self.chunks:
            if is_active(state.chunk, context):
                self.rule.update(state, state.region, context, self.engine)

    def settle(self) -> None:
        """See :meth:`Share.settle`; the compute lane orders everything here."""
