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
from forebay.engine.sim.watch import WatchMode
from forebay.host.ledger import Ledger, Tier
from forebay.host.limits import check_host_memory

_POISON_BYTE = 0xFF  # NaN in fp32, bf16 and fp16, and -1 in every integer


@dataclasses.dataclass
class _Work:
    run: Callable[[], None] | None
    wait_for: SimEvent | None
    span: Span | None = None


class SimEvent:
    """A point on a simulated lane."""

    def __init__(self, engine: SimEngine, lane: Lane, position: int, clock: Clock) -> None:
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
        self._queues: dict[Lane, deque[_Work]] = {lane: deque() for lane in SIDE_LANES}
        self._enqueued = dict.fromkeys(Lane, 0)
        self._done = dict.fromkeys(Lane, 0)
        self._clocks = Clocks()
        self._shadow = ShadowMemory()
        self._host_storages: set[int] = set()
        self._log = TaskLog()
        self._traffic = Traffic()
        self._span: Span | None = None  # of the work that is enqueued next

    # Lanes and events

    def record(self, lane: Lane) -> SimEvent:
        """See :meth:`Engine.record`."""
        self._perturb()
        self._clocks.join(lane.value, self._clocks.snapshot(PYTHON))
        return SimEvent(self, lane, self._enqueued[lane], self._clocks.snapshot(lane.value))

    def wait(self, lane: Lane, event: Event) -> None:
        """See :meth:`Engine.wait`. The compute lane runs eagerly, so its wait runs the queued work now."""
        assert isinstance(event, SimEvent)
        self._perturb()
        self._clocks.join(lane.value, event.clock)
        if lane is Lane.COMPUTE:
            self._finish(event)
        else:
            self._enqueue(lane, _Work(None, event))

    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor, *, speculative: bool = False) -> None:
        """See :meth:`Engine.copy`."""
        assert lane in (Lane.DOWN, Lane.UP), lane
        assert destination.dtype == source.dtype, (destination.dtype, source.dtype)
        assert destination.numel() == source.numel(), (destination.shape, source.shape)
        assert destination.is_contiguous()
        assert source.is_contiguous()
        label = f"copy {lane.value}"
        self._clocks.join(lane.value, self._clocks.snapshot(PYTHON))
        # A speculative read must come after the writes before it, but nothing has to come after it.
        self._access(source, lane.value, is_write=False, label=label, remember=not speculative)
        self._access(destination, lane.value, is_write=True, label=label)
        self._traffic.add_copy(lane, source.nbytes)
        target, origin = destination.detach().view(-1), source.detach().view(-1)

        def run() -> None:
            target.copy_(origin)

        self._enqueue(lane, _Work(run, None))
        self._perturb()

    def host_task(
        self, task: HostTask, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """See :meth:`Engine.host_task`."""
        self._log.add(task)
        self._order(Lane.HOST, task.label, reads, writes)
        if task.function_address:
            self._enqueue(Lane.HOST, _Work(task.run, None))
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
        self._order(Lane.COMPUTE, label, reads, writes)

    def check_tasks(self) -> None:
        """See :meth:`Engine.check_tasks`."""
        self._log.check()

    def synchronize(self) -> None:
        """See :meth:`Engine.synchronize`."""
        lanes = list(SIDE_LANES)
        self._random.shuffle(lanes)
        for lane in lanes:
            self._drain(lane)
        for lane in Lane:
            self._clocks.join(PYTHON, self._clocks.snapshot(lane.value))
        self._log.check()
        self._log.clear()

    # Memory

    def empty_host(self, num_bytes: int, purpose: str, *, pinned: bool = True) -> Buffer:
        """See :meth:`Engine.empty_host`; both kinds are plain CPU memory here."""
        check_host_memory(num_bytes, purpose=purpose, pinned=pinned)
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

    def _order(self, lane: Lane, label: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        self._clocks.join(lane.value, self._clocks.snapshot(PYTHON))
        for tensor in reads:
            self._access(tensor, lane.value, is_write=False, label=label)
        for tensor in writes:
            self._access(tensor, lane.value, is_write=True, label=label)

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
        hosts = {t.untyped_storage()._cdata in self._host_storages for t in tensors}
        compute = Lane.COMPUTE.value
        if hosts == {True, False} or "_local_scalar_dense" in label:
            # torch's own copies between tiers, and reading a value, block Python until the compute lane is
            # idle.
            self._clocks.join(PYTHON, self._clocks.snapshot(compute))
        self._clocks.join(compute, self._clocks.snapshot(PYTHON))

    def _check_operation(self, tensor: torch.Tensor, is_write: bool, label: str) -> None:
        on_host = tensor.untyped_storage()._cdata in self._host_storages
        actor = PYTHON if on_host else Lane.COMPUTE.value
        self._access(tensor, actor, is_write=is_write, label=label)

    def _enqueue(self, lane: Lane, work: _Work) -> None:
        work.span, self._span = self._span, None
        self._queues[lane].append(work)
        self._enqueued[lane] += 1

    def _perturb(self) -> None:
        while self._random.random() < self._early:
            ready = [lane for lane in SIDE_LANES if self._queues[lane]]
            if not ready:
                return
            self._run_one(self._random.choice(ready))

    def _run_one(self, lane: Lane) -> None:
        work = self._queues[lane].popleft()
        begin = time.perf_counter()
        if work.wait_for is not None:
            self._finish(work.wait_for)
        if work.run is not None:
            # It was checked when it was enqueued, on its own lane; a watch that happens to be active now must
            # not charge it to another.
            with _no_watch(), torch.no_grad():
                work.run()
        self._done[lane] += 1
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
        self._key = self.tensor.untyped_storage()._cdata
        if tier is not Tier.DEVICE:
            engine._host_storages.add(self._key)
        engine.ledger.add(tier, purpose, num_bytes)
        self._unaccount = weakref.finalize(self, engine.ledger.remove, tier, purpose, num_bytes)

    def release(self, after: Sequence[Event] = ()) -> None:
        assert not self._released, f"{self.purpose}: buffer released twice"
        self._released = True
        engine = self._engine
        # Freed device memory is next used on the compute lane, freed host memory by Python: whoever used it
        # before must be ordered before that.
        actor = Lane.COMPUTE.value if self._tier is Tier.DEVICE else PYTHON
        clock = engine._clocks.snapshot(actor)
        merged = Clocks()
        merged.join(actor, clock)
        merged.join(actor, engine._clocks.snapshot(PYTHON))
        for event in after:
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
            with _no_watch():
                self.tensor.fill_(_POISON_BYTE)
        self._unaccount()
        engine._host_storages.discard(self._key)
        engine._shadow.forget(self.tensor)


__all__ = ["RaceError", "SimEngine", "SimEvent"]
