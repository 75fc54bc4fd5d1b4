"""The CUDA engine: the pattern that everything is made of, with random delays on every lane."""

from __future__ import annotations

import pytest
import torch

from forebay.engine import HostTaskError, Lane
from forebay.engine.cuda import CudaEngine
from forebay.host import kernels

pytestmark = pytest.mark.gpu

NUM_ELEMENTS = 4_000_001


def sgd_task(grad, weight):
    """Return a native task that does ``weight -= 0.5 * grad``."""
    segment = kernels.Segment(grad=grad, param=weight)
    return kernels.UpdateTask("update w", kernels.Algorithm.SGD, [segment], kernels.Hyper(lr=0.5))


@pytest.mark.parametrize("delay_seed", [None, 0, 1, 2, 3, 4])
def test_gradient_down_update_weight_up(delay_seed):
    engine = CudaEngine(torch.device("cuda"), delay_seed=delay_seed)
    grads = engine.empty_host(4 * NUM_ELEMENTS, "gradients").view(torch.float32, NUM_ELEMENTS)
    weights = engine.empty_host(4 * NUM_ELEMENTS, "weights").view(torch.float32, NUM_ELEMENTS)
    weights.fill_(1.0)
    task = sgd_task(grads, weights)
    assert task.function_address
    weight = torch.ones(NUM_ELEMENTS, device="cuda")
    expected = torch.ones(NUM_ELEMENTS, device="cuda")
    for step in range(8):
        grad = torch.full((NUM_ELEMENTS,), float(step), device="cuda") * weight.sign()
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        engine.copy(Lane.DOWN, grads, grad)
        engine.wait(Lane.HOST, engine.record(Lane.DOWN))
        engine.host_task(task, reads=[grads], writes=[weights])
        engine.wait(Lane.UP, engine.record(Lane.HOST))
        engine.copy(Lane.UP, weight, weights)
        engine.wait(Lane.COMPUTE, engine.record(Lane.UP))
        del grad  # its memory goes to the next step's temporaries
        expected -= 0.5 * step * expected.sign()
        assert torch.equal(weight, expected)
    engine.synchronize()
    assert engine.traffic().down_bytes == engine.traffic().up_bytes == 8 * 4 * NUM_ELEMENTS


def test_buffers_are_pinned_exact_and_given_back():
    engine = CudaEngine(torch.device("cuda"))
    buffer = engine.empty_host(10_000_001, "other")
    assert buffer.tensor.is_pinned()
    assert buffer.tensor.numel() == 10_000_001
    assert engine.ledger.num_bytes("pinned") == 10_000_001
    device = engine.empty_device(1 << 20, "staging")
    engine.copy(Lane.UP, device.tensor, buffer.tensor[: 1 << 20])
    done = engine.record(Lane.UP)
    device.release(after=[done])
    buffer.release(after=[done])
    del buffer
    engine.synchronize()
    assert engine.ledger.num_bytes() == 0


def test_python_task_comes_after_what_was_enqueued_before():
    engine = CudaEngine(torch.device("cuda"), delay_seed=1)
    host = engine.empty_host(4 * NUM_ELEMENTS, "gradients").view(torch.float32, NUM_ELEMENTS)
    engine.copy(Lane.DOWN, host, torch.ones(NUM_ELEMENTS, device="cuda"))
    engine.wait(Lane.HOST, engine.record(Lane.DOWN))

    class Task:
        label, function_address, argument_address = "sum", 0, 0

        def run(self):
            self.result = host.sum().item()

        def status(self):
            return 0

    task = Task()
    torch.cuda.synchronize()  # the ones above are made on the compute stream
    engine.host_task(task, reads=[host])
    assert task.result > 0


def test_failed_task_is_named():
    engine = CudaEngine(torch.device("cuda"))
    grads, weights = torch.ones(8), torch.ones(8)
    task = sgd_task(grads, weights)
    task._c_segments[0].grad = None
    engine.host_task(task)
    with pytest.raises(HostTaskError, match="'update w' failed with status"):
        engine.synchronize()
