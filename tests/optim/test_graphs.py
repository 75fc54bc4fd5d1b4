"""A captured step, in the simulator: every launch does what an eager step does, under adversarial orders."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_bitwise, batch, build, loss_of, weights
from torch import nn

import forebay
from forebay.engine import Lane
from forebay.engine.sim import RaceError, SimEngine
from forebay.optim.streamed_share import StreamedShare

SEEDS = range(50)
CHUNK = 4096
NUM_WARMUP, NUM_LAUNCHES, NUM_AFTER = 4, 5, 3
PLACEMENTS = [
    {"offload_fraction": 0.0},
    {"offload_fraction": 1.0, "placement": "streamed"},
    {"offload_fraction": 1.0, "placement": "host"},
    {"offload_fraction": 0.8, "host_share": 0.5},
    {"offload_fraction": 1.0, "host_share": 0.4, "staging_gib": 2**-13},
]


class Trainer:
    """A model and its optimizer, with the static input that a graph needs."""

    def __init__(self, engine, *, attach=True, max_norm=0.1, state_dtype="fp32", **kwargs):
        self.engine = engine
        self.model = build()
        self.optimizer = forebay.AdamW(
            self.model.parameters(),
            lr=1e-2,
            weight_decay=0.1,
            chunk_elements=CHUNK,
            engine=engine,
            state_dtype=state_dtype,
            **kwargs,
        )
        if attach:
            self.optimizer.attach(self.model)
        self.max_norm = max_norm
        self.tokens = batch(0).clone()
        self.losses = []
        self.loss = None

    def backward(self):
        self.loss = loss_of(self.model, self.tokens)
        self.loss.backward()

    def update(self):
        if self.max_norm is not None:
            self.optimizer.clip_grad_norm_(self.max_norm)
        self.optimizer.step()

    def feed(self, step):
        self.tokens.copy_(batch(step))

    def schedule(self, step):
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
            group["weight_decay"] = 0.01 * step

    def note_loss(self, of_launch=False):
        self.losses.append((self.graph_loss if of_launch else self.loss).detach().clone())

    def eager(self, steps, *, keep_grads=False):
        for step in steps:
            self.feed(step)
            self.optimizer.zero_grad(set_to_none=not keep_grads)
            self.backward()
            self.schedule(step)
            self.update()
            self.note_loss()

    def capture(self):
        """Forward, backward and step, in this order."""
        with self.engine.capture() as graph:
            self.optimizer.zero_grad()
            self.backward()
            self.update()
            self.optimizer.join()
        self.graph_loss = self.loss
        return graph

    def launch(self, graph, steps):
        for step in steps:
            self.feed(step)
            self.schedule(step)
            self.optimizer.refresh_hyperparameters()
            graph.replay()
            self.note_loss(of_launch=True)

    def backward_ahead(self, step):
        """The eager forward and backward whose gradients the first launch of a rotated graph updates with."""
        self.feed(step)
        self.optimizer.zero_grad(set_to_none=False)
        self.backward()
        self.note_loss()

    def capture_rotated(self):
        """Step, then forward and backward of the next."""
        with self.engine.capture() as graph:
            self.update()
            self.optimizer.zero_grad(set_to_none=False)
            self.backward()
            self.optimizer.join()
        self.graph_loss = self.loss
        return graph

    def launch_rotated(self, graph, steps):
        """Update with the gradients that are there, and make the next, once for each of ``steps``."""
        for step in steps:
            self.schedule(step)
            self.feed(step + 1)
            self.optimizer.refresh_hyperparameters()
            graph.replay()
            self.note_loss(of_launch=True)

    def update_behind(self, step):
        """The eager step with the gradients of the last launch."""
        self.schedule(step)
        self.update()

    def result(self):
        return torch.stack(self.losses), weights(self.model), self.optimizer.state_dict()


def steps(first, num):
    return range(first, first + num)


def assert_same(actual, expected):
    assert torch.equal(actual[0], expected[0])
    assert_bitwise(actual[1], expected[1])
    left, right = actual[2]["state"], expected[2]["state"]
    assert left.keys() == right.keys()
    for index, entry in right.items():
        for name, value in entry.items():
            assert torch.equal(left[index][name], value), (index, name)


TOTAL = NUM_WARMUP + NUM_LAUNCHES + NUM_AFTER


@pytest.fixture(scope="module")
def eager():
    results = {}
    for keep_grads in (False, True):
        trainer = Trainer(SimEngine(0), offload_fraction=0.0)
        trainer.eager(range(TOTAL), keep_grads=keep_grads)
        results[keep_grads] = trainer.result()
    return results


@pytest.mark.parametrize("seed", SEEDS)
def test_launches_are_eager_steps(seed, eager):
    engine = SimEngine(seed)
    with engine.watch():
        trainer = Trainer(engine, attach=seed % 2 == 0, overlap=seed % 3 > 0, **PLACEMENTS[seed % 5])
        trainer.eager(steps(0, NUM_WARMUP))
        graph = trainer.capture()
        trainer.launch(graph, steps(NUM_WARMUP, NUM_LAUNCHES))
        trainer.eager(steps(NUM_WARMUP + NUM_LAUNCHES, NUM_AFTER))
        assert_same(trainer.result(), eager[False])


@pytest.mark.parametrize("seed", SEEDS)
def test_rotated_launches_are_eager_steps(seed, eager):
    engine = SimEngine(seed)
    with engine.watch():
        trainer = Trainer(engine, attach=seed % 2 == 0, overlap=seed % 3 > 0, **PLACEMENTS[seed % 5])
        trainer.eager(steps(0, NUM_WARMUP), keep_grads=True)
        trainer.backward_ahead(NUM_WARMUP)
        graph = trainer.capture_rotated()
        trainer.launch_rotated(graph, steps(NUM_WARMUP, NUM_LAUNCHES))
        trainer.update_behind(NUM_WARMUP + NUM_LAUNCHES)
        trainer.eager(steps(NUM_WARMUP + NUM_LAUNCHES + 1, NUM_AFTER - 1), keep_grads=True)
        assert_same(trainer.result(), eager[True])


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_eager_steps_and_state_dicts_between_launches(seed, rotated, eager):
    engine = SimEngine(seed)
    with engine.watch():
        trainer = Trainer(engine, attach=seed % 2 == 0, **PLACEMENTS[seed % 5])
        trainer.eager(steps(0, NUM_WARMUP), keep_grads=True)
        step = NUM_WARMUP
        if rotated:
            trainer.backward_ahead(step)
        graph = trainer.capture_rotated() if rotated else trainer.capture()
        for _ in range(2):
            if rotated:
                trainer.launch_rotated(graph, [step, step + 1])
                trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
                trainer.update_behind(step + 2)
                trainer.backward_ahead(step + 3)
            else:
                trainer.launch(graph, [step, step + 1])
                trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
                trainer.eager([step + 2], keep_grads=True)
            step += 3
        if rotated:
            trainer.update_behind(step)
            trainer.eager([step + 1], keep_grads=True)
        else:
            trainer.eager([step, step + 1], keep_grads=True)
        assert_same(trainer.result(), eager[True])
