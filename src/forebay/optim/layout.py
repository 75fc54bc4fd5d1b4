"""Which part of the optimizer state lives where, and in which pieces it travels.

Parameters are laid out in the order in which the forward pass needs them. The first part stays on the
device, the next is streamed and the last is updated on the host: the last layers' gradients come first in
backward and their weights are needed last in the next forward, which leaves the slowest placement the most
time. A tensor may be split, so the fraction is exact.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence

import torch

# A segment starts at a multiple of this many elements in its chunk, so that every field with a value for each
# element is aligned to at least 64 bytes (a cache line, an AVX-512 register), and blocks of 8-bit state begin there.
ALIGNMENT = 128
# Where a tensor is split between placements or chunks.
_SPLIT_MULTIPLE = 1024


class Placement(enum.Enum):
    """Where state lives and where it is updated.

    ``DEVICE``: on the device, updated there. ``STREAMED``: on the host, visits the device to be updated there;
    bitwise equal to ``DEVICE``. ``HOST``: on the host, updated by the host kernel.
    """

    DEVICE = "device"
    STREAMED = "streamed"
    HOST = "host"


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of a parameter."""

    num_elements: int
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` of the flattened parameter number ``param``."""

    param: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        """Number of elements in the segment."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Segments whose state is one contiguous region, copied and updated together.

    Attributes:
        placement: where the state lives.
        dtype: dtype of all its parameters.
        segments: its parts.
        offsets: where each segment starts in a field of the chunk, in elements.
        num_elements: length of a field, in elements, padding included.
        has_spare: whether there is a second place for its state and weights, see :mod:`forebay.optim.spares`.
    """

    placement: Placement
    dtype: torch.dtype
    segments: tuple[Segment, ...]
    offsets: tuple[int, ...]
    num_elements: int
    has_spare: bool = False


def divide(
    params: Sequence[ParamSpec],
    *,
    offload_fraction: float,
    host_share: float,
    chunk_elements: int,
    first_param: int = 0,
) -> list[Chunk]:
    """Divide parameters into chunks.

    Args:
        params: all parameters, in the order in which forward needs them.
        offload_fraction: share of all elements whose state leaves the device, 0 to 1.
        host_share: share of those that is updated on the host, 0 to 1; the rest is streamed.
        chunk_elements: most elements a chunk has.
        first_param: number of the first parameter; the others follow.

    Returns:
        Chunks in order: device, streamed, host. Every element is in exactly one.
    """
    total = sum(param.num_elements for param in params)
    num_offloaded = round(total * offload_fraction)
    num_host = round(num_offloaded * host_share)
    bounds = (total - num_offloaded, total - num_host)
    pieces: dict[Placement, list[tuple[Segment, torch.dtype]]] = {placement: [] for placement in Placement}
    position = 0
    for index, param in enumerate(params, first_param):
        cuts = [0]
        for bound in bounds:
            cut = bound - position
            if 0 < cut < param.num_elements:
                cut = round(cut / _SPLIT_MULTIPLE) * _SPLIT_MULTIPLE
            cuts.append(min(max(cut, cuts[-1]), param.num_elements))
        cuts.append(param.num_elements)
        for placement, (start, stop) in zip(Placement, itertools.pairwise(cuts), strict=True):
            if stop > start:
                pieces[placement].append((Segment(index, start, stop), param.dtype))
        position += param.num_elements
    return [chunk for placement in Placement for chunk in _pack(pieces[placement], placement, chunk_elements)]


def _pack(pieces: Sequence[tuple[Segment, torch.dtype]], placement: Placement, chunk_elements: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    # One open chunk per dtype: in a bf16 model with fp32 norms the few fp32 elements of all layers share one.
    open_chunks: dict[torch.dtype, list[Segment]] = {}

    def close(dtype: torch.dtype) -> None:
        segments = open_chunks.pop(dtype, [])
        if segments:
            chunks.append(_chunk(segments, placement, dtype))

    for segment, dtype in pieces:
        start = segment.start
        while start < segment.stop:
            used = sum(_padded(s.num_elements) for s in open_chunks.get(dtype, ()))
            room = chunk_elements - used
            if room < min(segment.stop - start, _SPLIT_MULTIPLE):
                close(dtype)
                continue
            stop = segment.stop
            if stop - start > room:
                stop = start + room // _SPLIT_MULTIPLE * _SPLIT_MULTIPLE
            open_chunks.setdefault(dtype, []).append(Segment(segment.param, start, stop))
            start = stop
    for dtype in list(open_chunks):
        close(dtype)
    return sorted(chunks, key=lambda chunk: (chunk.segments[0].param, chunk.segments[0].start))


def _padded(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def _chunk(segments: Sequence[Segment], placement: Placement, dtype: torch.dtype) -> Chunk:
    offsets, end = [], 0
    for segment in segments:
        offsets.append(end)
        end += _padded(segment.num_elements)
    return Chunk(placement, dtype, tuple(segments), tuple(offsets), end)
