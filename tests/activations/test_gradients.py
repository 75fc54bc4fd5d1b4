"""Gradients with offloading are those without, bit for bit, whatever becomes of the graph."""

from __future__ import annotations

import functools
import gc
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from activation_helpers import MIXED, SEEDS, Block, assert_equal, build, check, grads, loss_of, offload, tokens
from torch import nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from forebay.activations import Choice, Policy
from forebay.engine import Lane
from forebay.engine.sim import RaceError, SimEngine
from forebay.host import HostPool

FEW_SEEDS = range(10)


def one_step(model, inside):
    with inside():
        loss = loss_of(model, tokens())
    loss.backward()
    return grads(model) | {"loss": loss.detach()}


@pytest.mark.parametrize("policy", [choice.value for choice in Choice])
def test_every_choice(policy):
    check(build(3), one_step, policy)


def test_mixed_choices():
    check(build(5), one_step, MIXED)


def test_everything_offloaded():
    check(build(3), one_step, Policy.uniform("offload", 3, num_kept=0))


@pytest.mark.parametrize("in_flight", [0, 2])
@pytest.mark.parametrize("prefetched", [0, 3])
def test_windows(in_flight, prefetched):
    check(
        build(4),
        one_step,
        seeds=FEW_SEEDS,
        num_layers_in_flight=in_flight,
        num_layers_prefetched=prefetched,
    )


@pytest.mark.parametrize(
    ("lane", "before"),
    [(Lane.DOWN, Lane.COMPUTE), (Lane.UP, Lane.COMPUTE), (Lane.UP, Lane.DOWN), (Lane.COMPUTE, Lane.UP)],
)
def test_a_missing_wait_is_found(lane, before, monkeypatch):
    """Without the waits of one lane for another the simulator raises: the other tests can fail."""
    wait = SimEngine.wait

    def forgetful(self, waiting, event):
        if (waiting, event.lane) != (lane, before):
            wait(self, waiting, event)

    monkeypatch.setattr(SimEngine, "wait", forgetful)
    with pytest.raises(RaceError):
        check(build(4), one_step, ["offload"] * 4, seeds=FEW_SEEDS)


def test_a_buffer_lent_too_early_is_found(monkeypatch):
    """The pool must not lend a buffer whose last copy has not run."""
    monkeypatch.setattr(HostPool, "release", functools.partialmethod(_release_at_once, HostPool.release))
    with pytest.raises(RaceError):
        check(build(4), used_in_part, ["offload"] * 4)


def _release_at_once(pool, release, buffer, after=()):
    release(pool, buffer, ())


def used_in_part(model, inside):
    """Backward stops where the next layer is on its way already, and the graph is dropped then."""
    with inside():
        states = [model.embedding(tokens())]
        for layer in model.layers:
            states.append(layer(states[-1]))
    (grad,) = torch.autograd.grad(states[-1].sum(), [states[3]])
    del states
    return one_step(model, inside) | {"grad": grad}


def test_backward_that_stops_halfway():
    check(build(4), used_in_part, ["offload"] * 4)


def test_backward_inside_the_context():
    def step(model, inside):
        with inside():
            loss_of(model, tokens()).backward()
        return grads(model)

    check(build(5), step, MIXED, seeds=FEW_SEEDS)


@pytest.mark.parametrize("policy", [["offload"] * 3, ["recompute_offloaded_input", "recompute", "offload"]])
def test_micro_batches_in_any_order(policy):
    def step(model, inside):
        order = random.Random(step.seed)
        for _ in range(2):  # the second step prefetches along what the first has taught
            waiting = []
            for action in order.sample(range(6), 6):
                if action % 2 or not waiting:
                    with inside():
                        waiting.append(loss_of(model, tokens(action, length=5 + action)))
                else:
                    waiting.pop(order.randrange(len(waiting))).backward()
            order.shuffle(waiting)
            for loss in waiting:
                loss.backward()
        return grads(model)

    for step.seed in range(5):
        check(build(len(policy)), step, policy, seeds=range(step.seed, 50, 5))


def test_one_forward_one_backward():
    def step(model, inside):
        waiting = []
        for micro in range(5):
            with inside():
                waiting.append(loss_of(model, tokens(micro)))
            if len(waiting) == 3:
                waiting.pop(0).backward()
        for loss in waiting:
            loss.backward()
        return grads(model)

    check(build(2), step, ["offload", "offload"])


@pytest.fixture
def single_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", [pipelining.ScheduleGPipe, pipelining.Schedule1F1B])
def test_schedules_of_pipelining(schedule, single_rank):
    """torch's own, on the stage of a single rank."""
    batch = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(5))

    def step(model, inside):
        stage = pipelining.PipelineStage(
            model, 0, 1, torch.device("cpu"), input_args=(batch[:2],), output_args=(batch[:2],)
        )
        pipeline = schedule(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
        with inside():
            for _ in range(2):
                pipeline.step(batch, target=torch.zeros_like(batch))
        return grads(model)

    layers = nn.Sequential(*(Block() for _ in range(3)))
    check(layers, step, ["offload"] * 3, seeds=FEW_SEEDS, layers="*")


def test_retained_graph():
    def step(model, inside):
        with inside():
            loss = loss_of(model, tokens())
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return grads(model)

    check(build(4), step, ["offload", "recompute_offloaded_input", "offload", "keep"])


def test_second_derivatives():
    def step(model, inside):
        with inside():
            loss = loss_of(model, tokens())
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(grad.square().sum() for grad in first).backward()
        return grads(model)

    check(build(3), step, "offload")


@pytest.mark.parametrize("drop_first", [False, True])
def test_two_heads_of_which_one_is_used(drop_first):
    def step(model, inside):
        with inside():
            hidden = model.embedding(tokens())
            for layer in model.layers[:2]:
                hidden = layer(hidden)
            left, right = model.layers[2](hidden), model.layers[3](hidden)
        if drop_first:
            del right
        left.square().sum().backward()
        return grads(model)

    check(build(4), step, ["offload"] * 4)


def test_backward_in_parts():
    def step(model, inside):
        with inside():
            hidden = model.embedding(tokens())
            states = []
            for layer in model.layers:
                states.append(layer(hidden if not states else states[-1]))
        (last,) = torch.autograd.grad(states[-1].sum(), [states[2]], retain_graph=True)
        states[2].backward(last, retain_graph=True)
        states[1].sum().backward()
        return grads(model) | {"last": last}

    check(build(5), step, MIXED, seeds=FEW_SEEDS)


def test_dropped_graphs_leave_nothing():
    model = build(4)
    made = offload(model, ["offload", "recompute_offloaded_input", "offload", "keep"])
    sizes = []
    for _ in range(100):
        with made:
            loss = loss_of(model, tokens())
        del loss
        made.engine.synchronize()
        sizes.append((made.engine.ledger.num_bytes(), made.num_host_buffers))
    assert set(sizes[1:]) == {(sizes[0][0], 0)}


@pytest.mark.parametrize("position", [0, 2])
def test_exception_in_forward(position):
    class Failing(Block):
        fail = False

        def forward(self, hidden, **kwargs):
            result = super().forward(hidden, **kwargs)
            if self.fail:
                raise KeyError("planted")
            return result

    def step(model, inside):
        model.layers[position].fail = True
        with pytest.raises(KeyError, match="planted"), inside():
            loss_of(model, tokens())
        model.layers[position].fail = False
        gc.collect()
        return one_step(model, inside)

    check(build(5, block=Failing), step, MIXED, seeds=FEW_SEEDS)


def test_evaluation_in_between():
    def step(model, inside):
        with torch.inference_mode(), inside():  # the first use of all
            results = {"inference": model(tokens(1)).clone()}
        with inside():
            loss = loss_of(model, tokens())
            model.eval()
            with torch.no_grad():
                results["no_grad"] = model(tokens(2))
            results["eval"] = model(tokens(3)).detach()  # a graph that nobody uses
            model.train()
            other = loss_of(model, tokens(4))
        with torch.no_grad():
            results["outside"] = model(tokens(5))
        loss.backward()
        with torch.inference_mode(), inside():
            results["late"] = model(tokens(6)).clone()
        other.backward()
        return results | grads(model)

    check(build(5), step, MIXED, seeds=FEW_SEEDS)


class Checkpointed(Block):
    """A block that checkpoints its own MLP, or that is checkpointed as a whole."""

    inside = True
    use_reentrant = False

    def forward(self, hidden, *, position=None):
        if not self.inside:
            return super().forward(hidden, position=position)
        weights = (self.norm(hidden) @ hidden.transpose(-1, -2)).softmax(-1)
        hidden = hidden + self.dropout(weights @ hidden)
        return hidden + checkpoint(self.mlp, hidden, use_reentrant=self.use_reentrant)

    def mlp(self, hidden):
        gate, up = self.up(hidden).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * self.dropout(up))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("policy", ["offload", MIXED])
def test_checkpoint_inside_a_layer(use_reentrant, policy, monkeypatch):
    monkeypatch.setattr(Checkpointed, "use_reentrant", use_reentrant)
    check(build(5, block=Checkpointed), one_step, policy, seeds=FEW_SEEDS)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("policy", ["offload", MIXED])
def test_checkpoint_around_a_layer(use_reentrant, policy):
    def step(model, inside):
        with inside():
            hidden = model.embedding(tokens())
            for layer in model.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
            loss = model.head(hidden).square().sum()
        loss.backward()
        return grads(model)

    check(build(5), step, policy, seeds=FEW_SEEDS)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_under_a_checkpoint_saves_nothing_itself(use_reentrant):
    model = build(2)
    made = offload(model, ["offload", "offload"])
    with made:
        output = checkpoint(model.layers[0], model.embedding(tokens()), use_reentrant=use_reentrant)
        assert made.engine.traffic().down_bytes == 0
        output.sum().backward()
    assert made.engine.traffic().down_bytes == 0  # nor when it is computed again, for use at once


@pytest.mark.parametrize("frozen", [[0], [1, 2], [0, 1, 2, 3]])
def test_frozen_layers(frozen):
    model = build(5)
    model.embedding.requires_grad_(frozen != [0])
    for index in frozen:
        model.layers[index].requires_grad_(False)
    check(model, one_step, MIXED, seeds=FEW_SEEDS)
    check(model, one_step, "offload", seeds=FEW_SEEDS)


def test_low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.first, self.second = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

        def forward(self, hidden):
            return self.base(hidden) + self.second(self.first(hidden))

    model = build(5).requires_grad_(False)
    for layer in model.layers:
        layer.qkv, layer.up = Adapted(layer.qkv), Adapted(layer.up)
    check(model, one_step, MIXED, seeds=FEW_SEEDS)


def test_tied_embeddings():
    check(build(5, tied=True), one_step, MIXED, seeds=FEW_SEEDS)


def test_sequence_length_changes_every_step():
    def step(model, inside):
        for number, length in enumerate([3, 11, 5, 11, 2]):
            with inside():
                loss = loss_of(model, tokens(number, length))
            loss.backward()
        return grads(model)

    check(build(5), step, MIXED, seeds=FEW_SEEDS)


class Experts(Block):
    """Tokens go to the expert that their values choose, so shapes differ in every step and may be empty."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, hidden, *, position=None):
        hidden = super().forward(hidden, position=position)
        flat = hidden.flatten(0, 1)
        chosen = flat.sum(-1).mul(3).long().remainder(5)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(flat[rows]).relu())
        return hidden + out.view_as(hidden)


def test_experts():
    def step(model, inside):
        for number in range(4):
            with inside():
                loss = loss_of(model, tokens(number))
            loss.backward()
        return grads(model)

    check(build(5, block=Experts), step, MIXED, seeds=FEW_SEEDS)


def test_two_models_at_once():
    teacher, student = build(4), build(3)
    expected = {}
    for seed in [None, *SEEDS]:
        pair = nn.ModuleList([teacher, student])
        pair.zero_grad()
        torch.manual_seed(2)
        if seed is None:
            losses = [loss_of(model, tokens()) for model in pair]
        else:
            engine = SimEngine(seed)
            first, second = (offload(model, engine=engine) for model in pair)
            with engine.watch():
                with first, second:
                    losses = [loss_of(model, tokens()) for model in pair]
                (losses[0] * losses[1].detach() + losses[1]).backward()
            assert_equal(grads(pair), expected)
            engine.synchronize()
            assert first.num_host_buffers == second.num_host_buffers == 0
            continue
        (losses[0] * losses[1].detach() + losses[1]).backward()
        expected = grads(pair)


def test_nested_layers():
    def step(model, inside):
        with inside():
            loss = loss_of(model, tokens())
        loss.backward()
        return grads(model)

    patterns = ["layers.*", "layers.*.up"]
    for inner, outer in itertools.product(["keep", "offload", "recompute"], repeat=2):
        check(build(2), step, [outer, inner] * 2, layers=patterns, seeds=range(5))
