"""The CUDA engine: three side streams, pinned slabs, and host functions launched by the runtime.

Host tasks are C functions started by ``cudaLaunchHostFunc`` between a copy down and a copy up: no Python, no
GIL, and they are captured by CUDA graphs. The function is reached through ctypes on the runtime that torch
has already loaded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from forebay.engine.base import SIDE_LANES, Buffer, Engine, Event, HostTask, Lane, TaskLog, Traffic
from forebay.engine.observe import Span
from forebay.host.ledger import Ledger, Tier
from forebay.host.numa import numa_node_of_pci_device
from forebay.host.slab import HostSlab


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if "libcudart" in Path(path).name:
            runtime = ctypes.CDLL(path)
            runtime.cudaLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
            runtime.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
            runtime.cudaHostUnregister.argtypes = [ctypes.c_void_p]
            runtime.cudaGetErrorString.argtypes = [ctypes.c_int]
            runtime.cudaGetErrorString.restype = ctypes.c_char_p
            return runtime
    raise RuntimeError("the CUDA runtime (libcudart) is not loaded in this process; install a CUDA build of torch")


def _check(code: int, what: str) -> None:
    if code != 0:
        # Clears the error, which would otherwise surface at torch's next call.
        _runtime().cudaGetLastError()
        text = _runtime().cudaGetErrorString(code).decode()
        raise RuntimeError(f"{what} failed: CUDA error {code} ({text})")


def _register(address: int, num_bytes: int) -> None:
    _check(_runtime().cudaHostRegister(address, num_bytes, 0), f"pinning {num_bytes / 2**30:.2f} GiB")


def _unregister(address: int) -> None:
    _runtime().cudaHostUnregister(address)


_GAP_BYTES = 4 * 2**20  # copies from this size on leave a gap behind them
_MOST_STALLS = 256  # waits whose duration is not known yet, before they are looked at unasked


class _Event(torch.cuda.Event):
    lane: Lane
    position: int


@dataclasses.dataclass
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
        self.ledger = Ledger()
        properties: Any = torch.cuda.get_device_properties(self.device)
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        self._numa_node = numa_node_of_pci_device(bus)
        torch.zeros(1, device=self.device)  # loads the runtime and makes the context
        self._runtime = _runtime()
        self._streams = {lane: torch.cuda.Stream(self.device) for lane in SIDE_LANES}
        # One each: through a shared one, a lane would wait for the other's copies.
        self._detours = {lane: torch.cuda.Stream(self.device) for lane in (Lane.DOWN, Lane.UP)}
        self._log = TaskLog()
        self._traffic = Traffic()
        # Pairs of events around the waits that may have stalled the compute stream.
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        # What the copies and tasks enqueued since a lane's last event use; it moves to that event.
        self._open: dict[Lane, tuple[list[torch.Tensor], list[object]]] = {lane: ([], []) for lane in SIDE_LANES}
        self._in_use: dict[Lane, deque[_InUse]] = {lane: deque() for lane in SIDE_LANES}
        self._num_events = dict.fromkeys(Lane, 0)
        self._retired: deque[tuple[Sequence[Event], object]] = deque()
        self._delays = _Delays(delay_seed) if delay_seed is not None else None

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if lane is Lane.COMPUTE else self._streams[lane]

    # Lanes and events

    def record(self, lane: Lane) -> _Event:
        """See :meth:`Engine.record`."""
        event = _Event()
        event.record(self._stream(lane))
        self._num_events[lane] += 1
        event.lane, event.position = lane, self._num_events[lane]
        if lane is not Lane.COMPUTE and any(self._open[lane]):
            compute_stream = torch.cuda.current_stream(self.device).cuda_stream
            self._in_use[lane].append(_InUse(event, compute_stream, *self._open[lane]))
            self._open[lane] = ([], [])
        self._poll()
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        """See :meth:`Engine.wait`."""
        assert isinstance(event, _Event)
        stream = self._stream(lane)
        if lane is not Lane.COMPUTE or event.lane is Lane.COMPUTE:
            stream.wait_event(event)
            return
        if event.query():
            # What is past needs no wait on the stream; the allocator may have its memory back all the same.
            self._give_back(event, stream)
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._stalls.append((before, after))
        if len(self._stalls) > _MOST_STALLS:
            self._add_up_stalls()
        self._give_back(event, stream)

    def _give_back(self, event: _Event, stream: torch.cuda.Stream) -> None:
        """Let go of the device memory that side lanes used before ``event``, which ``stream`` comes after now."""
        # From here on the compute stream comes after that work, so its allocator may have device memory back at
        # once; holding it until the event has really passed would raise the peak. Host memory has no such order: it
        # stays until the event passes.
        for in_use in self._in_use[event.lane]:
            if in_use.event.position > event.position:
                break
            if in_use.compute_stream == stream.cuda_stream:
                in_use.on_device.clear()

    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor, *, speculative: bool = False) -> None:
        """See :meth:`Engine.copy`."""
        assert lane in (Lane.DOWN, Lane.UP), lane
        assert destination.dtype == source.dtype, (destination.dtype, source.dtype)
        assert destination.numel() == source.numel(), (destination.shape, source.shape)
        self._traffic.add_copy(lane, source.nbytes)
        stream = self._streams[lane]
        if self._delays is not None:
            self._delays.on_stream(stream)
        with torch.cuda.stream(stream), torch.no_grad():
            destination.view(-1).copy_(source.view(-1), non_blocking=True)
        if source.nbytes >= _GAP_BYTES:
            self._leave_gap(stream, self._detours[lane])
        # Without a reference the caching allocator could give the device side to another tensor of the compute
        # stream, or the host side be unmapped, while this copy still uses it.
        on_device, on_host = self._open[lane]
        for tensor in (destination, source):
            (on_device if tensor.is_cuda else on_host).append(tensor)

    def _leave_gap(self, stream: torch.cuda.Stream, detour: torch.cuda.Stream) -> None:
        # A copy engine that has the next copy of a stream at hand does not look at other streams. The user's own
        # small copies, such as reading a loss, then wait for all of ours: 91 ms behind 4.8 GB, measured, against
        # 2.5 ms with this detour over another stream, which costs no throughput.
        away, back = torch.cuda.Event(), torch.cuda.Event()
        away.record(stream)
        detour.wait_event(away)
        back.record(detour)
        stream.wait_event(back)

    def host_task(
        self, task: HostTask, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """See :meth:`Engine.host_task`."""
        self._log.add(task)
        stream = self._streams[Lane.HOST]
        if not task.function_address:
            # Python code cannot run inside a host function: it would need the GIL, which this thread may
            # hold while it waits for the device.
            stream.synchronize()
            task.run()
            return
        if self._delays is not None:
            self._delays.on_host(self._launch)
        self._launch(task.function_address, task.argument_address)
        self._open[Lane.HOST][1].append(task)

    def _launch(self, function: int, argument: int) -> None:
        code = self._runtime.cudaLaunchHostFunc(self._streams[Lane.HOST].cuda_stream, function, argument)
        _check(code, "launching a host task")

    def check_tasks(self) -> None:
        """See :meth:`Engine.check_tasks`."""
        self._log.check()

    def synchronize(self) -> None:
        """See :meth:`Engine.synchronize`."""
        torch.cuda.current_stream(self.device).synchronize()
        for lane in SIDE_LANES:
            self._streams[lane].synchronize()
            self._open[lane] = ([], [])
            self._in_use[lane].clear()
        self._poll()
        self._log.check()
        self._log.clear()

    # Memory

    def empty_host(self, num_bytes: int, purpose: str, *, pinned: bool = True) -> Buffer:
        """See :meth:`Engine.empty_host`."""
        return _CudaHostBuffer(self, num_bytes, purpose, pinned)

    def empty_device(self, num_bytes: int, purpose: str) -> Buffer:
        """See :meth:`Engine.empty_device`."""
        return _CudaDeviceBuffer(self, num_bytes, purpose)

    def traffic(self) -> Traffic:
        """See :meth:`Engine.traffic`."""
        self._add_up_stalls()
        return dataclasses.replace(self._traffic)

    def _add_up_stalls(self) -> None:
        while self._stalls and self._stalls[0][1].query():
            before, after = self._stalls.popleft()
            self._traffic.stall_ms += before.elapsed_time(after)

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
        event.record(self._stream(lane))
        return event

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """See :meth:`Engine.elapsed_ms`."""
        return begin.elapsed_time(end)

    # Inside

    def _retire(self, after: Sequence[Event], kept_alive: object) -> None:
        self._retired.append((after, kept_alive))
        self._poll()

    def _poll(self) -> None:
        for in_use in self._in_use.values():
            while in_use and in_use[0].event.query():
                in_use.popleft()
        while self._retired and all(event.query() for event in self._retired[0][0]):
            kept_alive = self._retired.popleft()[1]
            if isinstance(kept_alive, HostSlab):
                kept_alive.close()


class _CudaHostBuffer(Buffer):
    def __init__(self, engine: CudaEngine, num_bytes: int, purpose: str, pinned: bool) -> None:
        self._slab = HostSlab(
            num_bytes,
            purpose=purpose,
            register=_register if pinned else None,
            unregister=_unregister if pinned else None,
            ledger=engine.ledger,
            numa_node=engine._numa_node,
        )
        self.tensor = self._slab.tensor
        self.purpose = purpose
        self._engine = engine

    def release(self, after: Sequence[Event] = ()) -> None:
        # The slab is unmapped only when the events have passed; a copy in flight would fault otherwise.
        self._engine._retire(after, self._slab)


class _CudaDeviceBuffer(Buffer):
    def __init__(self, engine: CudaEngine, num_bytes: int, purpose: str) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=engine.device)
        self.purpose = purpose
        self._engine = engine
        engine.ledger.add(Tier.DEVICE, purpose, num_bytes)
        self._unaccount = weakref.finalize(self, engine.ledger.remove, Tier.DEVICE, purpose, num_bytes)

    def release(self, after: Sequence[Event] = ()) -> None:
        assert self._unaccount.alive, f"{self.purpose}: buffer released twice"
        # Dropping the tensor gives its memory to the compute stream's next allocation, so it stays referenced
        # until no side stream uses it any more.
        if after:
            self._engine._retire(after, self.tensor)
        self._unaccount()
        del self.tensor


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
