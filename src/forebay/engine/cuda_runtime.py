"""The calls of the CUDA runtime that the engine makes, through ctypes on the library that torch has loaded.

A step makes hundreds of these calls, and each must cost little Python: handles are plain integers, and torch's own
wrappers (stream contexts, ``copy_``, event objects) are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.cuda import _gpu_trace

NOT_READY = 600  # cudaErrorNotReady
_DISABLE_TIMING = 2  # cudaEventDisableTiming
_CAPTURE_ACTIVE = 1  # cudaStreamCaptureStatusActive
CAPTURE_MODE_RELAXED = 2  # cudaStreamCaptureModeRelaxed
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind


class CudaRuntime:
    """The runtime's functions; each raises RuntimeError with the runtime's own text when it fails.

    Args:
        library: the runtime, or something with the same functions.
    """

    def __init__(self, library: Any) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._library = library

        def bind(name: str, *argument_types: Any) -> Callable[..., int]:
            function = getattr(library, name)
            function.argtypes, function.restype = argument_types, number
            return function

        self._last_error = bind("cudaGetLastError")
        library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = (number,), ctypes.c_char_p
        self._get_device = bind("cudaGetDevice", pointer)
        self._set_device = bind("cudaSetDevice", number)
        self._event_create = bind("cudaEventCreateWithFlags", pointer, ctypes.c_uint)
        self._event_destroy = bind("cudaEventDestroy", pointer)
        self._event_record = bind("cudaEventRecord", pointer, pointer)
        self._event_query = bind("cudaEventQuery", pointer)
        self._event_synchronize = bind("cudaEventSynchronize", pointer)
        self._event_elapsed = bind("cudaEventElapsedTime", pointer, pointer, pointer)
        self._stream_wait = bind("cudaStreamWaitEvent", pointer, pointer, ctypes.c_uint)
        self._stream_query = bind("cudaStreamQuery", pointer)
        self._stream_synchronize = bind("cudaStreamSynchronize", pointer)
        self._stream_is_capturing = bind("cudaStreamIsCapturing", pointer, pointer)
        self._memcpy = bind("cudaMemcpyAsync", pointer, pointer, size, number, pointer)
        self._launch = bind("cudaLaunchHostFunc", pointer, pointer, pointer)
        self._register = bind("cudaHostRegister", pointer, size, ctypes.c_uint)
        self._unregister = bind("cudaHostUnregister", pointer)
        self._exchange_capture_mode = bind("cudaThreadExchangeStreamCaptureMode", pointer)

    def _fail(self, code: int, what: str) -> None:
        self._last_error()  # clears the error, which would otherwise surface at torch's next call
        text = self._library.cudaGetErrorString(code).decode()
        raise RuntimeError(f"{what} failed: CUDA error {code} ({text})")

    def create_event(self, device: int, *, timing: bool = False) -> int:
        """Return the handle of a new event of a device, by its index."""
        handle, current = ctypes.c_void_p(), ctypes.c_int()
        code = self._get_device(ctypes.addressof(current))
        if not code and current.value != device:
            code = self._set_device(device)
        if not code:
            code = self._event_create(ctypes.addressof(handle), 0 if timing else _DISABLE_TIMING)
        if current.value != device:
            code = self._set_device(current.value) or code
        if code:
            self._fail(code, f"creating an event on device {device}")
        return handle.value or 0

    def destroy_event(self, event: int) -> None:
        """Give an event's handle back; waits for it that were enqueued remain."""
        self._event_destroy(event)

    def record(self, event: int, stream: int) -> None:
        """Let ``event`` pass when what is enqueued on ``stream`` has finished."""
        code = self._event_record(event, stream)
        if code:
            self._fail(code, "recording an event")

    def wait(self, stream: int, event: int) -> None:
        """Let ``stream`` go on only after ``event``."""
        code = self._stream_wait(stream, event, 0)
        if code:
            self._fail(code, "waiting for an event on a stream")

    def _is_ready(self, code: int, what: str) -> bool:
        if code == NOT_READY:
            self._last_error()  # the runtime remembers it as an error, which torch's next check would find
            return False
        if code:
            self._fail(code, what)
        return True

    def has_passed(self, event: int) -> bool:
        """Return whether an event has passed."""
        return self._is_ready(self._event_query(event), "asking for an event")

    def is_idle(self, stream: int) -> bool:
        """Return whether a stream has nothing left to do."""
        return self._is_ready(self._stream_query(stream), "asking for a stream")

    def synchronize_event(self, event: int) -> None:
        """Block until an event has passed."""
        code = self._event_synchronize(event)
        if code:
            self._fail(code, "waiting for an event")

    def synchronize_stream(self, stream: int) -> None:
        """Block until a stream is idle."""
        code = self._stream_synchronize(stream)
        if code:
            self._fail(code, "waiting for a stream")

    def elapsed_ms(self, before: int, after: int) -> float:
        """Return the time between two events that have passed and were made with ``timing``."""
        elapsed = ctypes.c_float()
        code = self._event_elapsed(ctypes.addressof(elapsed), before, after)
        if code:
            self._fail(code, "timing two events")
        return elapsed.value

    def is_capturing(self, stream: int) -> bool:
        """Return whether what is enqueued on ``stream`` goes into a CUDA graph."""
        status = ctypes.c_int()
        code = self._stream_is_capturing(stream, ctypes.byref(status))
        if code:
            self._fail(code, "asking whether a stream is being captured")
        return status.value == _CAPTURE_ACTIVE

    def copy(self, destination: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        """Enqueue a copy between the host and the device."""
        code = self._memcpy(destination, source, num_bytes, kind, stream)
        if code:
            self._fail(code, f"copying {num_bytes} bytes")

    def launch_host_function(self, stream: int, function: int, argument: int) -> None:
        """Enqueue a call of a C function."""
        code = self._launch(stream, function, argument)
        if code:
            self._fail(code, "launching a host task")

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin host memory."""
        with self._allowed_in_captures():
            code = self._register(address, num_bytes, 0)
        if code:
            self._fail(code, f"pinning {num_bytes / 2**30:.2f} GiB")

    def unregister_host(self, address: int) -> None:
        """Undo :meth:`register_host`."""
        with self._allowed_in_captures():
            code = self._unregister(address)
        if code:
            # What is mapped here next could not be pinned.
            self._fail(code, "unpinning")

    @contextlib.contextmanager
    def _allowed_in_captures(self) -> Iterator[None]:
        # The garbage collector may free a slab at any time, such as while somebody captures a graph. Then the runtime
        # would refuse, and break the capture, unless this thread says that it knows what it is doing.
        mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
        self._exchange_capture_mode(ctypes.addressof(mode))
        try:
            yield
        finally:
            self._exchange_capture_mode(ctypes.addressof(mode))


class TracedRuntime(CudaRuntime):
    """A runtime that reports to ``TORCH_CUDA_SANITIZER`` what torch would report of its own events."""

    def create_event(self, device: int, *, timing: bool = False) -> int:
        """See :meth:`CudaRuntime.create_event`."""
        event = super().create_event(device, timing=timing)
        _gpu_trace.EventCreationCallbacks.fire_callbacks(event)
        return event

    def destroy_event(self, event: int) -> None:
        """See :meth:`CudaRuntime.destroy_event`."""
        _gpu_trace.EventDeletionCallbacks.fire_callbacks(event)
        super().destroy_event(event)

    def record(self, event: int, stream: int) -> None:
        """See :meth:`CudaRuntime.record`."""
        super().record(event, stream)
        _gpu_trace.EventRecordCallbacks.fire_callbacks(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """See :meth:`CudaRuntime.wait`."""
        super().wait(stream, event)
        _gpu_trace.EventWaitCallbacks.fire_callbacks(event, stream)

    def synchronize_event(self, event: int) -> None:
        """See :meth:`CudaRuntime.synchronize_event`."""
        super().synchronize_event(event)
        _gpu_trace.EventSynchronizationCallbacks.fire_callbacks(event)

    def synchronize_stream(self, stream: int) -> None:
        """See :meth:`CudaRuntime.synchronize_stream`."""
        super().synchronize_stream(stream)
        _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(stream)


def sanitizer_is_on() -> bool:
    """Return whether torch's CUDA sanitizer watches this process."""
    sanitizer = sys.modules.get("torch.cuda._sanitizer")
    return sanitizer is not None and bool(sanitizer.cuda_sanitizer.enabled)


@functools.cache
def loaded_runtime() -> CudaRuntime:
    """Return the runtime that torch has loaded into this process."""
    kind = TracedRuntime if sanitizer_is_on() else CudaRuntime
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if "libcudart" in Path(path).name:
            return kind(ctypes.CDLL(path))
    raise RuntimeError("the CUDA runtime (libcudart) is not loaded in this process; install a CUDA build of torch")
