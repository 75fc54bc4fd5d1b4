"""Training with a captured step, in the simulator or on a GPU, beside the same steps made eagerly."""

from __future__ import annotations

import torch
from tiny import assert_bitwise, batch, build, loss_of, weights

import forebay


class GraphTrainer:
    """A model and its optimizer, with the static input that a graph needs.

    ``capture_into`` returns the context manager that captures, and gives the graph.
    """

    def __init__(self, engine, capture_into, *, attach=True, max_norm=0.1, lr=1e-2, model=None, **kwargs):
        self.engine = engine
        self.capture_into = capture_into
        self.model = build() if model is None else model
        self.device = next(self.model.parameters()).device
        self.lr = lr
        self.optimizer = forebay.AdamW(self.model.parameters(), lr=lr, weight_decay=0.1, engine=engine, **kwargs)
        if attach:
            self.optimizer.attach(self.model)
        self.max_norm = max_norm
        self.tokens = batch(0, self.device).clone()
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
        self.tokens.copy_(batch(step, self.device))

    def schedule(self, step):
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr / (1 + step % 10)
            group["weight_decay"] = 0.01 * (step % 10)

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
        with self.capture_into() as graph:
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
        with self.capture_into() as graph:
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
