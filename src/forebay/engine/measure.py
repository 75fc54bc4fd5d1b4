"""Timing of copies and of the host kernel, through the engine that training uses.

Copies are timed from Python around whole batches, so that one synchronisation is shared by many. The best of a few
rounds counts: what else runs on the machine can only lower a rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from forebay.engine.base import Engine, Event, Lane
from forebay.host import kernels

_MASTERS = {torch.bfloat16: torch.int16, torch.float16: torch.float32}


def best_seconds(work: Callable[[], Sequence[Event]], num_rounds: int) -> float:
    """Return the least time of some rounds of ``work``, which returns the events that end it."""
    best = float("inf")
    for _ in range(num_rounds + 1):  # the first touches the memory
        start = time.perf_counter()
        finish(work())
        best = min(best, time.perf_counter() - start)
    return best


def finish(ends: Sequence[Event]) -> None:
    """Block until a round is over: it is what is timed, and its buffers are used again or released."""
    for event in ends:
        event.synchronize()


class Copies:
    """Batches of pinned copies of one size, on one lane or both.

    Args:
        engine: whose lanes carry them.
        num_bytes: of a copy; as much is pinned and held on the device, twice.
        count: of copies in a batch, on each lane.
    """

    def __init__(self, engine: Engine, num_bytes: int, count: int) -> None:
        self._engine = engine
        self._count = count
        self._num_bytes = num_bytes
        self._host = [engine.empty_host(num_bytes, "other") for _ in range(2)]
        self._device = [engine.empty_device(num_bytes, "staging") for _ in range(2)]
        for buffer in self._host:
            buffer.tensor.zero_()

    def enqueue(self, lanes: Sequence[Lane], count: int | None = None) -> list[Event]:
        """Enqueue a batch on each of ``lanes``; return the events that end them."""
        engine = self._engine
        # The allocator gave the device buffers to the compute lane, which may still use that memory for what it held
        # before: without this wait a copy could overwrite it.
        start = engine.record(Lane.COMPUTE)
        for lane in lanes:
            engine.wait(lane, start)
        for _ in range(count or self._count):
            for lane in lanes:
                if lane is Lane.DOWN:
                    engine.copy(lane, self._host[0].tensor, self._device[0].tensor)
                else:
                    engine.copy(lane, self._device[1].tensor, self._host[1].tensor)
        return [engine.record(lane) for lane in lanes]

    def gbps(self, lanes: Sequence[Lane], num_rounds: int) -> float:
        """Return the rate of each of ``lanes`` while all of them copy, in GB/s."""
        return self._count * self._num_bytes / 1e9 / best_seconds(lambda: self.enqueue(lanes), num_rounds)

    def release(self) -> None:
        """Give the memory back."""
        for buffer in (*self._host, *self._device):
            buffer.release()


class HostUpdate:
    """An AdamW update on the host, with fp32 moments and masters.

    Args:
        engine: runs it.
        num_elements: how many, enough to outgrow every cache.
        dtype: of weights and gradients, bf16, fp16 or fp32. Default bf16.
    """

    def __init__(self, engine: Engine, num_elements: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self._engine = engine
        self._num_elements = num_elements
        size, master = dtype.itemsize, _MASTERS.get(dtype)
        element_bytes = 8 + 2 * size + (0 if master is None else master.itemsize)
        self._moved_bytes = (2 * element_bytes - size) * num_elements  # the gradient is only read
        # Pageable, as the state of the host share is; from the engine, which checks and counts it.
        self._slab = engine.empty_host(64 + element_bytes * num_elements, "other", pinned=False)
        self._slab.tensor.zero_()

        def view(dtype: torch.dtype, start: int) -> torch.Tensor:
            return self._slab.view(dtype, num_elements, 64 + start * num_elements)

        segment = kernels.Segment(
            step=self._slab.view(torch.float32, 1),
            exp_avg=view(torch.float32, 0),
            exp_avg_sq=view(torch.float32, 4),
            grad=view(dtype, 8),
            param=view(dtype, 8 + size),
            master=None if master is None else view(master, 8 + 2 * size),
        )
        self._task = kernels.UpdateTask("calibration", kernels.Algorithm.ADAMW, [segment], kernels.Hyper())

    def busy_ns(self) -> int:
        """Do one update and return how long the kernel worked."""
        before = self._task.busy_ns
        self._engine.host_task(self._task, writes=[self._slab.tensor])
        # The next one works on the same memory, and this one's time is read right after.
        self._engine.record(Lane.HOST).synchronize()
        return max(self._task.busy_ns - before, 1)

    def gparam_per_s(self, num_rounds: int) -> float:
        """Return billions of elements a second, nothing else going on."""
        return self._num_elements / min([self.busy_ns() for _ in range(num_rounds + 1)][1:])

    def gbps_beside(self, copies: Copies, count: int, num_rounds: int) -> float:
        """Return bytes read and written, in GB/s, while ``count`` copies run each way."""
        busy_ns = []
        for _ in range(num_rounds + 1):
            ends = copies.enqueue([Lane.DOWN, Lane.UP], count)
            busy_ns.append(self.busy_ns())
            finish(ends)
        return self._moved_bytes / min(busy_ns[1:])

    def release(self) -> None:
        """Give the memory back."""
        self._slab.release()
