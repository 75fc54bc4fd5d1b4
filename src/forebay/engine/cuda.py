"""The CUDA engine: three side streams, pinned slabs, and host functions launched by the runtime.

Host tasks are C functions started by ``cudaLaunchHostFunc`` between a copy down and a copy up: no Python, no
GIL, and they are captured by CUDA graphs. Streams and events are handled as the runtime's own handles, because a
step makes hundreds of calls.

While the caller's stream is being captured into a CUDA graph, the side streams are part of the capture: they are
forked from the compute stream at the first call, and :meth:`CudaEngine.join` brings them back.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from forebay.engine.base import (
    PYTHON_TASK_IN_GRAPH,
    SIDE_LANES,
    Buffer,
    Engine,
    Event,
    HostTask,
    Lane,
    TaskLog,
    Traffic,
)
from forebay.engine.cuda_buffers import CudaDeviceBuffer, CudaHostBuffer
from forebay.engine.cuda_runtime import DEVICE_TO_HOST, HOST_TO_DEVICE, CudaRuntime, loaded_runtime, sanitizer_is_on
from forebay.engine.observe import Span
from forebay.host.ledger import Ledger
from forebay.host.limits import DEFAULT_SETTING_HINT
from forebay.host.numa import numa_node_of_pci_device, pci_bus_id
from forebay.host.slab import HostSlab

_GAP_BYTES = 4 * 2**20  # copies from this size on leave a gap behind them
_DETOURED = (Lane.DOWN, Lane.UP)
_POLL_INTERVAL = 32  # events recorded between two looks at which have passed


class _Event:
    """A point on a lane; ``capture`` is the number of the capture it was recorded in, 0 for none."""

    __slots__ = ("_engine", "capture", "handle", "lane", "position")

    def __init__(self, engine: CudaEngine, handle: int, lane: Lane, position: int, capture: int) -> None:
        self._engine = engine
        self.handle = handle
        self.lane = lane
        self.position = position
        self.capture = capture

    def query(self) -> bool:
        return self._engine._has_passed(self)

    def synchronize(self) -> None:
        self._engine._synchronize_event(self)

    def __del__(self) -> None:
        # Recording the handle anew does not disturb the waits for this event: a wait takes the event's state when
        # it is enqueued. One that was captured is not used outside of its graph.
        if not self.capture:
            self._engine._free_events.append(self.handle)
        else:
            self._engine.runtime.destroy_event(self.handle)


@dataclasses.dataclass(slots=True)
class _InUse:
    """What a lane's work up to an event uses, and the compute stream whose allocator owns the device part."""

    event: _Event
    compute_stream: int
    on_device: list[torch.Tensor]
    on_host: list[object]


class CudaEngine(Engine):
    """Lanes on CUDA streams.

    The side streams live as long as the engine: the caching allocator keeps a memory pool per stream, so
    fresh streams every step would grow memory.

    Args:
        device: a CUDA device.
        delay_seed: put random delays on every lane, to look for missing waits. Default None: no delays.

    Attributes:
        runtime: the CUDA runtime.
        numa_node: of the device; None if unknown.
    """

    kind = "cuda"

    def __init__(self, device: torch.device, *, delay_seed: int | None = None) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ValueError(
                f"engine 'cuda' needs a CUDA device, got {str(device)!r} with torch {torch.__version__} and "
                f"{torch.cuda.device_count()} visible CUDA devices; use engine 'sim' on a CPU"
            )
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        properties: Any = torch.cuda.get_device_properties(self.device)
        self.numa_node = numa_node_of_pci_device(pci_bus_id(properties))
        torch.zeros(1, device=self.device)  # loads the runtime and makes the context
        # Torch's stream objects stay referenced: they own the handles that are used.
        self._torch_streams = {lane: torch.cuda.Stream(self.device) for lane in SIDE_LANES}
        self._torch_detours = {lane: torch.cuda.Stream(self.device) for lane in _DETOURED}
        self._set_up(
            loaded_runtime(),
            functools.partial(torch._C._cuda_getCurrentRawStream, index),
            {lane: stream.cuda_stream for lane, stream in self._torch_streams.items()},
            {lane: stream.cuda_stream for lane, stream in self._torch_detours.items()},
            delay_seed,
        )
        self._is_traced = sanitizer_is_on()

    def _set_up(
        self,
        runtime: CudaRuntime,
        current_stream: Callable[[], int],
        streams: Mapping[Lane, int],
        detours: Mapping[Lane, int],
        delay_seed: int | None = None,
    ) -> None:
        """Set what needs no device, so that tests can hand in a runtime that only checks how it is called."""
        self.ledger = Ledger()
        self.runtime = runtime
        self._current_stream = current_stream
        self._streams = streams
        self._delays = _Delays(delay_seed) if delay_seed is not None else None
        self._is_traced = False
        self._free_events: list[int] = []
        # One detour each: through a shared one, a lane would wait for the other's copies.
        self._detours = {lane: (stream, self._new_event(), self._new_event()) for lane, stream in detours.items()}
        self._log = TaskLog()
        self._traffic = Traffic()
        # Pairs of events around the waits that may have stalled the compute stream, and pairs that are free again.
        self._stalls: deque[tuple[int, int]] = deque()
        self._free_timers: list[tuple[int, int]] = []
        # What the copies and tasks enqueued since a lane's last event use; it moves to that event.
        self._open: dict[Lane, tuple[list[torch.Tensor], list[object]]] = {lane: ([], []) for lane in SIDE_LANES}
        self._in_use: dict[Lane, deque[_InUse]] = {lane: deque() for lane in SIDE_LANES}
        self._num_events = dict.fromkeys(Lane, 0)
        self._until_poll = _POLL_INTERVAL
        self._retired: deque[tuple[Sequence[Event], object]] = deque()
        self._capture = 0  # the number of the capture the side streams were forked into; 0 outside of one
        self._num_captures = 0
        self._compute_stream = 0
        self._forget_waits()

    def _new_event(self) -> int:
        return self._free_events.pop() if self._free_events else self.runtime.create_event(self.device.index or 0)

    # Captures

    @property
    def capturing(self) -> bool:
        """See :attr:`Engine.capturing`."""
        return self._look(self._current_stream())

    def _look(self, stream: int) -> bool:
        """Notice the stream that the caller is on; return whether it is being captured."""
        if stream != self._compute_stream:
            # What another stream has waited for, this one has not.
            self._compute_stream = stream
            self._waited[Lane.COMPUTE] = dict.fromkeys(SIDE_LANES, 0)
        if stream and self.runtime.is_capturing(stream):  # the default stream cannot be captured
            return True
        if self._capture:
            self._leave()
        return False

    def _is_entered(self) -> bool:
        """Return whether the side streams are part of the capture that is under way."""
        # The number alone would not tell: another capture may have begun without a call in between.
        return self._capture != 0 and self.runtime.is_capturing(self._streams[Lane.DOWN])

    def _enter(self, stream: int) -> None:
        """Make the side streams part of the capture of ``stream``."""
        if self._is_entered():
            return
        if self._capture:
            self._leave()
        for lane in SIDE_LANES:
            if any(self._open[lane]):
                self._keep_until(self._record(lane, stream))  # what eager work uses, not what the graph does
        self._num_captures += 1
        self._capture = self._num_captures
        self._forget_waits()
        # A stream becomes part of a capture by waiting for an event of it. Without this, copies would be carried out
        # now, once, rather than at every replay.
        fork = self._record(Lane.COMPUTE, stream)
        for side in self._streams.values():
            self.runtime.wait(side, fork.handle)

    def _leave(self) -> None:
        capture, self._capture = self._capture, 0
        self._forget_waits()
        for lane in SIDE_LANES:
            self._open[lane] = ([], [])
            self._in_use[lane] = deque(use for use in self._in_use[lane] if use.event.capture != capture)

    def _forget_waits(self) -> None:
        """Forget what each lane has waited for: the position of the last event of each side lane."""
        self._waited = {lane: dict.fromkeys(SIDE_LANES, 0) for lane in Lane}

    def _refuse_in_capture(self, what: str) -> None:
        if self.capturing:
            raise RuntimeError(f"{what} while a CUDA graph is being captured; do it before or after the capture")

    # Lanes and events

    def record(self, lane: Lane) -> _Event:
        """See :meth:`Engine.record`."""
        stream = self._current_stream()
        is_captured = self._look(stream)
        if is_captured:
            self._enter(stream)
        event = self._record(lane, stream)
        if lane is not Lane.COMPUTE:
            self._keep_until(event)
        self._until_poll -= 1
        if self._until_poll <= 0 and not is_captured:
            self._poll()
        return event

    def _record(self, lane: Lane, compute_stream: int) -> _Event:
        handle = self._new_event()
        self._num_events[lane] += 1
        event = _Event(self, handle, lane, self._num_events[lane], self._capture)
        self.runtime.record(handle, compute_stream if lane is Lane.COMPUTE else self._streams[lane])
        return event

    def _keep_until(self, event: _Event) -> None:
        """Keep what the lane's work uses until its event has passed."""
        opened = self._open[event.lane]
        if opened[0] or opened[1]:
            self._in_use[event.lane].append(_InUse(event, self._compute_stream, *opened))
            self._open[event.lane] = ([], [])

    def wait(self, lane: Lane, event: Event) -> None:
        """See :meth:`Engine.wait`."""
        assert isinstance(event, _Event)
        stream = self._current_stream()
        is_captured = self._look(stream)
        if event.capture != self._capture or (is_captured and not self._is_entered()):
            if not is_captured and lane is not Lane.COMPUTE:
                # Its graph's launches are on the compute stream, which comes after all of them.
                self.wait(lane, self.record(Lane.COMPUTE))
            return
        source = event.lane
        if source is not Lane.COMPUTE:
            if source is lane or self._waited[lane][source] >= event.position:
                return  # the lane comes after a later event of that lane already
            self._waited[lane][source] = event.position
        if lane is not Lane.COMPUTE or source is Lane.COMPUTE:
            self.runtime.wait(stream if lane is Lane.COMPUTE else self._streams[lane], event.handle)
            return
        if is_captured:
            self.runtime.wait(stream, event.handle)
        elif not self.runtime.has_passed(event.handle):  # what is past needs no wait
            self._timed_wait(stream, event)
        self._give_back(event)

    def _timed_wait(self, stream: int, event: _Event) -> None:
        if not self._free_timers:
            self._add_up_stalls()
        if self._free_timers:
            before, after = self._free_timers.pop()
        else:
            before, after = (self.runtime.create_event(self.device.index or 0, timing=True) for _ in range(2))
        self.runtime.record(before, stream)
        self.runtime.wait(stream, event.handle)
        self.runtime.record(after, stream)
        self._stalls.append((before, after))

    def _give_back(self, event: _Event) -> None:
        """Let go of the device memory that side lanes used before ``event``, which the compute stream now follows."""
        # Its allocator may have that memory back at once; holding it until the event has really passed would raise
        # the peak. Host memory has no such order: it stays until the event passes.
        for in_use in self._in_use[event.lane]:
            if in_use.event.position > event.position:
                break
            if in_use.compute_stream == self._compute_stream and in_use.event.capture == event.capture:
                in_use.on_device.clear()

    def _has_passed(self, event: _Event) -> bool:
        stream = self._current_stream()
        if self._look(stream):
            raise RuntimeError("asking whether an event has passed, while a CUDA graph is being captured")
        # Launches of a captured event's graph are on the compute stream.
        return self.runtime.is_idle(stream) if event.capture else self.runtime.has_passed(event.handle)

    def _synchronize_event(self, event: _Event) -> None:
        stream = self._current_stream()
        if self._look(stream):
            raise RuntimeError("waiting for an event, in Python, while a CUDA graph is being captured")
        if event.capture:
            self.runtime.synchronize_stream(stream)
        else:
            self.runtime.synchronize_event(event.handle)

    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor, *, speculative: bool = False) -> None:
        """See :meth:`Engine.copy`."""
        assert lane is Lane.DOWN or lane is Lane.UP, lane
        assert destination.dtype == source.dtype, (destination.dtype, source.dtype)
        assert destination.numel() == source.numel(), (destination.shape, source.shape)
        assert destination.is_contiguous()
        assert source.is_contiguous()
        num_bytes = source.nbytes
        if num_bytes == 0:
            return
        compute_stream = self._current_stream()
        is_captured = self._look(compute_stream)
        if is_captured:
            self._enter(compute_stream)
        self._traffic.add_copy(lane, num_bytes)
        stream = self._streams[lane]
        if self._delays is not None:
            self._delays.on_stream(self._torch_streams[lane])
        kind = DEVICE_TO_HOST if lane is Lane.DOWN else HOST_TO_DEVICE
        if self._is_traced:
            # The sanitizer sees torch's operations only.
            with torch.cuda.stream(self._torch_streams[lane]), torch.no_grad():
                destination.view(-1).copy_(source.view(-1), non_blocking=True)
        else:
            self.runtime.copy(destination.data_ptr(), source.data_ptr(), num_bytes, kind, stream)
        if num_bytes >= _GAP_BYTES and not is_captured:  # in a graph it would be an edge, not a node
            self._leave_gap(lane)
        # Without a reference the caching allocator could give the device side to another tensor of the compute
        # stream, or the host side be unmapped, while this copy still uses it.
        on_device, on_host = self._open[lane]
        if lane is Lane.DOWN:
            on_device.append(source)
            on_host.append(destination)
        else:
            on_device.append(destination)
            on_host.append(source)

    def _leave_gap(self, lane: Lane) -> None:
        # A copy engine that has the next copy of a stream at hand does not look at other streams. The user's own
        # small copies, such as reading a loss, then wait for all of ours: 91 ms behind 4.8 GB, measured, against
        # 2.5 ms with this detour over another stream, which costs no throughput.
        detour, away, back = self._detours[lane]
        self.runtime.record(away, self._streams[lane])
        self.runtime.wait(detour, away)
        self.runtime.record(back, detour)
        self.runtime.wait(self._streams[lane], back)

    def host_task(
        self, task: HostTask, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """See :meth:`Engine.host_task`."""
        stream = self._current_stream()
        is_captured = self._look(stream)
        self._log.add(task, captured=is_captured)
        if not task.function_address:
            if is_captured:
                raise RuntimeError(PYTHON_TASK_IN_GRAPH.format(task.label))
            # Python code cannot run inside a host function: it would need the GIL, which this thread may
            # hold while it waits for the device.
            self.runtime.synchronize_stream(self._streams[Lane.HOST])
            task.run()
            return
        if is_captured:
            self._enter(stream)
        if self._delays is not None:
            self._delays.on_host(self._launch)
        self._launch(task.function_address, task.argument_address)
        self._open[Lane.HOST][1].append(task)

    def _launch(self, function: int, argument: int) -> None:
        self.runtime.launch_host_function(self._streams[Lane.HOST], function, argument)

    def check_tasks(self) -> None:
        """See :meth:`Engine.check_tasks`."""
        self._log.check()

    def synchronize(self) -> None:
        """See :meth:`Engine.synchronize`."""
        self._refuse_in_capture("synchronizing the engine")
        self.runtime.synchronize_stream(self._current_stream())
        for lane in SIDE_LANES:
            self.runtime.synchronize_stream(self._streams[lane])
            self._open[lane] = ([], [])
            self._in_use[lane].clear()
        self._poll()
        self._log.check()
        self._log.clear()

    def compute_stream(self) -> int:
        """See :meth:`Engine.compute_stream`."""
        return self._current_stream()

    # Memory

    def empty_host(
        self, num_bytes: int, purpose: str, *, pinned: bool = True, setting_hint: str = DEFAULT_SETTING_HINT
    ) -> Buffer:
        """See :meth:`Engine.empty_host`."""
        self._refuse_in_capture(f"allocating host memory for {purpose}")
        return CudaHostBuffer(self, num_bytes, purpose, pinned, setting_hint)

    def empty_device(self, num_bytes: int, purpose: str) -> Buffer:
        """See :meth:`Engine.empty_device`."""
        return CudaDeviceBuffer(self, num_bytes, purpose)

    def traffic(self) -> Traffic:
        """See :meth:`Engine.traffic`; what replays of a graph move is not counted."""
        if not self.capturing:
            self._add_up_stalls()
        return dataclasses.replace(self._traffic)

    def _add_up_stalls(self) -> None:
        while self._stalls and self.runtime.has_passed(self._stalls[0][1]):
            before, after = self._stalls.popleft()
            self._traffic.stall_ms += self.runtime.elapsed_ms(before, after)
            self._free_timers.append((before, after))

    def take_peak_bytes(self) -> int:
        """See :meth:`Engine.take_peak_bytes`."""
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak_bytes

    # Observation

    def begin_span(self, span: Span) -> None:
        """See :meth:`Engine.begin_span`."""
        span.begin = self._timestamp(span.lane)

    def end_span(self, span: Span) -> None:
        """See :meth:`Engine.end_span`."""
        span.end = self._timestamp(span.lane)

    def _timestamp(self, lane: Lane) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device) if lane is Lane.COMPUTE else self._torch_streams[lane])
        return event

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """See :meth:`Engine.elapsed_ms`."""
        return begin.elapsed_time(end)

    # Inside

    def retire(self, after: Sequence[Event], kept_alive: object) -> None:
        """Keep something until all events have passed; close it then if it is a slab."""
        self._retired.append((after, kept_alive))
        if not self.capturing:
            self._poll()

    def _poll(self) -> None:
        self._until_poll = _POLL_INTERVAL
        for in_use in self._in_use.values():
            while in_use and self.runtime.has_passed(in_use[0].event.handle):
                in_use.popleft()
        while self._retired and all(event.query() for event in self._retired[0][0]):
            kept_alive = self._retired.popleft()[1]
            if isinstance(kept_alive, HostSlab):
                kept_alive.close()


class _Delays:
    """Random delays in front of copies and host tasks."""

    def __init__(self, seed: int) -> None:
        import random

        self._random = random.Random(seed)
        self._host_delays: list[Any] = []

    def on_stream(self, stream: torch.cuda.Stream) -> None:
        cycles = self._random.choice([0, 0, 100_000, 1_000_000])
        if cycles:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)

    def on_host(self, launch: Any) -> None:
        from forebay.host import kernels

        nanoseconds = self._random.choice([0, 0, 100_000, 1_000_000])
        if nanoseconds:
            # The argument is read when the function runs, so it lives as long as the engine.
            argument = ctypes.c_int64(nanoseconds)
            self._host_delays.append(argument)
            launch(kernels.delay_function_address(), ctypes.addressof(argument))
