"""Records what an engine does on each lane, what the model does meanwhile, and how much memory is in use."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from forebay.engine import Engine, Event, Lane
from forebay.engine.observe import Span, observed
from forebay.report.layers import LayerWatch
from forebay.report.names import MemoryNames, shortened

# Passing an open gate takes tens of microseconds, on a stream as in the simulator: what is shorter has not waited.
SHORTEST_WAIT_MS = 0.05


@dataclasses.dataclass(frozen=True)
class Slice:
    """Something that took time on a lane.

    Attributes:
        lane: where.
        kind: see :class:`forebay.engine.observe.Span`.
        name: what it was, with the parameter where there is one.
        begin_ms: from the beginning of the trace.
        end_ms: from the beginning of the trace.
        num_bytes: copied; 0 for anything else.
        lane_waited_for: of a wait, where that was which it waited for; else None.
    """

    lane: Lane
    kind: str
    name: str
    begin_ms: float
    end_ms: float
    num_bytes: int = 0
    lane_waited_for: Lane | None = None

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return self.end_ms - self.begin_ms


@dataclasses.dataclass(frozen=True)
class MemorySample:
    """Bytes in use at a moment of the compute lane.

    Attributes:
        at_ms: from the beginning of the trace.
        tiers: by tier and purpose, from the ledger.
        allocated_bytes: all that torch has allocated on the GPU; None without one, and where it was not asked.
    """

    at_ms: float
    tiers: dict[str, dict[str, int]]
    allocated_bytes: int | None


@dataclasses.dataclass
class Recording:
    """What was recorded, in the order of begin.

    Attributes:
        slices: of all lanes.
        memory: samples in time.
        window_ms: begin and end of the part that counts.
    """

    slices: list[Slice]
    memory: list[MemorySample]
    window_ms: tuple[float, float]

    def gates(self) -> list[Slice]:
        """Return the waits of the compute lane, which held it up, longest first."""
        found = [s for s in self.slices if s.kind == "wait" and s.lane is Lane.COMPUTE]
        return sorted(found, key=lambda s: -s.duration_ms)

    def busy_ms(self, lane: Lane) -> float:
        """Return how long copies and tasks worked on a side lane within the window."""
        begin, end = self.window_ms
        worked = [s for s in self.slices if s.lane is lane and s.kind in ("copy", "host task")]
        return sum(max(0.0, min(s.end_ms, end) - max(s.begin_ms, begin)) for s in worked)

    def stall_ms(self) -> float:
        """Return how long the compute lane waited for side lanes within the window."""
        begin, end = self.window_ms
        return sum(max(0.0, min(s.end_ms, end) - max(s.begin_ms, begin)) for s in self.gates())


@dataclasses.dataclass(eq=False)
class _Entry:
    span: Span
    address: int = 0
    producer: _Entry | None = None


class Recorder:
    """Observes an engine and every model and optimizer that run meanwhile.

    Args:
        engine: to observe. Its lanes are drained at the beginning and at the end, so that all times are known.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names = MemoryNames()
        self._entries: list[_Entry] = []
        self._last: dict[Lane, _Entry] = {}
        # The events are kept, or the id of a dead one could be that of a new one.
        self._producers: dict[int, tuple[Event, _Entry | None]] = {}
        self._declared: Span | None = None
        self._samples: list[tuple[Any, dict[str, dict[str, int]], int | None]] = []
        self._steps: list[Any] = []
        self._optimizer_ends: list[Callable[[], None]] = []
        self.recording: Recording | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Record what happens in the block; :attr:`recording` is there after it."""
        self._engine.synchronize()
        with contextlib.ExitStack() as stack:
            stack.enter_context(observed(self._engine, self))
            stack.enter_context(LayerWatch(self.begin, self._names.add_model)())
            for hook in (
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ):
                stack.callback(hook.remove)
            whole = Span("compute", Lane.COMPUTE)
            self._engine.begin_span(whole)
            yield
            self._close_declared()
            self._engine.end_span(whole)
        self._engine.synchronize()
        self.recording = self._evaluate(whole)
        # Whoever keeps the recorder keeps the figures, and no parameter or event.
        self._names = MemoryNames()
        self._entries, self._samples, self._steps = [], [], []
        self._last, self._producers = {}, {}

    def mark_step(self) -> None:
        """Mark the boundary of two steps. With two marks or more, the trace is of what is between the last two."""
        self._steps.append(self._now())

    # What is observed

    def enqueued(self, span: Span) -> None:
        """See :class:`forebay.engine.observe.Observer`."""
        entry = _Entry(span)
        if span.kind == "copy":
            host, device = span.tensors if span.lane is Lane.DOWN else reversed(span.tensors)
            entry.address = self._names.note_copy(host, device)
        elif span.kind == "declared":
            self._close_declared(span.begin)
            self._declared = span
            name = self._names.parameter_at(span.tensors)
            span.label = f"{span.label}: {name}" if name else span.label
            self._sample(span.begin)
        elif span.kind == "wait":
            entry.producer = self._producers.get(id(span.event), (None, None))[1]
            if span.lane is Lane.COMPUTE:
                self._close_declared(span.begin)
                self._sample(span.begin)
        # Kept, they would hold memory that is to be freed meanwhile.
        span.tensors, span.event = (), None
        self._entries.append(entry)
        if span.kind != "wait":
            self._last[span.lane] = entry

    def recorded(self, lane: Lane, event: Event) -> None:
        """See :class:`forebay.engine.observe.Observer`."""
        if lane is Lane.COMPUTE:
            self._close_declared()
        self._producers[id(event)] = (event, self._last.get(lane))

    def begin(self, label: str) -> Callable[[], None]:
        """Begin a slice of the compute lane; call what this returns at its end."""
        self._close_declared()
        span = Span("compute", Lane.COMPUTE, label)
        self._engine.begin_span(span)
        self._sample(span.begin, everything=True)
        self._entries.append(_Entry(span))

        def end() -> None:
            self._close_declared()
            self._engine.end_span(span)
            self._sample(span.end, everything=True)

        return end

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._names.add_optimizer(optimizer)
        self._optimizer_ends.append(self.begin(f"{type(optimizer).__name__}.step"))

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer_ends:  # none for a step that began before the block
            self._optimizer_ends.pop()()
            # State that this step allocated.
            self._names.add_optimizer(optimizer)

    def _close_declared(self, at: Any = None) -> None:
        # Only the launch of a declared kernel is known; it is done when the lane gets to what comes next.
        if self._declared is not None:
            self._declared.end = self._now() if at is None else at
            self._declared = None

    def _now(self) -> Any:
        span = Span("compute", Lane.COMPUTE)
        self._engine.begin_span(span)
        return span.begin

    def _sample(self, at: Any, *, everything: bool = False) -> None:
        device, allocated = self._engine.device, None
        if everything and device.type == "cuda":
            # memory_allocated() flattens hundreds of figures, which takes longer than launching a kernel.
            allocated = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
        self._samples.append((at, self._engine.ledger.snapshot(), allocated))

    # What comes of it

    def _evaluate(self, whole: Span) -> Recording:
        def ms(point: Any) -> float:
            return self._engine.elapsed_ms(whole.begin, point)

        window = (ms(self._steps[-2]), ms(self._steps[-1])) if len(self._steps) > 1 else (0.0, ms(whole.end))
        slices = []
        for entry in self._entries:
            span = entry.span
            if span.begin is None or span.end is None:  # left open by an exception
                continue
            begin_ms, end_ms = ms(span.begin), ms(span.end)
            if end_ms < window[0] or begin_ms > window[1]:
                continue
            if span.kind == "wait" and end_ms - begin_ms < SHORTEST_WAIT_MS:
                continue
            source = entry.producer.span.lane if entry.producer is not None else None
            name = self._name(entry, end_ms - begin_ms)
            slices.append(Slice(span.lane, span.kind, name, begin_ms, end_ms, span.num_bytes, source))
        memory = [MemorySample(ms(at), tiers, allocated) for at, tiers, allocated in self._samples]
        memory = [sample for sample in memory if window[0] <= sample.at_ms <= window[1]]
        return Recording(
            sorted(slices, key=lambda s: (s.begin_ms, -s.end_ms)), sorted(memory, key=lambda s: s.at_ms), window
        )

    def _name(self, entry: _Entry, duration_ms: float) -> str:
        if entry.span.kind == "wait":
            what = "work enqueued before this trace" if entry.producer is None else self._name(entry.producer, 0.0)
            return f"waited {duration_ms:.2f} ms for {what}"
        if entry.span.kind == "copy":
            return self._names.label(entry.address) or f"{entry.span.num_bytes} bytes"
        return shortened(entry.span.label)
