"""Gates: each module waits for its own weights, in the simulator."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from forebay.engine import Lane
from forebay.engine.sim import RaceError, SimEngine
from forebay.optim.gates import Gates


class ReadsChildWeight(nn.Module):
    """The parent uses the child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.hidden = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return nn.functional.linear(self.first(x), self.hidden.weight)


def upload(engine, param):
    """Begin an upload to ``param``, as after a host update, and return the event to wait for."""
    host = engine.empty_host(param.nbytes, "weights").view(param.dtype, param.numel())
    engine.wait(Lane.UP, engine.record(Lane.COMPUTE))  # the forward before may still read it
    engine.copy(Lane.UP, param.data.view(-1), host.fill_(1.0))
    return engine.record(Lane.UP)


def attached(model, engine, tick=lambda key: None):
    gates = Gates(engine, tick)
    gates.attach(model)
    return gates


@pytest.mark.parametrize("seed", range(20))
def test_every_module_waits_for_its_own_weights(seed):
    engine = SimEngine(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gates = attached(model, engine)
    for _ in range(3):
        for param in model.parameters():
            gates.close(param, upload(engine, param))
        with engine.watch():
            model(torch.ones(2, 4))


def test_an_early_module_does_not_wait_for_late_weights():
    engine = SimEngine(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gates = attached(model, engine)
    model(torch.ones(2, 4))
    first, last = upload(engine, model[0].weight), upload(engine, model[1].weight)
    gates.close(model[0].weight, first)
    gates.close(model[1].weight, last)
    model[0](torch.ones(2, 4))
    assert first.query()
    assert not last.query()


@pytest.mark.parametrize("learned", [False, True])
def test_a_weight_that_the_parent_reads_is_waited_for_at_the_root(learned):
    engine = SimEngine(0)
    model = ReadsChildWeight()
    gates = attached(model, engine)
    if learned:
        model(torch.ones(2, 4))
    gates.close(model.hidden.weight, upload(engine, model.hidden.weight))
    with engine.watch():
        model(torch.ones(2, 4))


def test_without_gates_the_simulator_notices():
    engine = SimEngine(0)
    model = nn.Linear(4, 4)
    upload(engine, model.weight)
    with engine.watch(), pytest.raises(RaceError):
        model(torch.ones(2, 4))


def test_an_evaluation_is_not_part_of_a_step():
    keys = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    attached(model, SimEngine(0), keys.append)
    model(torch.ones(2, 4))
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert len(keys) == 2


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_attached_to_nothing(how):
    engine = SimEngine(0)
    model = nn.Sequential(nn.Linear(4, 4))
    gates = attached(model, engine)
    copied = how(model)
    event = upload(engine, model[0].weight)
    gates.close(model[0].weight, event)
    copied(torch.ones(2, 4))
    assert not event.query()
