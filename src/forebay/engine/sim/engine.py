"""The adversarial simulator: an engine on the CPU that makes missing synchronisation visible.

Work on the side lanes is queued and executed as late as the declared events allow, in an order drawn from
the seed, so code that forgets a wait computes with stale or poisoned data. Independently, vector clocks
check every access against what was declared and raise :class:`RaceError` at the offending call. Both tiers
are CPU memory; the ledger tells them apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from forebay.engine.base import SIDE_LANES, Buffer, Engine, Event, HostTask, Lane, TaskLog, Traffic
from forebay.engine.observe import Span
from forebay.engine.sim.clocks import PYTHON, Clock, Clocks, RaceError, ShadowMemory
from forebay.engine.sim.graph import GraphEvent, GraphLane, SimGraph
from forebay.engine.sim.watch import WatchMode
from forebay.host.ledger import Ledger, Tier
from forebay.host.limits import DEFAULT_SETTING_HINT, check_host_memory

_Queue = Lane | GraphLane
_QUEUES: tuple[_Queue, ...] = (*SIDE_LANES, *GraphLane)
_POISON_BYTE = 0xFF  # NaN in fp32, bf16 and fp16, and -1 in every integer


@dataclasses.dataclass
class _Work:
    run: Callable[[], None] | None
    wait_for: SimEvent | None
    span: Span | None = None


class SimEvent:
    """A point on a simulated lane."""

    def __init__(self, engine: SimEngine, lane: _Queue, position: int, clock: Clock) -> None:
        self._engine = engine
        self.lane = lane
        self.position = position
        self.clock = clock

    def query(self) -> bool:
        """Return whether the event has passed; a True orders what Python does next after it."""
        passed = self._engine._done[self.lane] >= self.position
        if passed:
            self._engine._clocks.join(PYTHON, self.clock)
        return passed

    def synchronize(self) -> None:
        """Run what the event stands for, if it has not run yet."""
        self._engine._finish(self)
        self._engine._clocks.join(PYTHON, self.clock)


class SimEngine(Engine):
    """An engine whose lanes are queues on the CPU.

    Args:
        seed: draws when queued work runs. Seed 0 runs everything as late as possible, other seeds let some
            of it run early.
        device: the device tier's device, CPU by default.
        checked: check every access and fill fresh and released memory with NaN. Default True; off for plain
            training on a CPU, where it would only cost time.
    """

    kind = "sim"

    def __init__(self, seed: int = 0, device: torch.device | None = None, *, checked: bool = True) -> None:
        self.device = torch.device("cpu") if device is None else device
        self.ledger = Ledger()
        self.seed = seed
        self._checked = checked
        self._random = random.Random(seed)
        self._early = 0.0 if seed == 0 else self._random.choice([0.05, 0.3, 0.8])
        self._queues: dict[_Queue, deque[_Work]] = {lane: deque() for lane in _QUEUES}
        self._enqueued: dict[_Queue, int] = dict.fromkeys((Lane.COMPUTE, *_QUEUES), 0)
        self._done: dict[_Queue, int] = dict.fromkeys((Lane.COMPUTE, *_QUEUES), 0)
        self._graph: SimGraph | None = None  # the one that is being captured
        self._launching = False
        self._clocks = Clocks()
        self._shadow = ShadowMemory()
        self._host_storages: set[int] = set()
        self._log = TaskLog()
        self._traffic = Traffic()
        self._span: Span | None = None  # of the work that is enqueued next

    # Captures

    @property
    def capturing(self) -> bool:
        """See :attr:`Engine.capturing`."""
        return self._graph is not None

    @contextlib.contextmanager
    def capture(self) -> Iterator[SimGraph]:
        """Record what is enqueued in the block, torch operations included, like ``torch.cuda.graph``.

        Raises:
            RuntimeError: if work on a side lane was not joined to the compute lane.
        """
        self.synchronize()  # as torch.cuda.graph does
        graph = self._graph = SimGraph(self)
        try:
            with graph.mode:
                yield graph
        finally:
            self._graph = None
        graph.check_joined()

    @contextlib.contextmanager
    def _lanes_of_a_graph(self) -> Iterator[None]:
        self._launching = True
        try:
            yield
        finally:
            self._launching = False

    def _queue(self, lane: Lane) -> _Queue:
        return GraphLane[lane.name] if self._launching and lane is not Lane.COMPUTE else lane

    def _refuse_in_capture(self, what: str) -> None:
        if self.capturing:
            raise RuntimeError(f"{what} while a graph is being captured; do it before or after the capture")

    # Lanes and events

    def record(self, lane: Lane) -> Event:
        """See :meth:`Engine.record`."""
        if self._graph is not None:
            return self._graph.record(lane)
        return self._record(lane)

    def _record(self, lane: Lane) -> SimEvent:
        self._perturb()
        queue = self._queue(lane)
        self._clocks.join(queue.value, self._clocks.snapshot(PYTHON))
        return SimEvent(self, queue, self._enqueued[queue], self._clocks.snapshot(queue.value))

    def wait(self, lane: Lane, event: Event) -> None:
        """See :meth:`Engine.wait`. The compute lane runs eagerly, so its wait runs the queued work now."""
        if self._graph is not None:
            self._graph.wait(lane, event)
            return
        if isinstance(event, GraphEvent):
            event = self._record(Lane.COMPUTE)  # launches are there
        assert isinstance(event, SimEvent)
        self._perturb()
        queue = self._queue(lane)
        self._clocks.join(queue.value, event.clock)
        if lane is Lane.COMPUTE:
            self._finish(event)
        else:
            self._enqueue(queue, _Work(None, event))

    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor, *, speculative: bool = False) -> None:
        """See :meth:`Engine.copy`."""
        assert lane in (Lane.DOWN, Lane.UP), lane
        assert destination.dtype == source.dtype, (destination.dtype, source.dtype)
        assert destination.numel() == source.numel(), (destination.shape, source.shape)
        assert destination.is_contiguous()
        assert source.is_contiguous()
        if self._graph is not None:
            self._graph.copy(lane, destination, source, speculative=speculative)
            return
        label, queue = f"copy {lane.value}", self._queue(lane)
        self._clocks.join(queue.value, self._clocks.snapshot(PYTHON))
        # A speculative read must come after the writes before it, but nothing has to come after it.
        self._access(source, queue.value, is_write=False, label=label, remember=not speculative)
        self._access(destination, queue.value, is_write=True, label=label)
        self._traffic.add_copy(lane, source.nbytes)
        target, origin = destination.detach().view(-1), source.detach().view(-1)

        def run() -> None:
            target.copy_(origin)

        self._enqueue(queue, _Work(run, None))
        self._perturb()

    def host_task(
        self, task: HostTask, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """See :meth:`Engine.host_task`."""
        self._log.add(task, captured=self.capturing)
        if self._graph is not None:
            self._graph.host_task(task, reads, writes)
            return
        queue = self._queue(Lane.HOST)
        self._order(queue, task.label, reads, writes)
        if task.function_address:
            self._enqueue(queue, _Work(task.run, None))
            self._perturb()
            return
        # Python code runs in this call: it comes after the lane's past, and the lane's future after it.
        self._drain(Lane.HOST)
        self._clocks.join(PYTHON, self._clocks.snapshot(Lane.HOST.value))
        if self._span is not None:
            self._span.begin = time.perf_counter()
        task.run()
        self._clocks.join(Lane.HOST.value, self._clocks.snapshot(PYTHON))

    def declare(self, label: str, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()) -> None:
        """See :meth:`Engine.declare`."""
        if self._graph is not None:
            self._graph.declare(label, reads, writes)
            return
        self._order(Lane.COMPUTE, label, reads, writes)

    def check_tasks(self) -> None:
        """See :meth:`Engine.check_tasks`."""
        self._log.check()

    def synchronize(self) -> None:
        """See :meth:`Engine.synchronize`."""
        self._refuse_in_capture("synchronizing the engine")
        lanes = list(SIDE_LANES)
        self._random.shuffle(lanes)
        for lane in lanes:
            self._drain(lane)
        for lane in Lane:
            self._clocks.join(PYTHON, self._clocks.snapshot(lane.value))
        self._log.check()
        self._log.clear()

    def compute_stream(self) -> int:
        """See :meth:`Engine.compute_stream`; there is one."""
        return 0

    # Memory

    def empty_host(
        self, num_bytes: int, purpose: str, *, pinned: bool = True, setting_hint: str = DEFAULT_SETTING_HINT
    ) -> Buffer:
        """See :meth:`Engine.empty_host`; both kinds are plain CPU memory here."""
        self._refuse_in_capture(f"allocating host memory for {purpose}")
        check_host_memory(num_bytes, purpose=purpose, pinned=pinned, setting_hint=setting_hint)
        return _SimBuffer(self, num_bytes, purpose, Tier.PINNED if pinned else Tier.PAGEABLE)

    def empty_device(self, num_bytes: int, purpose: str) -> Buffer:
        """See :meth:`Engine.empty_device`."""
        return _SimBuffer(self, num_bytes, purpose, Tier.DEVICE)

    def traffic(self) -> Traffic:
        """See :meth:`Engine.traffic`; nothing stalls here."""
        return dataclasses.replace(self._traffic)

    def take_peak_bytes(self) -> int:
        """See :meth:`Engine.take_peak_bytes`; drawn from the seed, since nothing else uses device memory here.

        Code that decides by memory so takes a different course under every seed.
        """
        return self._random.randrange(1 << 17)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Check the torch operations in the block too: device memory on the compute lane, host memory on Python."""
        mode = WatchMode(self._before_operation, self._check_operation)
        with mode:
            yield

    # Observation

    def begin_span(self, span: Span) -> None:
        """See :meth:`Engine.begin_span`."""
        span.begin = time.perf_counter()
        if span.lane is not Lane.COMPUTE:
            self._span = span

    def end_span(self, span: Span) -> None:
        """See :meth:`Engine.end_span`; what was queued sets both ends itself, when it runs."""
        if span.lane is Lane.COMPUTE:
            span.end = time.perf_counter()
        elif self._span is span:  # it was not queued
            span.end = time.perf_counter()
            self._span = None

    def elapsed_ms(self, begin: float, end: float) -> float:
        """See :meth:`Engine.elapsed_ms`."""
        return 1000 * (end - begin)

    # Inside

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host_storages

    def _order(self, queue: _Queue, label: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        self._clocks.join(queue.value, self._clocks.snapshot(PYTHON))
        for tensor in reads:
            self._access(tensor, queue.value, is_write=False, label=label)
        for tensor in writes:
            self._access(tensor, queue.value, is_write=True, label=label)

    def _access(self, tensor: torch.Tensor, actor: str, *, is_write: bool, label: str, remember: bool = True) -> None:
        if not self._checked:
            return
        time = self._clocks.tick(actor)
        self._shadow.access(
            tensor,
            actor=actor,
            time=time,
            clock=self._clocks.snapshot(actor),
            is_write=is_write,
            label=label,
            remember=remember,
        )

    def _before_operation(self, label: str, tensors: list[torch.Tensor]) -> None:
        hosts = {self._is_on_host(tensor) for tensor in tensors}
        compute = Lane.COMPUTE.value
        if hosts == {True, False} or "_local_scalar_dense" in label:
            # torch's own copies between tiers, and reading a value, block Python until the compute lane is
            # idle.
            self._clocks.join(PYTHON, self._clocks.snapshot(compute))
        self._clocks.join(compute, self._clocks.snapshot(PYTHON))

    def _check_operation(self, tensor: torch.Tensor, is_write: bool, label: str) -> None:
        actor = PYTHON if self._is_on_host(tensor) else Lane.COMPUTE.value
        self._access(tensor, actor, is_write=is_write, label=label)

    def _enqueue(self, queue: _Queue, work: _Work) -> None:
        work.span, self._span = self._span, None
        self._queues[queue].append(work)
        self._enqueued[queue] += 1

    def _perturb(self) -> None:
        while self._random.random() < self._early:
            ready = [queue for queue in _QUEUES if self._queues[queue]]
            if not ready:
                return
            self._run_one(self._random.choice(ready))

    def _run_one(self, queue: _Queue) -> None:
        work = self._queues[queue].popleft()
        begin = time.perf_counter()
        if work.wait_for is not None:
            self._finish(work.wait_for)
        if work.run is not None:
            # It was checked when it was enqueued, on its own lane; a watch that happens to be active now must
            # not charge it to another.
            with _no_watch(), torch.no_grad():
                work.run()
        self._done[queue] += 1
        if work.span is not None:
            work.span.begin, work.span.end = begin, time.perf_counter()

    def _finish(self, event: SimEvent) -> None:
        if event.lane is Lane.COMPUTE:
            return
        while self._done[event.lane] < event.position:
            self._run_one(event.lane)

    def _drain(self, lane: Lane) -> None:
        while self._queues[lane]:
            self._run_one(lane)


@contextlib.contextmanager
def _no_watch() -> Iterator[None]:
    with _disable_current_modes():
        yield


class _SimBuffer(Buffer):
    def __init__(self, engine: SimEngine, num_bytes: int, purpose: str, tier: Tier) -> None:
        # Allocating is not an access, on neither tier.
        with _no_watch():
            self.tensor = torch.full((num_bytes,), _POISON_BYTE if engine._checked else 0, dtype=torch.uint8)
        self.purpose = purpose
        self._engine = engine
        self._tier = tier
        self._released = False
        self._graph = engine._graph
        if self._graph is not None:
            self._graph.call(self._poison)  # every launch finds other values in it
        self._key = self.tensor.untyped_storage()._cdata
        if tier is not Tier.DEVICE:
            engine._host_storages.add(self._key)
        elif engine._checked:
            # The allocator may hand out what kernels enqueued earlier still use: a side lane that touches it first
            # must come after them.
            engine._order(Lane.COMPUTE, f"allocation of {purpose}", (), [self.tensor])
        engine.ledger.add(tier, purpose, num_bytes)
        self._unaccount = weakref.finalize(self, engine.ledger.remove, tier, purpose, num_bytes)

    def _poison(self) -> None:
        if self._engine._checked:
            with _no_watch():
                self.tensor.fill_(_POISON_BYTE)

    def release(self, after: Sequence[Event] = ()) -> None:
        assert not self._released, f"{self.purpose}: buffer released twice"
        self._released = True
        self._unaccount()
        if self._graph is None:
            self._release(after)
            self._engine._host_storages.discard(self._key)
            self._engine._shadow.forget(self.tensor)
        elif self._graph is self._engine._graph:
            # Later in the graph its memory is used for something else; between launches it is the graph's own.
            self._graph.release(self._release, after)

    def _release(self, after: Sequence[Event]) -> None:
        engine = self._engine
        # Freed device memory is next used on the compute lane, freed host memory by Python: whoever used it
        # before must be ordered before that.
        actor = Lane.COMPUTE.value if self._tier is Tier.DEVICE else PYTHON
        clock = engine._clocks.snapshot(actor)
        merged = Clocks()
        merged.join(actor, clock)
        merged.join(actor, engine._clocks.snapshot(PYTHON))
        for event in after:
            if isinstance(event, GraphEvent):
                event = engine._record(Lane.COMPUTE)
            assert isinstance(event, SimEvent)
            merged.join(actor, event.clock)
            engine._finish(event)
        if engine._checked:
            engine._shadow.access(
                self.tensor,
                actor=actor,
                time=engine._clocks.tick(actor),
                clock=merged.snapshot(actor),
                is_write=True,
                label=f"release of {self.purpose}",
            )
            self._poison()


__all__ = ["RaceError", "SimEngine", "SimEvent"]
