"""The bytes of a chunk: which fields it has, where they lie in its region, and views of its segments.

A region holds the fields one after the other, such as ``exp_avg | exp_avg_sq | remainder``, so that one copy
moves all of a chunk's state. The same layout serves a region on either tier.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch

from forebay.engine import Event
from forebay.optim.layout import Chunk, Segment
from forebay.optim.update_rule import Field, UpdateRule


@dataclasses.dataclass
class ChunkState:
    """A chunk with the place its state lives.

    Attributes:
        chunk: what it covers.
        fields: the state of an element, see :class:`UpdateRule`.
        region: flat uint8, where its state lives between steps, on the tier of its placement.
        first_row: number of its first segment in the rule; -1 if the rule never updates it.
        written: the last event after which ``region`` on the host is current; None when nothing is in flight.
    """

    chunk: Chunk
    fields: Mapping[str, Field]
    region: torch.Tensor
    first_row: int = -1
    written: Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        return fields_bytes(self.chunk, self.fields)

    def segment_fields(self, region: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Return, for each segment, views of its fields in a region laid out like this chunk's."""
        return [
            {name: region[start:end].view(dtype) for name, dtype, start, end in ranges} for ranges in self._byte_ranges
        ]

    @functools.cached_property
    def _byte_ranges(self) -> list[list[tuple[str, torch.dtype, int, int]]]:
        """For each segment, where its fields lie in a region; worked out once, since views are made in every step."""
        all_ranges: list[list[tuple[str, torch.dtype, int, int]]] = [[] for _ in self.chunk.segments]
        start = 0
        for name, field in self.fields.items():
            size = field.dtype.itemsize
            for ranges, segment, offset in zip(all_ranges, self.chunk.segments, self.chunk.offsets, strict=True):
                first = start + field.num_values(offset) * size
                ranges.append((name, field.dtype, first, first + field.num_values(segment.num_elements) * size))
            start += field.num_values(self.chunk.num_elements) * size
        return all_ranges


def region_bytes(chunk: Chunk, rule: UpdateRule) -> int:
    """Return the bytes of a chunk's region."""
    return fields_bytes(chunk, rule.fields(chunk.dtype))


def fields_bytes(chunk: Chunk, fields: Mapping[str, Field]) -> int:
    """Return the bytes of some fields of a chunk."""
    return sum(field.num_values(chunk.num_elements) * field.dtype.itemsize for field in fields.values())


def flat(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Return a segment of a contiguous tensor as a flat view that autograd does not see.

    It has a version counter of its own: what the optimizer writes through it is not taken for the user's write.
    """
    return tensor.data.view(-1)[segment.start : segment.stop]
