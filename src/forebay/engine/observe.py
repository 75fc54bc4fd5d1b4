"""Watching an engine at work: what it enqueues on which lane, and when that begins and ends.

For the time of an :func:`observed` block, the methods of one engine that enqueue work are replaced on that instance.
Outside of such a block nothing is asked and nothing is recorded, so observation costs nothing when it is off.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol

import torch

from forebay.engine.base import Engine, Event, HostTask, Lane

SpanKind = Literal["copy", "host task", "wait", "declared", "compute"]


@dataclasses.dataclass(eq=False)
class Span:
    """Work on a lane, from its begin to its end.

    Attributes:
        kind: ``"copy"``, ``"host task"``, ``"wait"`` (for ``event``), ``"declared"`` (a kernel that is about to be
            launched on the compute lane, announced with :meth:`Engine.declare`), or ``"compute"`` (whatever the compute
            lane does between the two ends; only observers make these).
        lane: where it was enqueued.
        label: of a task or of a declared kernel; empty for others.
        num_bytes: copied; 0 for others.
        tensors: what is written, then what is read. Observers must not keep them: a reference holds memory.
        event: what is waited for.
        begin: when the lane got to it, a point for :meth:`Engine.elapsed_ms`. None until it is known.
        end: when it was done. None until it is known, and for a declared kernel.
    """

    kind: SpanKind
    lane: Lane
    label: str = ""
    num_bytes: int = 0
    tensors: tuple[torch.Tensor, ...] = ()
    event: Event | None = None
    begin: Any = None
    end: Any = None


class Observer(Protocol):
    """Is told what an engine enqueues, in the order in which it does."""

    def enqueued(self, span: Span) -> None:
        """Take note of work that has just been enqueued; ``begin`` and ``end`` may still be to come."""

    def recorded(self, lane: Lane, event: Event) -> None:
        """Take note of an event that has just been recorded behind the last span of ``lane``."""


@contextlib.contextmanager
def observed(engine: Engine, observer: Observer) -> Iterator[None]:
    """Tell ``observer`` about everything that ``engine`` enqueues in the block.

    Raises:
        ValueError: if the engine is observed already.
        RuntimeError: while a CUDA graph is being captured: times in it could not be read.
    """
    if engine.capturing:
        raise RuntimeError("tracing while a CUDA graph is being captured; trace eager steps")
    methods = {name: make(engine, observer) for name, make in _MAKERS.items()}
    if methods.keys() & vars(engine).keys():
        raise ValueError("this engine is being traced already; end that trace before beginning another")
    vars(engine).update(methods)
    try:
        yield
    finally:
        # The class's own methods come to light again.
        for name in methods:
            del vars(engine)[name]


def _copy(engine: Engine, observer: Observer) -> Callable[..., None]:
    original = engine.copy

    def copy(lane: Lane, destination: torch.Tensor, source: torch.Tensor, *, speculative: bool = False) -> None:
        span = Span("copy", lane, num_bytes=source.nbytes, tensors=(destination, source))
        with _surrounded(engine, span):
            original(lane, destination, source, speculative=speculative)
        observer.enqueued(span)

    return copy


def _host_task(engine: Engine, observer: Observer) -> Callable[..., None]:
    original = engine.host_task

    def host_task(task: HostTask, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()) -> None:
        reads, writes = tuple(reads), tuple(writes)
        span = Span("host task", Lane.HOST, task.label, tensors=(*writes, *reads))
        with _surrounded(engine, span):
            original(task, reads, writes)
        observer.enqueued(span)

    return host_task


def _wait(engine: Engine, observer: Observer) -> Callable[..., None]:
    original = engine.wait

    def wait(lane: Lane, event: Event) -> None:
        span = Span("wait", lane, event=event)
        with _surrounded(engine, span):
            original(lane, event)
        observer.enqueued(span)

    return wait


def _declare(engine: Engine, observer: Observer) -> Callable[..., None]:
    original = engine.declare

    def declare(label: str, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()) -> None:
        reads, writes = tuple(reads), tuple(writes)
        original(label, reads, writes)
        span = Span("declared", Lane.COMPUTE, label, tensors=(*writes, *reads))
        engine.begin_span(span)
        observer.enqueued(span)

    return declare


def _record(engine: Engine, observer: Observer) -> Callable[..., Event]:
    original = engine.record

    def record(lane: Lane) -> Event:
        event = original(lane)
        observer.recorded(lane, event)
        return event

    return record


_MAKERS: dict[str, Callable[[Engine, Observer], Callable[..., Any]]] = {
    "copy": _copy,
    "host_task": _host_task,
    "wait": _wait,
    "declare": _declare,
    "record": _record,
}


@contextlib.contextmanager
def _surrounded(engine: Engine, span: Span) -> Iterator[None]:
    engine.begin_span(span)
    yield
    engine.end_span(span)
