"""Hyperparameters of host updates in a CUDA graph.

A launch's host tasks run long after Python has enqueued it, and Python may have prepared the next launch by then. So
Python does not write to the memory that they read: it enqueues a write to device memory before the launch, and the
launch copies that down before its updates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from forebay.engine import Engine, Lane
from forebay.host.kernels import Hyper

_HYPER_BYTES = ctypes.sizeof(Hyper)
# There is room for so many groups from the start, so that a plan of memory can be exact.
_NUM_PLANNED_GROUPS = 64
GRAPH_HYPERS_BYTES = _NUM_PLANNED_GROUPS * _HYPER_BYTES  # on each tier


class GraphHypers:
    """One :class:`Hyper` for each parameter group.

    Args:
        engine: allocates the memory and moves it.
        num_groups: how many there must be room for.
        pinned: pin the host memory.

    Attributes:
        hypers: what host tasks read.
        memory: where these are, for the engine's checks.
    """

    def __init__(self, engine: Engine, num_groups: int, *, pinned: bool) -> None:
        self._engine = engine
        num_groups = max(num_groups, _NUM_PLANNED_GROUPS)
        self._host = engine.empty_host(num_groups * _HYPER_BYTES, "other", pinned=pinned)
        self._device = engine.empty_device(num_groups * _HYPER_BYTES, "other")
        self._last: list[int] = []
        self.memory = self._host.tensor
        address = self.memory.data_ptr()
        self.hypers = [Hyper.from_address(address + number * _HYPER_BYTES) for number in range(num_groups)]

    def write(self, hypers: Sequence[Hyper]) -> None:
        """Enqueue a write of the values for the launches to come, on the compute lane."""
        values = list(b"".join(bytes(hyper) for hyper in hypers))
        if values == self._last:
            return
        self._last = values
        # Pinned memory of torch's own is not used again before the copy is done, and pageable memory would block.
        on_cuda = self._engine.device.type == "cuda"
        staged = torch.tensor(values, dtype=torch.uint8, pin_memory=on_cuda)
        self._device.tensor[: len(values)].copy_(staged, non_blocking=True)

    def send(self) -> None:
        """Enqueue, in a capture, the copy down of what is on the device when the graph is launched."""
        self._engine.copy(Lane.DOWN, self.memory, self._device.tensor)
