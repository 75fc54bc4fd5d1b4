"""HybridDeviceOptimizer behaves as a torch.optim.Optimizer; what it cannot honour is an error that says so."""

from __future__ import annotations

import pytest
import torch
from hybrid_helpers import (
    FRACTIONS,
    HYPER,
    Reference,
    assert_same_state,
    assert_same_weights,
    build,
    loss_of,
    make,
    offloaded_by_rule,
    pair,
    plain,
    train,
)
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from forebay import HybridDeviceOptimizer
from forebay.engine.sim import SimEngine

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


# Optimizer interface


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_scheduler_and_changed_groups(fraction):
    model, optimizer, twin, reference, engine = pair(fraction)
    schedulers = [CosineAnnealingLR(o, 6) for o in (optimizer, reference)]

    def changing(number, o):
        def change(step):
            o.param_groups[0]["weight_decay"] = 0.1 * step
            if step:
                schedulers[number].step()

        return change

    train(model, optimizer, engine=engine, before_step=changing(0, optimizer))
    train(twin, reference, before_step=changing(1, reference))
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"] != 1e-2
    assert_same_weights(model, twin)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_groups_with_their_own_values_and_extra_keys(fraction):
    def groups(model):
        named = list(model.named_parameters())
        return [
            {"params": [p for n, p in named if "linear" in n], "weight_decay": 0.3, "wd_mult": 1.0, "lr_mult": 2.0},
            {"params": (p for n, p in named if "linear" not in n), "lr": 3e-2, "wd_mult": 0.0, "lr_mult": 1.0},
        ]

    model, twin, engine = build(), build(), SimEngine(1)
    optimizer = make(groups(model), fraction, engine=engine)
    train(model, optimizer, engine=engine)
    train(twin, plain(groups(twin)))
    assert_same_weights(model, twin)
    assert [g["wd_mult"] for g in optimizer.state_dict()["param_groups"]] == [1.0, 0.0]
    assert optimizer.sub_optimizers[-1].param_groups[-1]["lr_mult"] == 1.0


def test_named_parameters():
    model, twin = build(), build()
    optimizer = make(model.named_parameters())
    train(model, optimizer)
    train(twin, plain(twin.parameters()))
    assert_same_weights(model, twin)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("masters", [False, True])
def test_decoupled_grad_takes_the_place_of_grad(fraction, masters):
    dtype = torch.bfloat16 if masters else torch.float32
    model, twin, engine = build(dtype=dtype), build(dtype=dtype), SimEngine(2)
    optimizer = make(model.parameters(), fraction, engine=engine, param_update_in_fp32=masters)
    reference = Reference(twin.parameters(), fraction, AdamW, AdamW, masters=masters, **HYPER)
    generator = torch.Generator().manual_seed(0)
    grads = [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(4)]
    with engine.watch():
        for step in grads:
            for param, grad in zip(model.parameters(), step, strict=True):
                param.decoupled_grad = grad
                param.grad = torch.full_like(param, 100.0)
            optimizer.step()
            optimizer.zero_grad()
    for step in grads:
        for param, grad in zip(twin.parameters(), step, strict=True):
            reference.inner[param].grad = grad.clone()
        for o in reference.optimizers:
            o.step()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, reference.inner[other].to(dtype))
        assert param.grad is None
        assert param.decoupled_grad is None


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_without_gradient_nothing_advances(fraction):
    skip = {0: (1,), 2: (0, 1), 3: (2,)}
    model, optimizer, twin, reference, engine = pair(fraction)
    train(model, optimizer, skip=skip, engine=engine)
    train(twin, reference, skip=skip)
    assert_same_weights(model, twin)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_state(optimizer.state[param], reference.state[other])
    assert optimizer.state[model.blocks[1].scale]["step"] == 3


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_frozen_parameters_take_no_memory_and_can_be_unfrozen(fraction):
    model, twin, engine = build(), build(), SimEngine(4)
    for m in (model, twin):
        m.blocks[0].requires_grad_(False)
    optimizer, reference = make(model.parameters(), fraction, engine=engine), plain(twin.parameters())
    trainable = [p for p in model.parameters() if p.requires_grad]
    chosen = offloaded_by_rule(trainable, fraction)
    inner = [p for o in optimizer.cpu_optimizers for g in o.param_groups for p in g["params"]]
    assert [p.shape for p in inner] == [p.shape for p in chosen]
    for first in (0, 5):
        train(model, optimizer, first=first, engine=engine)
        train(twin, reference, first=first)
        assert_same_weights(model, twin)
        for m in (model, twin):
            m.blocks[0].requires_grad_(True)
    assert set(optimizer.state) == set(model.parameters())


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_add_param_group_after_steps(fraction):
    def run(make_optimizer, engine=None):
        model = build()
        optimizer = make_optimizer(model.blocks[:2].parameters())
        train(model, optimizer, steps=2, engine=engine)
        optimizer.add_param_group({"params": model.blocks[2].parameters(), "lr": 5e-2})
        train(model, optimizer, steps=3, first=2, engine=engine)
        return model, optimizer

    engine = SimEngine(6)
    model, optimizer = run(lambda params: make(params, fraction, engine=engine), engine)
    twin, _ = run(plain)
    assert_same_weights(model, twin)
    old, new = list(model.blocks[:2].parameters()), list(model.blocks[2].parameters())
    so_far = sum(p.numel() for p in offloaded_by_rule(old, fraction))
    total = sum(p.numel() for p in old + new)
    for param in new:
        if so_far < fraction * total:
            so_far += param.numel()
    inner = [p for o in optimizer.cpu_optimizers for g in o.param_groups for p in g["params"]]
    assert sum(p.numel() for p in inner) == so_far


def test_closure_runs_once_with_gradients_and_its_loss_is_returned():
    model, optimizer, twin, reference, engine = pair()
    calls = []

    def closure_for(m, o):
        def closure():
            calls.append(torch.is_grad_enabled())
            o.zero_grad()
            loss = loss_of(m, 0)
            loss.backward()
            return loss

        return closure

    with engine.watch():
        loss = optimizer.step(closure_for(model, optimizer))
    assert calls == [True]
    assert torch.equal(loss, reference.step(closure_for(twin, reference)))
    assert_same_weights(model, twin)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    model, optimizer, *_ = pair()
    loss_of(model, 0).backward()
    param = model.blocks[0].scale
    param.decoupled_grad = torch.ones_like(param)
    optimizer.zero_grad(set_to_none)
    for grad in (*(p.grad for p in model.parameters()), param.decoupled_grad):
        assert grad is None if set_to_none else not grad.any()


def test_step_hooks_and_repr():
    model, optimizer, *_ = pair()
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, steps=1)
    assert calls == ["before", "after"]
    assert "weight_decay: 0.1" in repr(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)


# Errors


class NeedsClosure(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure):
        return closure()


def parameters():
    return [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"offload_fraction": 1.5}, ValueError, r"offload_fraction must be between 0.0 and 1.0, got 1.5: .*use 0.0"),
        ({"offload_fraction": -0.1}, ValueError, r"between 0.0 and 1.0, got -0.1"),
        ({"offload_fraction": float("nan")}, ValueError, r"between 0.0 and 1.0, got nan"),
        ({"params": []}, ValueError, r"no parameters to optimize: params is empty"),
        ({"params": [{"params": []}]}, ValueError, r"no parameters to optimize"),
        ({"params": torch.zeros(3)}, TypeError, r"params is a single tensor; give a list"),
        ({"params": ["weight"]}, TypeError, r"params must be tensors, .* got 'weight'"),
        ({"cpu_optimizer_cls": dict}, TypeError, r"cpu_optimizer_cls must be a subclass of torch.optim.Optimizer, got"),
        ({"gpu_optimizer_cls": "AdamW"}, TypeError, r"gpu_optimizer_cls must be a subclass .* pass the class itself"),
        ({"cpu_optimizer_cls": NeedsClosure}, ValueError, r"cpu_optimizer_cls=NeedsClosure evaluates a closure"),
        (
            {"momentums": 0.9},
            ValueError,
            r"unknown argument 'momentums': neither cpu_optimizer_cls=SGD nor gpu_optimizer_cls=AdamW takes it; "
            r"valid arguments are .*momentum",
        ),
        ({"lr": -1.0}, ValueError, r"[Ii]nvalid learning rate"),
        ({"betas": (1.5, 0.9)}, ValueError, r"beta"),
        ({"capturable": True}, ValueError, r"capturable=True needs all state on the device, but offload_fraction=0.5"),
        ({"differentiable": True}, ValueError, r"differentiable=True is not possible here"),
        ({"params": [nn.Parameter(torch.zeros(4, 4)[:, ::2])]}, ValueError, r"gaps or overlaps .* make it contiguous"),
        (
            {"params": [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))]},
            ValueError,
            r"must be on one device, but one is on meta and others on cpu; move the model",
        ),
        (
            {"engine": SimEngine(device=torch.device("meta"))},
            ValueError,
            r"parameters are on cpu but the engine drives",
        ),
    ],
)
def test_wrong_arguments(arguments, error, text):
    defaults = {"params": parameters(), "cpu_optimizer_cls": SGD, "gpu_optimizer_cls": AdamW}
    with pytest.raises(error, match=text):
        HybridDeviceOptimizer(**(defaults | arguments))


def test_group_that_cannot_be_placed_is_not_added(monkeypatch):
    model, optimizer, twin, reference, _ = pair(1.0)

    def no_memory(*_, **__):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._engine, "empty_host", no_memory)
        with pytest.raises(MemoryError, match="none left"):
            optimizer.add_param_group({"params": parameters()})
    train(model, optimizer)
    train(twin, reference)
    assert_same_weights(model, twin)


def test_sparse_gradient():
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = make(embedding.parameters(), 1.0)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"shape \(5, 3\) is torch.sparse_coo, .* use sparse=False"):
        optimizer.step()


def test_gradient_of_another_shape():
    param = nn.Parameter(torch.zeros(4))
    optimizer = make([param], 1.0)
    param.decoupled_grad = torch.zeros(5)
    with pytest.raises(ValueError, match=r"shape \(4,\) on cpu has shape \(5,\) and is on cpu"):
        optimizer.step()


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("masters", [False, True])
def test_model_converted_after_construction(fraction, masters):
    model = build(dtype=torch.bfloat16)
    optimizer = make(model.parameters(), fraction, param_update_in_fp32=masters)
    model.float()
    loss_of(model, 0).backward()
    with pytest.raises(
        ValueError, match=r"torch.bfloat16 on cpu when .* torch.float32 on cpu now.*build the optimizer"
    ):
        optimizer.step()


def test_master_of_another_shape():
    model = build(dtype=torch.bfloat16)
    optimizer = make(model.parameters(), 1.0, param_update_in_fp32=True)
    train(model, optimizer, steps=1)
    state_dict = optimizer.state_dict()
    state_dict["state"][0] = {**state_dict["state"][0], "master_param": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"master_param has shape \(5,\) where the parameter has \(12,\)"):
        optimizer.load_state_dict(state_dict)
    assert len(optimizer.state) == 9  # nothing was changed


def test_state_dict_of_another_model():
    optimizer = pair()[1]
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(plain(parameters()).state_dict())
