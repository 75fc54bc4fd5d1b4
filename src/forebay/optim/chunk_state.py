"""The bytes of a chunk: which fields it has, where they lie in its region, and views of its segments.

A region holds the fields one after the other, ``exp_avg | exp_avg_sq | remainder or master``, so that one
copy moves all of a chunk's state. The same layout serves a region on either tier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from forebay.engine import Event
from forebay.optim.layout import Chunk, Segment

_MASTER_FIELD = {
    torch.float32: None,
    torch.bfloat16: ("remainder", torch.int16),
    torch.float16: ("master", torch.float32),
}
PARAM_DTYPES = tuple(_MASTER_FIELD)


def field_dtypes(param_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return name and dtype of each state field of a parameter of ``param_dtype``, in region order."""
    fields = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    master = _MASTER_FIELD[param_dtype]
    if master is not None:
        fields[master[0]] = master[1]
    return fields


def state_bytes_per_element(param_dtype: torch.dtype) -> int:
    """Return the bytes of optimizer state, master included, of one element of a parameter."""
    return sum(dtype.itemsize for dtype in field_dtypes(param_dtype).values())


@dataclasses.dataclass
class ChunkState:
    """A chunk with the place its state lives.

    Attributes:
        chunk: what it covers.
        first_row: number of its first segment among all segments of the optimizer.
        region: flat uint8, where its state lives between steps, on the tier of its placement.
        written: the last event after which ``region`` on the host is current; None when nothing is in flight.
    """

    chunk: Chunk
    first_row: int
    region: torch.Tensor
    written: Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        return region_bytes(self.chunk)

    def segment_fields(self, region: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Return, for each segment, views of its fields in a region laid out like this chunk's."""
        views: list[dict[str, torch.Tensor]] = [{} for _ in self.chunk.segments]
        start = 0
        for name, dtype in field_dtypes(self.chunk.dtype).items():
            end = start + self.chunk.num_elements * dtype.itemsize
            field = region[start:end].view(dtype)
            for view, segment, offset in zip(views, self.chunk.segments, self.chunk.offsets, strict=True):
                view[name] = field[offset : offset + segment.num_elements]
            start = end
        return views


def region_bytes(chunk: Chunk) -> int:
    """Return the bytes of a chunk's region."""
    return chunk.num_elements * state_bytes_per_element(chunk.dtype)


def flat(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Return a segment of a contiguous tensor as a flat view that autograd does not see.

    It has a version counter of its own: what the optimizer writes through it is not taken for the user's write.
    """
    return tensor.data.view(-1)[segment.start : segment.stop]


def rows_of(chunks: Sequence[Chunk], first_row: int) -> list[int]:
    """Return the number of each chunk's first segment when they are numbered from ``first_row`` on."""
    rows = []
    for chunk in chunks:
        rows.append(first_row)
        first_row += len(chunk.segments)
    return rows
