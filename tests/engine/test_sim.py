"""The simulator finds every planted synchronisation fault, and lets correct code pass, under every seed."""

from __future__ import annotations

import pytest
import torch

from forebay.engine import HostTaskError, Lane
from forebay.engine.sim import RaceError, SimEngine

SEEDS = range(50)
NUM_ELEMENTS = 1000


class PythonTask:
    """A host task that is Python code; ``native`` queues it on the lane as a native task would be."""

    def __init__(self, function, *, native=False, label="task", status=0):
        self.label = label
        self.function_address = 1 if native else 0
        self.argument_address = 0
        self.function = function
        self.code = status

    def run(self):
        self.function()

    def status(self):
        return self.code


def floats(buffer, value=None):
    tensor = buffer.view(torch.float32, NUM_ELEMENTS)
    return tensor if value is None else tensor.fill_(value)


@pytest.fixture(params=SEEDS)
def engine(request):
    return SimEngine(request.param)


def round_trip(engine, *, omit=None):
    """One step of the pattern that everything in forebay is made of; ``omit`` leaves one ordering out.

    gradient -> (DOWN) -> host buffer -> (HOST) -> host weight -> (UP) -> weight -> compute reads it
    """
    host_grad = engine.empty_host(4 * NUM_ELEMENTS, "gradients")
    host_weight = engine.empty_host(4 * NUM_ELEMENTS, "weights")
    with engine.watch():
        weight = torch.zeros(NUM_ELEMENTS)
        grad = torch.zeros(NUM_ELEMENTS)
        grad.add_(2.0)
        if omit != "wait before the copy down":
            engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        engine.copy(Lane.DOWN, floats(host_grad), grad)
        down = engine.record(Lane.DOWN)
        if omit != "wait before the host update":
            engine.wait(Lane.HOST, down)
        task = PythonTask(lambda: floats(host_weight).copy_(floats(host_grad) * 3.0), native=True, label="update w")
        engine.host_task(task, reads=[floats(host_grad)], writes=[floats(host_weight)])
        host = engine.record(Lane.HOST)
        if omit == "release of a host buffer at enqueue time":
            host_grad.release()
        if omit == "wait before the gradient is overwritten":
            grad.zero_()
        if omit != "wait before the copy up":
            engine.wait(Lane.UP, host)
        engine.copy(Lane.UP, weight, floats(host_weight))
        up = engine.record(Lane.UP)
        if omit != "wait before the weight is read":
            engine.wait(Lane.COMPUTE, up)
        result = weight * 1.0
        engine.wait(Lane.COMPUTE, down)
        grad.zero_()
    if omit != "release of a host buffer at enqueue time":
        host_grad.release(after=[host])
    host_weight.release(after=[up])
    return result


def test_correct_code_passes_and_computes_the_right_value(engine):
    assert torch.equal(round_trip(engine), torch.full((NUM_ELEMENTS,), 6.0))
    engine.synchronize()
    assert engine.ledger.num_bytes() == 0


@pytest.mark.parametrize(
    ("omit", "text"),
    [
        ("wait before the copy down", r"copy down on lane 'down' reads memory that aten.add_"),
        ("wait before the host update", r"update w on lane 'host' reads memory that copy down"),
        ("wait before the copy up", r"copy up on lane 'up' reads memory that update w"),
        ("wait before the weight is read", r"aten.mul.* on lane 'compute' reads memory that copy up"),
        (
            "wait before the gradient is overwritten",
            r"aten.zero_.* on lane 'compute' writes memory that copy down",
        ),
        ("release of a host buffer at enqueue time", r"release of gradients on lane 'python' writes memory"),
    ],
)
def test_planted_fault_is_caught(engine, omit, text):
    with pytest.raises(RaceError, match=text):
        round_trip(engine, omit=omit)


def test_work_runs_as_late_as_events_allow():
    engine = SimEngine(0)
    source, target = torch.ones(4), torch.zeros(4)
    engine.copy(Lane.UP, target, source)
    event = engine.record(Lane.UP)
    assert not event.query()
    assert torch.equal(target, torch.zeros(4))
    event.synchronize()
    assert torch.equal(target, torch.ones(4))


def test_seeds_differ_in_order():
    def early(seed):
        engine = SimEngine(seed)
        events = []
        for _ in range(20):
            engine.copy(Lane.UP, torch.zeros(1), torch.ones(1))
            events.append(engine.record(Lane.UP))
        return sum(event.query() for event in events)

    assert early(0) == 0
    assert len({early(seed) for seed in range(20)}) > 3


def test_memory_is_poisoned_when_fresh_and_when_released():
    engine = SimEngine(0)
    buffer = engine.empty_device(16, "staging")
    view = buffer.view(torch.bfloat16, 8)
    assert view.isnan().all()
    view.fill_(1.0)
    buffer.release()
    assert view.isnan().all()


def test_ranges_of_one_buffer_do_not_conflict():
    engine = SimEngine(0)
    buffer = engine.empty_host(8 * NUM_ELEMENTS, "staging")
    low = buffer.view(torch.float32, NUM_ELEMENTS)
    high = buffer.view(torch.float32, NUM_ELEMENTS, 4 * NUM_ELEMENTS)
    engine.copy(Lane.DOWN, low, torch.ones(NUM_ELEMENTS))
    engine.copy(Lane.UP, torch.empty(NUM_ELEMENTS), high)
    with pytest.raises(RaceError):
        engine.copy(Lane.UP, torch.empty(NUM_ELEMENTS), low)


def test_reads_do_not_conflict_with_reads():
    engine = SimEngine(0)
    source = torch.ones(8)
    engine.copy(Lane.DOWN, torch.empty(8), source)
    engine.copy(Lane.UP, torch.empty(8), source)
    with engine.watch():
        source.sum()


def test_a_speculative_copy_may_be_overtaken_by_a_write_but_not_overtake_one():
    engine = SimEngine(0)
    with engine.watch():
        source = torch.ones(8)
        with pytest.raises(RaceError, match="copy down on lane 'down' reads"):
            engine.copy(Lane.DOWN, torch.empty(8), source, speculative=True)
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        engine.copy(Lane.DOWN, engine.empty_host(32, "other").view(torch.float32, 8), source, speculative=True)
        source.zero_()


def test_python_may_read_after_synchronize_only():
    engine = SimEngine(0)
    buffer = engine.empty_host(4 * NUM_ELEMENTS, "gradients")
    engine.copy(Lane.DOWN, floats(buffer), torch.ones(NUM_ELEMENTS))
    event = engine.record(Lane.DOWN)
    with engine.watch(), pytest.raises(RaceError, match="on lane 'python' reads"):
        floats(buffer).sum()
    event.synchronize()
    with engine.watch():
        assert floats(buffer).sum() == NUM_ELEMENTS


def test_backward_is_watched():
    engine = SimEngine(0)
    weight = torch.ones(4, requires_grad=True)
    with engine.watch():
        weight.square().sum().backward()
        with pytest.raises(RaceError, match="copy down on lane 'down' reads"):
            engine.copy(Lane.DOWN, torch.empty(4), weight.grad)


def test_writes_are_counted_while_watched():
    grads = [torch.ones(3), torch.ones(3)]
    with SimEngine(0).watch():
        torch._foreach_mul_(grads, 2.0)
    assert [grad._version for grad in grads] == [1, 1]


def test_python_task_runs_after_what_was_enqueued_on_host_before():
    engine = SimEngine(0)
    buffer = engine.empty_host(4 * NUM_ELEMENTS, "gradients")
    engine.copy(Lane.DOWN, floats(buffer), torch.ones(NUM_ELEMENTS))
    engine.wait(Lane.HOST, engine.record(Lane.DOWN))
    seen = []
    engine.host_task(PythonTask(lambda: seen.append(floats(buffer).sum().item())), reads=[floats(buffer)])
    assert seen == [NUM_ELEMENTS]


def test_failed_task_raises_with_its_label():
    engine = SimEngine(0)
    engine.host_task(PythonTask(lambda: None, label="update layers.3.weight", status=7))
    with pytest.raises(HostTaskError, match=r"'update layers.3.weight' failed with status 7.*checkpoint"):
        engine.check_tasks()


def test_releasing_twice_is_a_bug():
    engine = SimEngine(0)
    buffer = engine.empty_host(16, "staging")
    buffer.release()
    with pytest.raises(AssertionError, match="released twice"):
        buffer.release()


def test_ledger_follows_buffers_that_are_dropped():
    engine = SimEngine(0)
    buffer = engine.empty_host(16, "staging")
    assert engine.ledger.num_bytes(purpose="staging") == 16
    del buffer
    assert engine.ledger.num_bytes(purpose="staging") == 0


def test_foreach_operations_count_as_writes():
    """Under a dispatch mode torch does not count them, and a gradient that was clipped would look unchanged."""
    tensors = [torch.ones(4), torch.ones(5)]
    before = [tensor._version for tensor in tensors]
    with SimEngine(0).watch():
        torch._foreach_mul_(tensors, torch.tensor(0.5))
        torch._foreach_norm(tensors)
    assert all(tensor._version > version for tensor, version in zip(tensors, before, strict=True))


class TestCapture:
    """Nothing is carried out in a capture, and all of it, in adversarial order, at every replay."""

    @staticmethod
    def chain(engine, source, host, target, *, omit=None):
        source.add_(1.0)
        if omit != "wait before the copy down":
            engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        engine.copy(Lane.DOWN, host, source)
        if omit != "wait before the copy up":
            engine.wait(Lane.UP, engine.record(Lane.DOWN))
        engine.copy(Lane.UP, target, host)
        if omit != "join":
            engine.join()
        return target * 2.0

    def test_replays(self, engine):
        host = floats(engine.empty_host(4 * NUM_ELEMENTS, "other"), 0.0)
        source, target = torch.zeros(NUM_ELEMENTS), torch.zeros(NUM_ELEMENTS)
        with engine.watch():
            with engine.capture() as graph:
                result = self.chain(engine, source, host, target)
                assert engine.capturing
            assert not engine.capturing
            assert source[0] == target[0] == 0
            for number in range(1, 4):
                graph.replay()
                assert torch.equal(result, torch.full((NUM_ELEMENTS,), 2.0 * number))
            version = source._version
            graph.replay()
            assert source._version == version, "a launch counts no writes"

    @pytest.mark.parametrize("omit", ["wait before the copy down", "wait before the copy up"])
    def test_planted_fault_is_caught_at_the_replay(self, engine, omit):
        host = floats(engine.empty_host(4 * NUM_ELEMENTS, "other"), 0.0)
        source, target = torch.zeros(NUM_ELEMENTS), torch.zeros(NUM_ELEMENTS)
        with engine.watch():
            with engine.capture() as graph:
                self.chain(engine, source, host, target, omit=omit)
            with pytest.raises(RaceError, match="of the graph"):
                graph.replay()

    def test_work_outside_is_not_waited_for_by_itself(self, engine):
        host = floats(engine.empty_host(4 * NUM_ELEMENTS, "other"), 0.0)
        source, target = torch.zeros(NUM_ELEMENTS), torch.zeros(NUM_ELEMENTS)
        with engine.capture() as graph:
            self.chain(engine, source, host, target)
        engine.copy(Lane.UP, target, host)
        with pytest.raises(RaceError, match=r"'(down|up) of the graph' writes"):
            graph.replay()

    def test_what_a_graph_cannot_hold(self, engine):
        host = floats(engine.empty_host(4 * NUM_ELEMENTS, "other"), 0.0)
        source, target = torch.zeros(NUM_ELEMENTS), torch.zeros(NUM_ELEMENTS)

        def capture(body):
            with engine.capture():
                body()

        for body, text in [
            (lambda: self.chain(engine, source, host, target, omit="join"), r"not joined .* optimizer.join\(\)"),
            (lambda: source.sum().item(), "waits for the device, which is not permitted"),
            (lambda: source.copy_(host), "waits for the device, which is not permitted"),
            (lambda: engine.empty_host(8, "other"), "allocating host memory for other while a graph is being captured"),
            (engine.synchronize, "synchronizing the engine while a graph is being captured"),
            (lambda: engine.host_task(PythonTask(lambda: None)), "'task' is Python code, which a CUDA graph cannot"),
        ]:
            with pytest.raises(RuntimeError, match=text):
                capture(body)

    def test_memory_of_a_graph_is_poisoned_at_every_replay(self):
        engine = SimEngine(0)
        host = floats(engine.empty_host(4 * NUM_ELEMENTS, "other"), 1.0)
        seen = torch.zeros(NUM_ELEMENTS)
        with engine.capture() as graph:
            buffer = engine.empty_device(4 * NUM_ELEMENTS, "staging")
            seen.copy_(floats(buffer))  # before anything is there
            engine.wait(Lane.UP, engine.record(Lane.COMPUTE))
            engine.copy(Lane.UP, floats(buffer), host)
            engine.join()
            buffer.release()
        for _ in range(2):
            graph.replay()
            assert seen.isnan().all()


def test_a_copy_into_fresh_device_memory_waits_for_the_allocation(engine):
    """Kernels enqueued before it may still use the memory that the caching allocator hands out."""
    host = engine.empty_host(4 * NUM_ELEMENTS, "weights")
    device = engine.empty_device(4 * NUM_ELEMENTS, "weights")
    with pytest.raises(RaceError, match="allocation of weights"):
        engine.copy(Lane.UP, floats(device), floats(host))
    engine.wait(Lane.UP, engine.record(Lane.COMPUTE))
    engine.copy(Lane.UP, floats(device), floats(host))
