"""What every engine offers: lanes, events, copies, host tasks and buffers.

An engine moves bytes and orders work. It knows nothing about optimizers, layers or models; those are
built on top of it and never touch a stream themselves.

Lanes are queues. Work on one lane runs in the order it was enqueued; work on two lanes runs in any order
unless an event orders it. The ``COMPUTE`` lane is whatever stream the caller is on when it calls (looked up
at use, never stored), so forward, backward and update kernels need no engine call at all.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from forebay.host.limits import DEFAULT_SETTING_HINT

if TYPE_CHECKING:
    from forebay.engine.observe import Span
    from forebay.host.ledger import Ledger


class Lane(enum.Enum):
    """A queue of work.

    ``COMPUTE`` is the stream the caller is on. ``DOWN`` copies device to host, ``HOST`` runs host tasks and
    ``UP`` copies host to device.
    """

    COMPUTE = "compute"
    DOWN = "down"
    HOST = "host"
    UP = "up"

    # Lanes are keys in every engine call, and the hash of enum members is Python code.
    __hash__ = object.__hash__


SIDE_LANES = (Lane.DOWN, Lane.HOST, Lane.UP)

PYTHON_TASK_IN_GRAPH = (
    "host task {!r} is Python code, which a CUDA graph cannot hold; capture a step of forebay.AdamW with the native "
    "host kernels (kernels.backend() is not 'torch') or with placement='streamed'"
)


class Event(Protocol):
    """A point on a lane that other lanes, or the Python thread, can wait for."""

    def query(self) -> bool:
        """Return True when all work before the event has finished. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the Python thread until all work before the event has finished."""
        ...


class HostTask(Protocol):
    """Work for the ``HOST`` lane: a native function and its argument, or a Python callable.

    ``function_address`` is the address of a C function ``void (*)(void *)`` and ``argument_address`` what it
    is called with; both are 0 for a task that is Python code. ``run()`` does the same work from Python.
    ``status()`` is 0 when all runs so far went well. ``label`` names the task in errors and traces.
    """

    label: str
    function_address: int
    argument_address: int

    def run(self) -> None:
        """Do the work in this thread."""

    def status(self) -> int:
        """Return 0 when all runs so far went well."""


class HostTaskError(RuntimeError):
    """A host task failed; the message names it."""


@dataclasses.dataclass
class Traffic:
    """What an engine has moved since it was made.

    Attributes:
        down_bytes: copied from the device to the host.
        up_bytes: copied from the host to the device.
        stall_ms: how long the compute lane has waited for side lanes, as far as it is known by now.
    """

    down_bytes: int = 0
    up_bytes: int = 0
    stall_ms: float = 0.0

    def add_copy(self, lane: Lane, num_bytes: int) -> None:
        """Count a copy."""
        if lane is Lane.DOWN:
            self.down_bytes += num_bytes
        else:
            self.up_bytes += num_bytes


def check_task(task: HostTask) -> None:
    """Raise :class:`HostTaskError`, naming ``task``, if it has failed; from the exception, if it raised one."""
    status = task.status()
    if status:
        raise HostTaskError(
            f"host task {task.label!r} failed with status {status}; what it was updating may be half written, so "
            "reload the last checkpoint before going on"
        ) from getattr(task, "error", None)


class TaskLog:
    """The host tasks enqueued since the last full synchronisation, to be asked how they went."""

    def __init__(self) -> None:
        self._tasks: dict[int, HostTask] = {}
        self._captured: dict[int, HostTask] = {}

    def add(self, task: HostTask, *, captured: bool = False) -> None:
        """Remember ``task`` (once, however often it is enqueued); for good if a graph may run it at any time."""
        (self._captured if captured else self._tasks)[id(task)] = task

    def check(self) -> None:
        """Raise :class:`HostTaskError` for the first task that failed."""
        for task in (*self._tasks.values(), *self._captured.values()):
            check_task(task)

    def clear(self) -> None:
        """Forget all tasks but those of graphs; call only when every lane is idle."""
        self._tasks.clear()


class Buffer(abc.ABC):
    """Memory handed out by an engine.

    Attributes:
        tensor: the memory as a flat ``uint8`` tensor.
        purpose: what it holds, a word of the ledger such as ``"optimizer_state"``.
    """

    tensor: torch.Tensor
    purpose: str

    def view(self, dtype: torch.dtype, num_elements: int, offset_bytes: int = 0) -> torch.Tensor:
        """Return ``num_elements`` of ``dtype`` that start ``offset_bytes`` into the buffer, as a view."""
        end = offset_bytes + num_elements * dtype.itemsize
        assert 0 <= offset_bytes <= end <= self.tensor.numel(), (offset_bytes, end, self.tensor.numel())
        return self.tensor[offset_bytes:end].view(dtype)

    @abc.abstractmethod
    def release(self, after: Sequence[Event] = ()) -> None:
        """Give the memory back once every event of ``after`` has passed.

        The caller must have ordered all other use of the buffer before this call; the simulator checks it.
        """


class Engine(abc.ABC):
    """Lanes, events, copies, host tasks and buffers of one device.

    Attributes:
        kind: ``"cuda"`` or ``"sim"``.
        device: where the device tier lives.
        ledger: bytes in use per tier and purpose.
    """

    kind: str
    device: torch.device
    ledger: Ledger

    @property
    @abc.abstractmethod
    def capturing(self) -> bool:
        """Whether what is enqueued now goes into a graph instead of being carried out.

        While it does, waits for events recorded before are left out, no event may be asked for or waited for in
        Python, and no host memory can be allocated. A launch of the graph comes after everything enqueued on the
        compute lane, the launch before included, and before what is enqueued there later. To later work on a side
        lane, an event recorded in the capture stands for all launches so far.
        """

    @abc.abstractmethod
    def record(self, lane: Lane) -> Event:
        """Return an event that passes when all work enqueued on ``lane`` so far has finished."""

    @abc.abstractmethod
    def wait(self, lane: Lane, event: Event) -> None:
        """Let work enqueued on ``lane`` from now on start only after ``event``. Never blocks Python."""

    def join(self) -> None:
        """Let the compute lane wait for all work enqueued on the side lanes so far.

        The last call in a capture: what is not joined to the compute lane cannot be part of a graph. And the last
        one before a launch that follows work outside of the graph, which the launch would not wait for otherwise.
        """
        for lane in SIDE_LANES:
            self.wait(Lane.COMPUTE, self.record(lane))

    @abc.abstractmethod
    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor, *, speculative: bool = False) -> None:
        """Enqueue a copy between the tiers on ``DOWN`` or ``UP``.

        Both tensors are contiguous and of equal dtype and number of elements. The engine keeps both alive
        until the copy is done; ordering it against other lanes is the caller's.

        Args:
            lane: where to enqueue it.
            destination: what is written.
            source: what is read.
            speculative: the source may be overwritten while it is read; the caller will notice, and not use
                what arrived.
        """

    @abc.abstractmethod
    def host_task(
        self, task: HostTask, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """Enqueue ``task`` on the ``HOST`` lane. ``reads`` and ``writes`` are the host memory it touches.

        A native task runs without Python and without the GIL. A Python task runs in this call, after the
        work enqueued on ``HOST`` before it (so it never overlaps with Python code).
        """

    def declare(  # noqa: B027 - nothing to do unless the engine checks accesses
        self, label: str, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """Declare what a compute-lane kernel touches that torch's dispatcher does not see.

        The simulator checks it like any other access; elsewhere it costs nothing.
        """

    @abc.abstractmethod
    def check_tasks(self) -> None:
        """Raise :class:`HostTaskError`, naming the task, if a host task that has run by now failed."""

    @abc.abstractmethod
    def compute_stream(self) -> int:
        """Return a number that tells the stream that ``COMPUTE`` stands for now from others."""

    @abc.abstractmethod
    def empty_host(
        self, num_bytes: int, purpose: str, *, pinned: bool = True, setting_hint: str = DEFAULT_SETTING_HINT
    ) -> Buffer:
        """Allocate host memory of exactly ``num_bytes``, pinned unless ``pinned`` is False.

        Raises ``forebay.host.HostMemoryError`` before anything is allocated when it cannot fit; ``setting_hint``
        is what it tells the user to do then.
        """

    @abc.abstractmethod
    def empty_device(self, num_bytes: int, purpose: str) -> Buffer:
        """Allocate device memory on the ``COMPUTE`` lane."""

    @abc.abstractmethod
    def traffic(self) -> Traffic:
        """Return what has been moved so far. Never blocks."""

    @abc.abstractmethod
    def take_peak_bytes(self) -> int:
        """Return the most device memory in use, all of it, since the last call, and start a new peak.

        Resets the peak that ``torch.cuda.max_memory_allocated`` reports.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block Python until every lane is idle, then :meth:`check_tasks`."""

    # Observation, see forebay.engine.observe

    @abc.abstractmethod
    def begin_span(self, span: Span) -> None:
        """Set ``span.begin`` to when ``span.lane`` gets to what is enqueued on it next."""

    @abc.abstractmethod
    def end_span(self, span: Span) -> None:
        """Set ``span.end`` to when ``span.lane`` is done with what was enqueued since :meth:`begin_span`."""

    @abc.abstractmethod
    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Return the time between two points of spans; call it after :meth:`synchronize`."""
