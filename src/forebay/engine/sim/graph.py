"""Captures in the simulator: what was enqueued is recorded, and carried out at every replay, in adversarial order.

As on a GPU, nothing is carried out while it is captured, the work of a launch comes after what was enqueued on the
compute lane before it and before what is enqueued there later, and its side lanes are not those of eager work.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from forebay.engine.base import PYTHON_TASK_IN_GRAPH, SIDE_LANES, Event, HostTask, Lane
from forebay.engine.sim.clocks import Clock, Clocks
from forebay.engine.sim.watch import is_view, tensors_in, touched_by

if TYPE_CHECKING:
    from forebay.engine.sim.engine import SimEngine, SimEvent


class GraphLane(enum.Enum):
    """The side lanes of a launch."""

    DOWN = "down of the graph"
    HOST = "host of the graph"
    UP = "up of the graph"


class GraphEvent:
    """An event recorded in a capture; in eager work it stands for all launches of its graph so far."""

    def __init__(self, engine: SimEngine, graph: SimGraph, clock: Clock) -> None:
        self._engine = engine
        self.graph = graph
        self.clock = clock

    def query(self) -> bool:
        """Return True: the compute lane, where launches are, runs eagerly here."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Block until the launches so far are done."""
        self._engine.record(Lane.COMPUTE).synchronize()


class SimGraph:
    """What was enqueued in one capture; made by :meth:`SimEngine.capture`."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._items: list[Callable[[dict[GraphEvent, SimEvent]], None]] = []
        self._clocks = Clocks()  # of the capture, to know what is joined
        self.mode = _CaptureMode(self)

    def replay(self) -> None:
        """Launch the graph."""
        engine = self._engine
        assert not engine.capturing, "a graph is launched while another is captured"
        with engine._lanes_of_a_graph():
            # A launch is enqueued on the compute lane: without this its copies would not come after what was
            # enqueued there before.
            begin = engine.record(Lane.COMPUTE)
            for lane in SIDE_LANES:
                engine.wait(lane, begin)
            events: dict[GraphEvent, SimEvent] = {}
            for item in self._items:
                item(events)
            engine.join()

    # What the engine hands over while it captures

    def record(self, lane: Lane) -> GraphEvent:
        """Record an event."""
        event = GraphEvent(self._engine, self, self._clocks.snapshot(lane.value))

        def item(events: dict[GraphEvent, SimEvent]) -> None:
            events[event] = self._engine._record(lane)

        self._items.append(item)
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        """Wait for an event, if it was recorded in this capture."""
        if isinstance(event, GraphEvent) and event.graph is self:
            self._clocks.join(lane.value, event.clock)
            self._items.append(lambda events: self._engine.wait(lane, events[event]))

    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor, *, speculative: bool) -> None:
        """Enqueue a copy."""
        self._clocks.tick(lane.value)
        self._items.append(lambda events: self._engine.copy(lane, destination, source, speculative=speculative))

    def host_task(self, task: HostTask, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Enqueue a native host task."""
        if not task.function_address:
            raise RuntimeError(PYTHON_TASK_IN_GRAPH.format(task.label))
        reads, writes = list(reads), list(writes)
        self._clocks.tick(Lane.HOST.value)
        self._items.append(lambda events: self._engine.host_task(task, reads, writes))

    def declare(self, label: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Declare what a kernel touches."""
        reads, writes = list(reads), list(writes)
        self._items.append(lambda events: self._engine.declare(label, reads, writes))

    def call(self, function: Callable[[], None]) -> None:
        """Let ``function`` be called at every replay, on the compute lane."""
        self._items.append(lambda events: function())

    def release(self, function: Callable[[list[SimEvent]], None], after: Iterable[Event]) -> None:
        """Let ``function`` be called at every replay, with this replay's events for those in ``after``."""
        own = [event for event in after if isinstance(event, GraphEvent) and event.graph is self]
        self._items.append(lambda events: function([events[event] for event in own]))

    def check_joined(self) -> None:
        """Raise RuntimeError if work on a side lane is not joined to the compute lane."""
        joined = self._clocks.snapshot(Lane.COMPUTE.value)
        for lane in SIDE_LANES:
            own = lane.value
            if joined.get(own, 0) < self._clocks.snapshot(own).get(own, 0):
                raise RuntimeError(
                    f"the capture ended with work on lane {own!r} that is not joined to the compute lane; call "
                    "optimizer.join() as the last line of the capture"
                )

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Record one torch operation on device memory and return its result, which has no meaningful values yet."""
        schema = function._schema
        touched = list(touched_by(schema, args, kwargs))
        written = [tensor for tensor, is_write in touched if is_write]
        label = str(function)
        if written:
            assert all(result.alias_info is not None for result in schema.returns), f"{label} cannot be captured here"
            result: Any = tuple(written[: len(schema.returns)])
            result = None if not schema.returns else result[0] if len(schema.returns) == 1 else result
            fresh: list[torch.Tensor] = []
            if "_foreach_" in label:
                torch.autograd.graph.increment_version(written)  # as WatchMode does, and why
        else:
            # Its values come from memory that holds nothing yet. What counts are shape and place.
            with _disable_current_modes():
                result = function(*args, **kwargs)
            inputs = {tensor.untyped_storage()._cdata for tensor, _ in touched}
            fresh = [t for t in tensors_in(result) if t.untyped_storage()._cdata not in inputs]

        def run() -> None:
            self._engine._before_operation(label, [tensor for tensor, _ in touched])
            for tensor, is_write in touched:
                self._engine._check_operation(tensor, is_write, label)
            # Below autograd, so that no version changes: a launch changes none either.
            with _disable_current_modes(), torch._C._AutoDispatchBelowADInplaceOrView():
                again = function(*args, **kwargs)
                if fresh:
                    for old, new in zip(tensors_in(result), tensors_in(again), strict=True):
                        old.copy_(new)
            for tensor in fresh:
                self._engine._check_operation(tensor, True, label)

        self.call(run)
        return result


class _CaptureMode(TorchDispatchMode):
    """Hands torch operations on device memory to a graph."""

    def __init__(self, graph: SimGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one operation."""
        kwargs = kwargs or {}
        if is_view(func._schema):
            return func(*args, **kwargs)
        hosts = {self._graph._engine._is_on_host(tensor) for tensor, _ in touched_by(func._schema, args, kwargs)}
        if "_local_scalar_dense" in str(func) or hosts == {True, False}:
            raise RuntimeError(f"{func} waits for the device, which is not permitted when a graph is being captured")
        if hosts == {True}:
            return func(*args, **kwargs)  # on the host, now: a graph holds no such work
        return self._graph.operation(func, args, kwargs)
