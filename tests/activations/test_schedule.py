"""When copies run: the order that is learned, the window, what is not worth copying, and memory over many steps."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from activation_helpers import build, grads, loss_of, offload, tokens
from torch import nn

from forebay.activations.ranges import RangeStore
from forebay.engine.sim import SimEngine

NUM_LAYERS = 4


@pytest.fixture
def loads(monkeypatch):
    """Per call of RangeStore.load that copies something, the sizes of what it copies."""
    seen = []
    load = RangeStore.load

    def recording(self, ranges):
        ranges = list(ranges)
        missing = [found for found in ranges if not found.on_device]
        if missing:
            seen.append(sum(found.num_bytes for found in missing))
        load(self, ranges)

    monkeypatch.setattr(RangeStore, "load", recording)
    return seen


class Wide(nn.Module):
    """Saves one tensor, whose size tells which layer and micro-batch it is of."""

    def forward(self, hidden):
        return (hidden * 1.0).exp()


def forward(made, micro):
    """Run all layers on 100 * (micro + 1) elements, and layer i on i more."""
    hidden = torch.zeros(100 * (micro + 1), requires_grad=True)
    for layer in made.layers.values():
        hidden = layer(hidden)
        hidden = torch.cat([hidden, hidden[:1]])
    return hidden.sum()


def one_step(made, backward_order, num_micro_batches=3, *, evaluate=False):
    with made:
        waiting = []
        for micro in range(num_micro_batches):
            waiting.append(forward(made, micro))
            if evaluate:
                with torch.no_grad():
                    forward(made, 1)
    made.engine.synchronize()  # nothing is left on the device by copies on their way
    for micro in backward_order:
        waiting[micro].backward()


def size(micro, layer):
    return 4 * (100 * (micro + 1) + layer)


def test_last_saved_comes_first_when_nothing_is_known(loads):
    made = offload([Wide() for _ in range(NUM_LAYERS)], ["offload"] * NUM_LAYERS)
    one_step(made, [0], num_micro_batches=1)
    assert loads == [size(0, layer) for layer in reversed(range(NUM_LAYERS))]


def test_the_order_of_the_last_step_is_followed(loads):
    """Backward takes the micro-batches first to last; at the end of one it must fetch the next one's last layer."""
    made = offload([Wide() for _ in range(NUM_LAYERS)], ["offload"] * NUM_LAYERS)
    order = [1, 2, 0]
    used = [size(micro, layer) for micro in order for layer in reversed(range(NUM_LAYERS))]
    one_step(made, order)
    guessed = list(loads)
    assert sorted(guessed) == sorted(used)
    assert guessed != used  # the first step could not know
    loads.clear()
    one_step(made, order, evaluate=True)  # which is not part of the step
    assert loads == used
    # Another order than learned is as right, and is learned in turn.
    for _ in range(2):
        loads.clear()
        one_step(made, [2, 0, 1])
    assert loads == [size(micro, layer) for micro in [2, 0, 1] for layer in reversed(range(NUM_LAYERS))]


def test_prefetch_runs_ahead_of_the_backward(loads):
    made = offload([Wide() for _ in range(NUM_LAYERS)], ["offload"] * NUM_LAYERS, num_layers_prefetched=2)
    with made:
        loss = forward(made, 0)
    made.engine.synchronize()
    seen = []
    hidden = loss.grad_fn
    hidden.register_prehook(lambda *_: seen.append(len(loads)))
    loss.backward()
    assert len(loads) == NUM_LAYERS
    assert seen == [0]


def test_kept_layers_start_the_prefetch(loads):
    """While backward is in a layer that keeps everything, the layer before it is on its way."""
    layers = [Wide() for _ in range(3)]
    made = offload(layers, ["offload", "offload", "keep"])
    at_kept_layer = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            at_kept_layer.append(len(loads))
            return grad

    plain = layers[2].forward
    layers[2].forward = lambda hidden: plain(Probe.apply(hidden))
    with made:
        loss = forward(made, 0)
    made.engine.synchronize()
    loss.backward()
    assert at_kept_layer == [1]


def test_window_bounds_what_is_in_flight():
    """With seed 0 nothing runs unless it is waited for: the copies of all but the last layers must have run."""
    shared = torch.ones(7, requires_grad=True) * 2.0

    class SharedLast(Wide):
        def forward(self, hidden):
            hidden = super().forward(hidden)
            return hidden + (shared * shared).sum()  # the last that is saved was copied long ago

    for kind, in_flight in itertools.product([Wide, SharedLast], range(3)):
        made = offload([kind() for _ in range(6)], ["offload"] * 6, num_layers_in_flight=in_flight)
        with made:
            loss = forward(made, 0)
        lane = made.engine._queues
        copies = sum(work.run is not None for queue in lane.values() for work in queue)
        assert copies == in_flight
        del loss


def test_what_frees_nothing_is_found_and_said_once(caplog):
    """The model's caller holds the positions until backward, and the last layer, which keeps, saves them too."""
    model = build(NUM_LAYERS)
    held = torch.linspace(0.5, 1.5, 7)[:, None].expand(-1, 16).clone()
    hidden_bytes = []
    made = offload(model)
    torch.manual_seed(1)
    with caplog.at_level(logging.INFO, "forebay"):
        for _ in range(5):
            before = made.engine.traffic().down_bytes
            with made:
                hidden = model.embedding(tokens())
                for layer in model.layers:
                    hidden = layer(hidden, position=held)
                loss = model.head(hidden).square().sum()
            loss.backward()
            hidden_bytes.append(made.engine.traffic().down_bytes - before)
            made.engine.synchronize()
    assert hidden_bytes[0] == hidden_bytes[1]
    # The positions, once: all layers share one storage.
    assert hidden_bytes[1] - hidden_bytes[2] == held.nbytes
    assert hidden_bytes[2:] == [hidden_bytes[2]] * 3
    said = [record.getMessage() for record in caplog.records if "frees nothing" in record.getMessage()]
    assert len(said) == 1
    assert "stays on the device" in said[0]


def test_what_is_held_only_sometimes_is_offloaded():
    model = build(NUM_LAYERS)
    made = offload(model)
    moved = []
    for step in range(6):
        before = made.engine.traffic().down_bytes
        position = torch.ones(7, 16)
        with made:
            hidden = model.embedding(tokens())
            for layer in model.layers[:-1]:
                hidden = layer(hidden, position=position)
            loss = model.head(hidden).square().sum()
        if step % 2:
            del position
        loss.backward()
        moved.append(made.engine.traffic().down_bytes - before)
        made.engine.synchronize()
    assert len(set(moved[2:])) == 1


def test_an_original_that_is_still_there_is_not_copied_back():
    made = offload([Wide()], ["offload"])
    hidden = torch.zeros(50, requires_grad=True)
    with made:
        output = made.layers["0"](hidden)
    output.sum().backward()  # `output` is what exp saves
    assert made.engine.traffic().down_bytes == 200
    assert made.engine.traffic().up_bytes == 0


@pytest.mark.parametrize("seed", range(50))
def test_no_pinned_allocation_after_the_first_step(seed):
    model = build(3)
    made = offload(model, ["offload", "recompute_offloaded_input", "offload"], engine=SimEngine(seed))
    ledgers, allocations = [], []
    for step in range(5):
        losses = []
        with made:
            losses += [loss_of(model, tokens(step)), loss_of(model, tokens(step, length=9))]
        losses[step % 2].backward()
        losses[1 - step % 2].backward()
        allocations.append(made.num_pinned_allocations)
        made.engine.synchronize()
        assert made.num_host_buffers == 0
        ledgers.append(made.engine.ledger.snapshot())
    assert allocations == allocations[:1] * 5
    assert allocations[0] > 0
    assert ledgers == ledgers[:1] * 5
    assert list(ledgers[0]["pinned"]) == ["activations"]
    made.trim()
    assert made.engine.ledger.num_bytes() == 0


def test_a_step_after_trim_pins_again():
    model = build(3)
    made = offload(model)
    for _ in range(2):
        with made:
            loss_of(model, tokens()).backward()
        assert made.trim() > 0
        assert made.engine.ledger.num_bytes("pinned") == 0
    assert grads(model)


def test_a_budget_too_small_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setenv("FOREBAY_HOST_MEMORY_GIB", "0.00001")
    model = build(3)
    made = offload(model)
    with pytest.raises(MemoryError, match=r"activations needs .* offload fewer layers"), made:
        loss_of(model, tokens())
    monkeypatch.delenv("FOREBAY_HOST_MEMORY_GIB")
    with made:
        loss_of(model, tokens()).backward()
    made.engine.synchronize()
    assert made.num_host_buffers == 0
