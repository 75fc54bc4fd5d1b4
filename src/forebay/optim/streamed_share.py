"""The share whose state lives on the host and visits the device to be updated there.

A chunk's visit: copy up, update on the compute lane, copy down. Visits may begin during backward, into memory
that activations have left, and end during the next forward; how many bytes may be on the device at a time is
the caller's to say.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import torch

from forebay.engine import Buffer, Engine, Event, Lane
from forebay.optim.chunk_state import ChunkState
from forebay.optim.layout import Chunk
from forebay.optim.shares import Share, is_active
from forebay.optim.update_rule import StepContext, UpdateRule


@dataclasses.dataclass
class _Visit:
    """A chunk's state on the device.

    Attributes:
        state: which chunk.
        buffer: where it is.
        event: while it arrives, its copy up; while it leaves, its copy down.
    """

    state: ChunkState
    buffer: Buffer
    event: Event


class StreamedShare(Share):
    """State on the host that is updated on the device.

    Args:
        engine: what moves it.
        rule: what the state is and how it is updated.
        num_slots: how many chunks may be on the device at once however little memory there is: one being
            updated, one arriving and one leaving make a pipeline.
        pinned: pin the host memory.
    """

    def __init__(self, engine: Engine, rule: UpdateRule, *, num_slots: int, pinned: bool) -> None:
        super().__init__(engine, rule)
        self._num_slots = num_slots
        self._pinned = pinned
        self._slabs: list[Buffer] = []
        self._slot_bytes = 0
        self._expected: list[ChunkState] = []  # what the coming step will update, if it is like the last
        self._arriving: deque[_Visit] = deque()  # the first of `_expected`, in order
        self._leaving: deque[_Visit] = deque()
        # For CUDA graphs: what a captured step finds on the device, fetched by the backward of the launch before, and
        # where. That memory is kept for good.
        self._kept: list[tuple[ChunkState, Buffer]] = []
        self._kept_buffers: list[Buffer] = []
        self._has_stepped = False  # in the capture that is under way

    def extend(self, chunks: Sequence[Chunk], params: Sequence[torch.Tensor]) -> None:
        """See :meth:`Share.extend`."""
        states = self._allocate_on_host(chunks, self._slabs, params, pinned=self._pinned)
        for state in states:
            state.first_row = self.rule.register(state.chunk)
        self.chunks += states
        self._slot_bytes = max((state.num_bytes for state in self.chunks), default=0)

    @property
    def on_device_bytes(self) -> int:
        """Device memory that visits hold, or that is kept for them."""
        num_slots = len(self._arriving) + len(self._leaving) + len(self._kept_buffers)
        if self._kept_buffers:
            num_slots -= sum(visit.buffer in self._kept_buffers for visit in (*self._arriving, *self._leaving))
        return self._slot_bytes * num_slots

    def prefetch(self, limit_bytes: int) -> None:
        """Begin visits of the coming step while all visits together stay within ``limit_bytes``."""
        if self._has_stepped:
            # The coming step is the next launch's, which looks for them in the memory kept for it.
            self._fetch_kept()
            return
        while len(self._arriving) < len(self._expected) and self.on_device_bytes + self._slot_bytes <= limit_bytes:
            self._arriving.append(self._fetch(self._expected[len(self._arriving)], self._new_slot()))

    def shrink(self, limit_bytes: int) -> None:
        """End visits until they hold at most ``limit_bytes``; the compute lane waits for their copies."""
        while self._leaving and self.on_device_bytes > limit_bytes:
            self._end(self._leaving.popleft())
        while self._arriving and self.on_device_bytes > limit_bytes:
            # A backward that no step followed. Nothing was changed, so there is nothing to bring back.
            self._end(self._arriving.pop())

    def _end(self, visit: _Visit) -> None:
        # Without the wait the compute lane's next tensor could lie in memory that a copy still uses.
        self.engine.wait(Lane.COMPUTE, visit.event)
        if visit.buffer not in self._kept_buffers:
            visit.buffer.release()

    def _new_slot(self) -> tuple[Buffer, Event]:
        # All slots are of one size so that any can be reused for any chunk.
        buffer = self.engine.empty_device(self._slot_bytes, "staging")
        # The allocator gave this memory to the compute lane, which may still be using it for what it held
        # before: the first copy up waits for that.
        return buffer, self.engine.record(Lane.COMPUTE)

    def _slot(self, limit_bytes: int) -> tuple[Buffer, Event]:
        allowed = max(limit_bytes, self._num_slots * self._slot_bytes)
        if self._leaving and self.on_device_bytes + self._slot_bytes > allowed:
            visit = self._leaving.popleft()
            return visit.buffer, visit.event
        return self._new_slot()

    def _fetch(self, state: ChunkState, slot: tuple[Buffer, Event]) -> _Visit:
        buffer, free = slot
        # `free` may be the copy down that empties the slot; without the wait this copy would overwrite state
        # that has not reached the host yet.
        self.engine.wait(Lane.UP, free)
        if state.written is not None:
            # The last copy down of this very chunk; else old state would come back.
            self.engine.wait(Lane.UP, state.written)
        self.engine.copy(Lane.UP, buffer.tensor[: state.num_bytes], state.region)
        return _Visit(state, buffer, self.engine.record(Lane.UP))

    def step(self, context: StepContext) -> None:
        """See :meth:`Share.step`; visits stay on the device until :meth:`shrink`, within ``context.limit_bytes``."""
        engine = self.engine
        active = [state for state in self.chunks if is_active(state.chunk, context)]
        for state in active:
            while self._arriving and self._arriving[0].state is not state:
                # It was expected and has no gradient after all.
                self._end(self._arriving.popleft())
            visit = self._arriving.popleft() if self._arriving else self._fetch(state, self._slot(context.limit_bytes))
            # The update reads what the copy up brings.
            engine.wait(Lane.COMPUTE, visit.event)
            region = visit.buffer.tensor[: state.num_bytes]
            self.rule.update(state, region, context, engine)
            # The copy down reads what the update writes.
            engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
            engine.copy(Lane.DOWN, state.region, region)
            state.written = engine.record(Lane.DOWN)
            self._leaving.append(_Visit(state, visit.buffer, state.written))
        while self._arriving:
            self._end(self._arriving.popleft())
        self._expected = active
        self._has_stepped = context.capturing

    # CUDA graphs

    def begin_capture(self, limit_bytes: int) -> None:
        """Prepare for a capture; a step in it may find up to ``limit_bytes`` of visits on the device."""
        # Visits that end in a graph would end at every launch of it, but begin only once.
        while self._leaving:
            self._end(self._leaving.popleft())
        while self._arriving and self._slot_bytes * len(self._arriving) > limit_bytes:
            self._end(self._arriving.pop())
        self._kept = [(visit.state, visit.buffer) for visit in self._arriving]
        self._kept_buffers += [buffer for _, buffer in self._kept if buffer not in self._kept_buffers]
        self._has_stepped = False

    def end_capture(self) -> None:
        """End all visits but those which the next launch's step finds on the device."""
        while self._leaving:
            self._end(self._leaving.popleft())
        while len(self._arriving) > len(self._kept):
            self._end(self._arriving.pop())  # no step of the capture has used them
        self._fetch_kept()
        self._has_stepped = False

    def abandon_capture(self) -> None:
        """Forget a capture that failed; what it fetched was never there."""
        self._leaving.clear()
        while self._arriving:
            self._end(self._arriving.pop())
        self._kept, self._has_stepped = [], False

    def before_launch(self) -> None:
        """Put on the device what the captured step finds there, after work outside of the graph."""
        if [visit.buffer for visit in self._arriving] != [buffer for _, buffer in self._kept]:
            while self._arriving:
                self._end(self._arriving.pop())  # a launch makes them stale
            self._fetch_kept()

    def _fetch_kept(self) -> None:
        while len(self._arriving) < len(self._kept):
            state, buffer = self._kept[len(self._arriving)]
            for visit in [visit for visit in self._leaving if visit.buffer is buffer]:
                self._leaving.remove(visit)
                self._end(visit)
            # The compute lane may just have used it.
            self._arriving.append(self._fetch(state, (buffer, self.engine.record(Lane.COMPUTE))))

    def settle(self) -> None:
        """See :meth:`Share.settle`. State that was fetched ahead is dropped, so that it cannot become stale."""
        while self._arriving:
            visit = self._arriving.popleft()
            visit.event.synchronize()
            self._end(visit)
        for state in self.chunks:
            if state.written is not None:
                state.written.synchronize()
