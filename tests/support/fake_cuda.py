"""A CUDA runtime that carries nothing out and checks how it is called, by the rules of stream capture."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import torch

from forebay.engine import Lane
from forebay.engine.cuda import CudaEngine
from forebay.engine.cuda_runtime import CAPTURE_MODE_RELAXED, NOT_READY, CudaRuntime

COMPUTE = 100
STREAMS = {Lane.DOWN: 101, Lane.HOST: 102, Lane.UP: 103}
DETOURS = {Lane.DOWN: 104, Lane.UP: 105}
CAPTURE_ISOLATION, CAPTURE_UNSUPPORTED, CAPTURED_EVENT, UNJOINED = 905, 900, 907, 904


class _Function:
    """A function of the library; ctypes' attributes can be set on it."""

    def __init__(self, call):
        self._call = call
        self.argtypes = self.restype = None

    def __call__(self, *arguments):
        return self._call(*arguments)


@dataclasses.dataclass
class _Recorded:
    """What an event stands for: how much of each stream's work, and the capture it is part of."""

    seen: dict[int, int]
    capture: int


def _at(address, kind):
    return kind.from_address(address.value if hasattr(address, "value") else address)


class FakeCuda:
    """The library: streams are numbers, work is counted, and a wait for what is not captured is an error.

    Attributes:
        calls: names of the functions called, with their arguments.
        captured_copies: addresses of the copies that the last capture holds.
    """

    def __init__(self):
        self.calls = []
        self.done = set()  # events that have passed
        self.capture_mode = 0  # of the calling thread
        self.captures = {}  # stream -> number of the capture it is part of
        self._origin = 0
        self._seen = {}  # stream -> what it comes after
        self._work = {}  # stream -> work enqueued
        self._events = {}
        self._numbers = itertools.count(1)
        self._num_captures = 0

    def __getattr__(self, name):
        if not name.startswith("cuda"):
            raise AttributeError(name)
        function = _Function(getattr(self, "_" + name[4:]))
        setattr(self, name, function)
        return function

    @property
    def runtime(self):
        return CudaRuntime(self)

    def count(self, name):
        return sum(call[0] == name for call in self.calls)

    # Captures

    def begin_capture(self, stream):
        self._num_captures += 1
        self._origin = stream
        self.captures[stream] = self._num_captures

    def end_capture(self):
        """Return 0, or the code of what is wrong with the capture."""
        number = self.captures[self._origin]
        members = [stream for stream, capture in self.captures.items() if capture == number]
        seen = self._seen.get(self._origin, {})
        joined = all(seen.get(s, 0) >= self._work.get(s, 0) for s in members if s != self._origin)
        for stream in members:
            del self.captures[stream]
        return 0 if joined else UNJOINED

    # The functions

    def _enqueue(self, stream):
        self._work[stream] = self._work.get(stream, 0) + 1
        self._seen.setdefault(stream, {})[stream] = self._work[stream]

    def _GetLastError(self):
        return 0

    def _GetErrorString(self, code):
        return f"code {code}".encode()

    def _GetDevice(self, address):
        _at(address, ctypes.c_int).value = 0
        return 0

    def _SetDevice(self, device):
        return 0

    def _EventCreateWithFlags(self, address, flags):
        _at(address, ctypes.c_void_p).value = event = next(self._numbers)
        self.calls.append(("create", event))
        return 0

    def _EventDestroy(self, event):
        self._events.pop(event, None)
        self.calls.append(("destroy", event))
        return 0

    def _EventRecord(self, event, stream):
        self.calls.append(("record", event, stream))
        self._events[event] = _Recorded(dict(self._seen.get(stream, {})), self.captures.get(stream, 0))
        self.done.discard(event)
        return 0

    def _EventQuery(self, event):
        self.calls.append(("query", event))
        if self.captures:
            return CAPTURE_UNSUPPORTED
        if self._events[event].capture:
            return CAPTURED_EVENT
        return 0 if event in self.done else NOT_READY

    def _EventSynchronize(self, event):
        self.calls.append(("synchronize event", event))
        if self.captures:
            return CAPTURE_UNSUPPORTED
        return CAPTURED_EVENT if self._events[event].capture else 0

    def _EventElapsedTime(self, address, before, after):
        _at(address, ctypes.c_float).value = 1.5
        return CAPTURE_UNSUPPORTED if self.captures else 0

    def _StreamWaitEvent(self, stream, event, flags):
        self.calls.append(("wait", stream, event))
        recorded = self._events[event]
        own = self.captures.get(stream, 0)
        if own and recorded.capture != own:
            return CAPTURE_ISOLATION
        if recorded.capture and recorded.capture not in self.captures.values():
            return CAPTURED_EVENT
        if recorded.capture and not own:
            self.captures[stream] = recorded.capture  # this is how a stream becomes part of a capture
        self._enqueue(stream)
        seen = self._seen[stream]
        for other, work in recorded.seen.items():
            seen[other] = max(seen.get(other, 0), work)
        return 0

    def _StreamQuery(self, stream):
        return CAPTURE_UNSUPPORTED if self.captures else 0

    def _StreamSynchronize(self, stream):
        self.calls.append(("synchronize stream", stream))
        return CAPTURE_UNSUPPORTED if self.captures else 0

    def _StreamIsCapturing(self, stream, reference):
        reference._obj.value = int(stream in self.captures)
        return 0

    def _MemcpyAsync(self, destination, source, num_bytes, kind, stream):
        self.calls.append(("copy", destination, source, num_bytes, kind, stream, self.captures.get(stream, 0)))
        self._enqueue(stream)
        return 0

    def _LaunchHostFunc(self, stream, function, argument):
        self.calls.append(("launch", stream, function, argument, self.captures.get(stream, 0)))
        self._enqueue(stream)
        return 0

    def _HostRegister(self, address, num_bytes, flags):
        return self._unless_captured()

    def _HostUnregister(self, address):
        return self._unless_captured()

    def _unless_captured(self):
        return CAPTURE_UNSUPPORTED if self.captures and self.capture_mode != CAPTURE_MODE_RELAXED else 0

    def _ThreadExchangeStreamCaptureMode(self, address):
        mode = ctypes.c_int.from_address(address)
        self.capture_mode, mode.value = mode.value, self.capture_mode
        return 0


class FakeCudaEngine(CudaEngine):
    """The CUDA engine on a runtime that carries nothing out, for tensors on the CPU."""

    def __init__(self, cuda, current_stream):
        self.device = torch.device("cpu")
        self.numa_node = None
        self._set_up(cuda.runtime, current_stream, STREAMS, DETOURS)

    def take_peak_bytes(self):
        assert not self.capturing, "memory of a capture is not that of a step"
        return 0


class EngineOnFake:
    """An engine and what it calls; ``stream`` is the one the caller is on."""

    def __init__(self):
        self.cuda = FakeCuda()
        self.stream = COMPUTE
        self.engine = FakeCudaEngine(self.cuda, lambda: self.stream)
        self.cuda.calls.clear()
