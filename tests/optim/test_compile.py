"""Compiled models: the same bits, gates that wait before graphs and do not cut them, and a note where they cannot."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from tiny import assert_bitwise, batch, build, loss_of, train, weights
from torch import nn

import forebay
from forebay.engine import Lane
from forebay.engine.sim import SimEngine
from forebay.host import kernels
from forebay.optim.gates import Gates

# torch's compiler looks at the gradients of whatever goes into a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
HOW = ["model", "model_in_place", "blocks", "blocks_in_place"]
SHARES = [1.0, 0.5, 0.0] if kernels.backend() != "torch" else [0.0]
NOTE = "wait for their updates at the start of the model's forward"


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs graphs as they are and counts their operations."""

    def __init__(self):
        self.sizes = []

    def __call__(self, module, example_inputs):
        self.sizes.append(sum(node.op.startswith("call") for node in module.graph.nodes))
        return module.forward


def compiled(model, how, backend):
    """Return what to call, and what to attach to, of a model that is compiled in one of four ways."""
    if how == "model":
        run = torch.compile(model, backend=backend, fullgraph=True)
        return run, run
    if how == "model_in_place":
        model.compile(backend=backend)
    for index, block in enumerate(model.blocks):
        if how == "blocks_in_place":
            block.compile(backend=backend)
        elif how == "blocks":
            model.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)
    return model, model


def run(how, engine, *, backend="aot_eager", steps=4, attach=True, **kwargs):
    model = build(torch.bfloat16)
    optimizer = forebay.AdamW(model.parameters(), lr=1e-2, chunk_elements=4096, engine=engine, **kwargs)
    call, root = compiled(model, how, backend)
    if attach:
        optimizer.attach(root)
    losses = train(call, optimizer, num_steps=steps, max_norm=0.1)
    engine.synchronize()
    return losses, {name.replace("_orig_mod.", ""): value for name, value in weights(model).items()}


class TestBits:
    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("seed", range(4))
    def test_offloading_changes_no_bit(self, how, seed):
        expected, expected_weights = run(how, SimEngine(0), attach=False)
        torch._dynamo.reset()
        share = SHARES[seed % len(SHARES)]
        losses, actual = run(how, SimEngine(seed), offload_fraction=0.9, host_share=share, attach=seed != 3)
        assert torch.equal(losses, expected)
        assert_bitwise(actual, expected_weights)

    def test_compiling_the_inner_model_after_attaching_it(self):
        """The wrapper is not the model that is attached: the hooks are inside what is compiled."""

        def go(**kwargs):
            torch._dynamo.reset()
            model = build(torch.bfloat16)
            optimizer = forebay.AdamW(model.parameters(), lr=1e-2, chunk_elements=4096, engine=SimEngine(0), **kwargs)
            optimizer.attach(model)
            return train(torch.compile(model, backend="aot_eager"), optimizer, num_steps=4), weights(model)

        expected, expected_weights = go()
        losses, actual = go(offload_fraction=1.0, host_share=SHARES[0])
        assert torch.equal(losses, expected)
        assert_bitwise(actual, expected_weights)

    def test_compiling_after_some_steps(self):
        """Modules that were known to wait by themselves still do, though they are inside a graph then."""

        def go(**kwargs):
            torch._dynamo.reset()
            model = build(torch.bfloat16)
            optimizer = forebay.AdamW(model.parameters(), lr=1e-2, chunk_elements=4096, engine=SimEngine(0), **kwargs)
            optimizer.attach(model)
            losses = [train(model, optimizer, num_steps=2)]
            model.compile(backend="eager")
            losses.append(train(model, optimizer, num_steps=3, first_step=2))
            return torch.cat(losses), weights(model)

        expected, expected_weights = go()
        losses, actual = go(offload_fraction=1.0, host_share=SHARES[0])
        assert torch.equal(losses, expected)
        assert_bitwise(actual, expected_weights)


class TestGraphs:
    @pytest.mark.parametrize("how", HOW)
    def test_gates_leave_graphs_whole(self, how):
        found = []
        # Without hooks torch does not compile an nn.Sequential in place at all, so the wrapper's graphs are compared.
        for name, attach in ((how.removesuffix("_in_place"), False), (how, True)):
            torch._dynamo.reset()
            graphs = Graphs()
            run(name, SimEngine(1), backend=graphs, attach=attach, offload_fraction=1.0)
            found.append(graphs.sizes)
        assert found[0] == found[1]
        assert len(found[0]) == 1  # the two blocks share theirs

    @pytest.mark.parametrize("how", ["blocks", "blocks_in_place"])
    def test_a_compiled_block_waits_for_all_of_its_weights_and_for_no_other(self, how):
        engine = SimEngine(0)
        model = build()
        _, root = compiled(model, how, "eager")
        gates = Gates(engine)
        gates.attach(root)
        model(batch(0))
        block = [list(block.parameters()) for block in model.blocks]
        events = {}
        for param in model.parameters():
            host = engine.empty_host(param.nbytes, "weights").view(param.dtype, param.numel())
            engine.wait(Lane.UP, engine.record(Lane.COMPUTE))
            engine.copy(Lane.UP, param.data.view(-1), host.fill_(0.0))
            events[param] = engine.record(Lane.UP)
            gates.close(param, events[param])
        model.blocks[0](torch.ones(2, model.embedding.embedding_dim, dtype=torch.bfloat16))
        assert all(events[param].query() for param in block[0])
        assert not any(events[param].query() for param in block[1])


class TestNote:
    def note(self, how, caplog):
        with caplog.at_level(logging.WARNING, "forebay"):
            run(how, SimEngine(0), backend="eager", offload_fraction=1.0, placement="host")
        return [record.getMessage() for record in caplog.records if NOTE in record.getMessage()]

    @pytest.mark.parametrize("how", ["model", "model_in_place"])
    def test_a_model_compiled_whole_is_said_once(self, how, caplog):
        (text,) = self.note(how, caplog)
        assert text.startswith("100% of the parameters wait")
        assert "Compile the model block by block, before attach()" in text

    @pytest.mark.parametrize("how", ["blocks", "blocks_in_place", "not at all"])
    def test_others_are_not(self, how, caplog):
        assert self.note(how, caplog) == []

    def test_nor_a_model_of_one_module(self, caplog):
        engine = SimEngine(0)
        model = nn.Linear(64, 64)
        optimizer = forebay.AdamW(model.parameters(), offload_fraction=1.0, placement="host", engine=engine)
        optimizer.attach(model)
        model.compile(backend="eager")
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        assert not [record for record in caplog.records if NOTE in record.getMessage()]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_of_a_compiled_model_and_its_optimizer(how):
    model = build(torch.bfloat16)
    optimizer = forebay.AdamW(model.parameters(), offload_fraction=1.0, chunk_elements=4096, engine=SimEngine(2))
    optimizer.attach(model)
    model.compile(backend="eager")
    train(model, optimizer, num_steps=2)
    copied_model, copied = how((model, optimizer))
    left = train(model, optimizer, num_steps=2, first_step=2)
    right = train(copied_model, copied, num_steps=2, first_step=2)
    assert torch.equal(left, right)


def test_a_loss_with_a_graph_in_it():
    """A model whose loss is compiled with it, as trainers do."""
    model = build(torch.bfloat16)
    engine = SimEngine(5)
    optimizer = forebay.AdamW(model.parameters(), lr=1e-2, offload_fraction=1.0, chunk_elements=4096, engine=engine)
    optimizer.attach(model)
    step = torch.compile(loss_of, backend="aot_eager")
    losses = []
    for index in range(4):
        loss = step(model, batch(10 * index))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch._dynamo.reset()
    other = build(torch.bfloat16)
    resident = forebay.AdamW(other.parameters(), lr=1e-2, chunk_elements=4096, engine=SimEngine(0))
    step = torch.compile(loss_of, backend="aot_eager")
    for index in range(4):
        loss = step(other, batch(10 * index))
        loss.backward()
        resident.step()
        resident.zero_grad()
        assert torch.equal(loss, losses[index])
