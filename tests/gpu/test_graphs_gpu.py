"""CUDA graphs on a GPU: a captured step does what an eager step does, bit for bit.

Small things first, so that what fails first says what is wrong.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from graph_trainer import GraphTrainer, assert_same, steps
from tiny import build

from forebay.engine import Lane
from forebay.engine.cuda import CudaEngine
from forebay.host import kernels

pytestmark = pytest.mark.gpu

NUM_ELEMENTS = 4_000_001
NUM_WARMUP, NUM_LAUNCHES, NUM_AFTER = 4, 50, 2
PLACEMENTS = {
    "device": {"offload_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "placement": "streamed"},
    "host": {"offload_fraction": 1.0, "placement": "host"},
    "auto": {"offload_fraction": 1.0},
    "staging": {"offload_fraction": 0.8, "host_share": 0.3, "staging_gib": 0.03},
}


@contextlib.contextmanager
def captured():
    """Capture on the stream that everything else here runs on."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        yield graph


@pytest.fixture(autouse=True)
def side_stream():
    """The default stream cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def test_the_engine_knows_when_it_is_captured():
    engine = CudaEngine(torch.device("cuda"))
    x = torch.zeros(4, device="cuda")
    assert not engine.capturing
    with captured() as graph:
        assert engine.capturing
        x += 1
    assert not engine.capturing
    graph.replay()
    graph.replay()
    assert x.tolist() == [2.0] * 4


def test_copies_are_captured():
    engine = CudaEngine(torch.device("cuda"))
    host = engine.empty_host(4 * NUM_ELEMENTS, "other").view(torch.float32, NUM_ELEMENTS)
    host.zero_()
    source, target = (torch.zeros(NUM_ELEMENTS, device="cuda") for _ in range(2))
    with captured() as graph:
        source += 1
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        engine.copy(Lane.DOWN, host, source)
        engine.wait(Lane.UP, engine.record(Lane.DOWN))
        engine.copy(Lane.UP, target, host)
        engine.join()
    torch.cuda.synchronize()
    assert host[0] == 0, "the copy was carried out in the capture"
    for number in range(1, 4):
        graph.replay()
        torch.cuda.synchronize()
        assert host[0] == host[-1] == number
        assert target[0] == target[-1] == number


@pytest.mark.parametrize("delay_seed", [None, 0, 1])
def test_a_host_task_is_captured_between_copies(delay_seed):
    engine = CudaEngine(torch.device("cuda"), delay_seed=delay_seed)
    grads = engine.empty_host(4 * NUM_ELEMENTS, "gradients").view(torch.float32, NUM_ELEMENTS)
    host = engine.empty_host(4 * NUM_ELEMENTS, "weights").view(torch.float32, NUM_ELEMENTS)
    host.fill_(1.0)
    segment = kernels.Segment(grad=grads, param=host)
    task = kernels.UpdateTask("update w", kernels.Algorithm.SGD, [segment], kernels.Hyper(lr=0.5))
    grad, weight = (torch.ones(NUM_ELEMENTS, device="cuda") for _ in range(2))
    expected = 1.0
    with captured() as graph:
        grad += 1
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        engine.copy(Lane.DOWN, grads, grad)
        engine.wait(Lane.HOST, engine.record(Lane.DOWN))
        engine.host_task(task, reads=[grads], writes=[host])
        engine.wait(Lane.UP, engine.record(Lane.HOST))
        engine.copy(Lane.UP, weight, host)
        engine.join()
    for number in range(8):
        graph.replay()
        expected -= 0.5 * (2 + number)
        assert torch.equal(weight, torch.full_like(weight, expected))
    engine.check_tasks()
    # And the lanes are usable as before.
    engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
    engine.copy(Lane.DOWN, grads, grad)
    engine.record(Lane.DOWN).synchronize()
    assert grads[0] == 9.0
    engine.synchronize()


def trainer_for(placement, *, delay_seed=None, attach=True, **kwargs):
    engine = CudaEngine(torch.device("cuda"), delay_seed=delay_seed)
    model = build(torch.bfloat16, "cuda", width=512, num_blocks=4)
    options = {"lr": 1e-3, "chunk_elements": 1 << 19} | PLACEMENTS[placement] | kwargs
    return GraphTrainer(engine, captured, model=model, attach=attach, **options)


@pytest.fixture(scope="module")
def eager():
    """Losses, weights and state of eager steps without offload, by whether gradients keep their memory."""
    results = {}
    for keep_grads in (False, True):
        trainer = trainer_for("device")
        trainer.eager(range(NUM_WARMUP + NUM_LAUNCHES + NUM_AFTER), keep_grads=keep_grads)
        results[keep_grads] = trainer.result()
    return results


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("delay_seed", "attach"), [(None, True), (None, False), (0, True), (1, False)])
def test_fifty_launches_are_fifty_eager_steps(placement, delay_seed, attach, eager):
    trainer = trainer_for(placement, delay_seed=delay_seed, attach=attach)
    trainer.eager(steps(0, NUM_WARMUP))
    graph = trainer.capture()
    trainer.launch(graph, steps(NUM_WARMUP, NUM_LAUNCHES))
    trainer.eager(steps(NUM_WARMUP + NUM_LAUNCHES, NUM_AFTER))
    assert_same(trainer.result(), eager[False])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("delay_seed", "attach"), [(None, True), (None, False), (0, True), (1, False)])
def test_fifty_rotated_launches_are_fifty_eager_steps(placement, delay_seed, attach, eager):
    trainer = trainer_for(placement, delay_seed=delay_seed, attach=attach)
    trainer.eager(steps(0, NUM_WARMUP), keep_grads=True)
    trainer.backward_ahead(NUM_WARMUP)
    graph = trainer.capture_rotated()
    trainer.launch_rotated(graph, steps(NUM_WARMUP, NUM_LAUNCHES))
    trainer.update_behind(NUM_WARMUP + NUM_LAUNCHES)
    trainer.eager(steps(NUM_WARMUP + NUM_LAUNCHES + 1, NUM_AFTER - 1), keep_grads=True)
    assert_same(trainer.result(), eager[True])


@pytest.mark.parametrize("placement", ["auto", "staging"])
def test_launches_allocate_nothing(placement):
    trainer = trainer_for(placement)
    trainer.eager(steps(0, NUM_WARMUP))
    graph = trainer.capture()
    trainer.launch(graph, steps(NUM_WARMUP, 2))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for step in steps(NUM_WARMUP + 2, 5):
        trainer.schedule(step)
        trainer.optimizer.refresh_hyperparameters()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_state_is_saved_and_loaded_between_launches(eager):
    trainer = trainer_for("auto")
    trainer.eager(steps(0, NUM_WARMUP))
    graph = trainer.capture()
    for first in range(NUM_WARMUP, NUM_WARMUP + NUM_LAUNCHES, 10):
        trainer.launch(graph, steps(first, 10))
        trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
    trainer.eager(steps(NUM_WARMUP + NUM_LAUNCHES, NUM_AFTER))
    assert_same(trainer.result(), eager[False])
