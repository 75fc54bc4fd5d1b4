"""When copies run: how many layers are on their way to the host at once, and what is fetched back ahead of time.

A pass is one forward of one layer. Passes are numbered as they begin. Backward reaches them in some order, mostly but
not always the reverse (micro-batches in flight, several heads), and that order is learned: the next step prefetches
along it. A wrong guess costs time and never correctness, because each range is loaded, at the latest, when its
handle is unpacked.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from forebay.activations.ranges import Range, RangeStore
from forebay.engine import Engine, Event, Lane

logger = logging.getLogger("forebay")

_OBSERVATIONS = 2  # of a tensor whose copy frees nothing, before it stays on the device


class Slot(NamedTuple):
    """The place of a saved tensor among all that a layer saves; the same in every step of most models."""

    layer: int
    position: int
    dtype: torch.dtype
    num_dims: int


class Pass:
    """One forward of one layer, as long as its graph lives.

    Args:
        number: of all passes.
        layer: index of the layer.
        stream: where its forward began, see :meth:`forebay.engine.Engine.compute_stream`.
    """

    def __init__(self, number: int, layer: int, stream: int) -> None:
        self.number = number
        self.layer = layer
        self.stream = stream
        self._saved: list[tuple[Slot, weakref.ref[Range]]] = []

    def add(self, slot: Slot, saved: Range) -> None:
        """Remember that a tensor of this pass is in ``saved``."""
        self._saved.append((slot, weakref.ref(saved)))

    @property
    def has_saved(self) -> bool:
        """Whether anything of it was offloaded."""
        return bool(self._saved)

    def saved(self) -> list[tuple[Slot, Range]]:
        """Return what is left of what was saved, in the order of backward: the last first."""
        return [(slot, found) for slot, ref in reversed(self._saved) if (found := ref()) is not None]


class Schedule:
    """Orders the copies of one model.

    Args:
        engine: that copies.
        store: whose ranges it loads.
        num_in_flight: how many passes may be on their way to the host while the next ones compute.
        num_prefetched: how many passes are on their way back before backward reaches them.
    """

    def __init__(self, engine: Engine, store: RangeStore, *, num_in_flight: int, num_prefetched: int) -> None:
        self._engine = engine
        self._store = store
        self._num_in_flight = num_in_flight
        self._num_prefetched = num_prefetched
        self._next_number = 0
        self._in_flight: deque[tuple[weakref.ref[Pass], Event | None]] = deque()
        self._live: dict[int, weakref.ref[Pass]] = {}
        # Of the step that began with pass `_first`: a step lasts until nothing that it has offloaded is left.
        self._first = 0
        self._reached: dict[int, tuple[int, int]] = {}
        self._order: list[tuple[int, int]] = []  # (number in the step, layer), as backward reached them last time
        self._position: dict[tuple[int, int], int] = {}
        self._unmeasured: list[weakref.ref[Pass]] = []
        self._freed: defaultdict[Slot, int] = defaultdict(int)
        self._held: defaultdict[Slot, int] = defaultdict(int)
        self._said = False

    # Forward

    def begin(self, layer: int) -> Pass:
        """Return a new pass of ``layer``."""
        self._live = {number: ref for number, ref in self._live.items() if ref() is not None}
        if not self._live:
            self._begin_step()
        number = self._next_number
        self._next_number += 1
        return Pass(number, layer, self._engine.compute_stream())

    def end(self, done: Pass) -> None:
        """Note that the forward of a pass is over; the compute lane waits for the copies of an earlier one."""
        if done.has_saved:
            self._live[done.number] = weakref.ref(done)
        newest = max((saved for _, saved in done.saved()), key=lambda saved: saved.number, default=None)
        # Weak, and the event alone: what is in flight when a step ends must not outlive its graph. A pass that saves
        # nothing counts too, so that the copies of the one before it are over when it is.
        self._in_flight.append((weakref.ref(done), None if newest is None else newest.down))
        while len(self._in_flight) > self._num_in_flight:
            self._settle(*self._in_flight.popleft())

    def _settle(self, ref: weakref.ref[Pass], down: Event | None) -> None:
        if down is None:
            return
        # Without this wait the Python thread, far ahead of the device, would allocate the activations of all layers
        # before the first has left: memory is free only for work that comes after the copy.
        self._engine.wait(Lane.COMPUTE, down)
        done = ref()
        # On another stream the engine holds the originals for a while, which says nothing about who else does.
        if done is not None and done.stream == self._engine.compute_stream():
            self._unmeasured.append(ref)

    def _begin_step(self) -> None:
        if self._reached:
            self._order = list(self._reached.values())
            self._position = {key: position for position, key in enumerate(self._order)}
        self._first = self._next_number
        self._reached = {}
        self._unmeasured = []
        self._store.sweep()

    # Backward

    def reach(self, number: int, layer: int) -> None:
        """Load what backward needs next: it has come to pass ``number``, which is of ``layer``."""
        if number in self._reached or number < self._first:
            return
        ref = self._live.get(number)
        found = None if ref is None else ref()
        self._reached[number] = (number - self._first, layer)
        self._measure()
        if found is not None:
            self._store.load(saved for _, saved in found.saved())
        for coming in self._coming(number):
            self._store.load(saved for _, saved in coming.saved())

    def _coming(self, number: int) -> Iterator[Pass]:
        num_left = self._num_prefetched
        for candidate in self._candidates(number):
            if num_left == 0:
                return
            ref = self._live.get(candidate)
            found = None if ref is None or candidate in self._reached else ref()
            if found is not None:
                num_left -= 1
                yield found

    def _candidates(self, number: int) -> Iterator[int]:
        position = self._position.get(self._reached[number])
        if position is not None:
            for relative, layer in self._order[position + 1 :]:
                candidate = self._first + relative
                ref = self._live.get(candidate)
                found = None if ref is None else ref()
                if found is not None and found.layer == layer:
                    yield candidate
            return
        # Nothing is known: what was saved last before this one, and after those what was saved after it.
        yield from sorted((other for other in self._live if other < number), reverse=True)
        yield from sorted((other for other in self._live if other > number), reverse=True)

    # What a copy frees

    def frees_nothing(self, slot: Slot) -> bool:
        """Return whether, so far, someone else always held what ``slot`` saves when backward began."""
        return self._held[slot] >= _OBSERVATIONS and not self._freed[slot]

    def _measure(self) -> None:
        """Look, as backward begins and memory is fullest, whose originals are gone."""
        for ref in self._unmeasured:
            done = ref()
            if done is None:
                continue
            for slot, saved in done.saved():
                if not saved.source_is_alive:
                    self._freed[slot] += 1
                    continue
                self._held[slot] += 1
                if self._held[slot] == _OBSERVATIONS and not self._freed[slot]:
                    self._say(slot, saved)
        self._unmeasured = []

    def _say(self, slot: Slot, saved: Range) -> None:
        if self._said:
            return
        self._said = True
        logger.info(
            "activations: what layer %d saves as number %d (%s, %d bytes) is held elsewhere until backward begins, so "
            "copying it frees nothing; it stays on the device, and so does what else is found to be like it",
            slot.layer,
            slot.position,
            slot.dtype,
            saved.num_bytes,
        )
