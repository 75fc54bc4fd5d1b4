"""What an observer is told, on the simulator, and that observation changes nothing and leaves nothing behind."""

from __future__ import annotations

import time

import pytest
import torch

from forebay.engine import Lane
from forebay.engine.observe import observed
from forebay.engine.sim import SimEngine

SEEDS = range(50)


class Task:
    """A host task that takes a while; native ones are queued, Python ones run at once."""

    def __init__(self, function, *, native):
        self.label = "update of w"
        self.function_address = int(native)
        self.argument_address = 0
        self.run = function

    def status(self):
        return 0


class Seen:
    def __init__(self):
        self.spans = []
        self.events = []

    def enqueued(self, span):
        self.spans.append(span)

    def recorded(self, lane, event):
        self.events.append((lane, event))


def round_trip(engine, *, native=True):
    """Gradient down, updated on the host, weight up; returns the weight."""
    host = engine.empty_host(32, "gradients").view(torch.float32, 8)
    weight, grad = torch.zeros(8), torch.ones(8)
    engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
    engine.copy(Lane.DOWN, host, grad)
    engine.wait(Lane.HOST, engine.record(Lane.DOWN))

    def update():
        time.sleep(0.002)
        host.add_(1)

    engine.host_task(Task(update, native=native), reads=[host], writes=[host])
    engine.wait(Lane.UP, engine.record(Lane.HOST))
    engine.copy(Lane.UP, weight, host)
    engine.wait(Lane.COMPUTE, engine.record(Lane.UP))
    engine.declare("kernel", reads=[weight])
    return weight


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_everything_is_seen_in_order_with_times_in_order(seed, native):
    engine, seen = SimEngine(seed), Seen()
    with observed(engine, seen):
        weight = round_trip(engine, native=native)
    engine.synchronize()
    assert weight.tolist() == [2.0] * 8
    assert [(span.kind, span.lane) for span in seen.spans] == [
        ("wait", Lane.DOWN),
        ("copy", Lane.DOWN),
        ("wait", Lane.HOST),
        ("host task", Lane.HOST),
        ("wait", Lane.UP),
        ("copy", Lane.UP),
        ("wait", Lane.COMPUTE),
        ("declared", Lane.COMPUTE),
    ]
    assert [lane for lane, _ in seen.events] == [Lane.COMPUTE, Lane.DOWN, Lane.HOST, Lane.UP]
    down, task, up, gate = (seen.spans[i] for i in (1, 3, 5, 6))
    assert (down.num_bytes, up.num_bytes, task.label) == (32, 32, "update of w")
    assert gate.event is seen.events[-1][1]
    # What one copy brings, the task reads, and the other copy takes away: their times cannot overlap.
    times = [point for span in (down, task, up) for point in (span.begin, span.end)]
    assert times == sorted(times)
    assert engine.elapsed_ms(task.begin, task.end) >= 2.0
    assert engine.elapsed_ms(up.end, gate.end) >= 0.0


def test_late_work_stalls_the_gate_that_needs_it():
    engine, seen = SimEngine(0), Seen()
    with observed(engine, seen):
        round_trip(engine)
    gate = seen.spans[6]
    # Seed 0 runs everything within the wait that needs it.
    assert engine.elapsed_ms(gate.begin, gate.end) >= 2.0
    assert gate.begin <= seen.spans[3].begin <= seen.spans[3].end <= gate.end


def test_nothing_is_left_behind_and_one_observer_at_a_time():
    engine = SimEngine(0)
    before = dict(vars(engine))
    with observed(engine, Seen()):
        with pytest.raises(ValueError, match="this engine is being traced already; end that trace"):
            observed(engine, Seen()).__enter__()
        round_trip(engine)
    assert vars(engine).keys() == before.keys()
    seen = Seen()
    with pytest.raises(RuntimeError, match="stop"), observed(engine, seen):
        raise RuntimeError("stop")
    round_trip(engine)
    assert vars(engine).keys() == before.keys()
    assert seen.spans == []
