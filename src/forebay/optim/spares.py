"""Which chunks have a spare: a second place for state and weights, so that an update can be made and dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from forebay.optim.chunk_state import region_bytes
from forebay.optim.layout import Chunk, Placement
from forebay.optim.update_rule import UpdateRule

# Of host memory for all spares, per offloaded element. With the third of the offloaded elements that the host
# updates by default, bf16 training takes 11.3 bytes an element without spares and 12.3 with them.
SPARE_BYTES_PER_ELEMENT = 1


def weight_bytes(chunk: Chunk) -> int:
    """Return the bytes of a chunk's weights, or of its gradients."""
    return chunk.num_elements * chunk.dtype.itemsize


def with_spares(chunks: Sequence[Chunk], rule: UpdateRule) -> list[Chunk]:
    """Return the chunks, some of those on the host with a spare.

    The last in forward order get them: their gradients are the first to be complete in backward, so the host is
    busy with them for longest before the step.
    """
    offloaded = [chunk for chunk in chunks if chunk.placement is not Placement.DEVICE]
    left = SPARE_BYTES_PER_ELEMENT * sum(s.num_elements for chunk in offloaded for s in chunk.segments)
    result = list(chunks)
    for index in reversed(range(len(result))):
        chunk = result[index]
        if chunk.placement is Placement.HOST:
            left -= region_bytes(chunk, rule) + weight_bytes(chunk)
            if left < 0:
                break
            result[index] = dataclasses.replace(chunk, has_spare=True)
    return result
