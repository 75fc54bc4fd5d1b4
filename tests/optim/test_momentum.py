"""forebay.SGD and forebay.Lion: the results of the usual classes, the same bits at every placement."""

from __future__ import annotations

import copy
import io
import pickle

import lion_pytorch
import pytest
import torch
from tiny import assert_bitwise, assert_nonfinite_step_changes_nothing, build, train, weights
from torch import nn

import forebay
from forebay.engine.sim import SimEngine
from forebay.host import kernels

SEEDS = range(50)
CHUNK = 4096
CASES = {
    "sgd": (forebay.SGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "momentum": (forebay.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2}),
    "nesterov": (forebay.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "maximize": (forebay.SGD, torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "maximize": True}),
    "lion": (forebay.Lion, lion_pytorch.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
}


def make(name, engine=None, *, dtype=torch.bfloat16, **kwargs):
    optimizer_class, _, hyperparameters = CASES[name]
    model = build(dtype)
    kwargs = {"chunk_elements": CHUNK, "engine": engine or SimEngine(0)} | kwargs
    return model, optimizer_class(model.parameters(), **hyperparameters, **kwargs)


def run(name, engine=None, *, attach=False, steps=6, max_norm=0.1, **kwargs):
    engine = engine or SimEngine(0)
    model, optimizer = make(name, engine, **kwargs)
    if attach:
        optimizer.attach(model)
    losses = train(model, optimizer, num_steps=steps, max_norm=max_norm, watch=engine)
    return losses, weights(model), optimizer


@pytest.mark.parametrize("placement", ["streamed", "host"])
@pytest.mark.parametrize("name", CASES)
def test_fp32_is_the_usual_class(name, placement):
    _, usual_class, hyperparameters = CASES[name]
    model = build(torch.float32)
    expected = train(model, usual_class(model.parameters(), **hyperparameters), num_steps=6)
    losses, actual, _ = run(name, dtype=torch.float32, max_norm=None, offload_fraction=0.7, placement=placement)
    # Operands are ordered differently in a few places; Lion's sign can flip where the mixture is all but zero.
    torch.testing.assert_close(losses, expected, rtol=1e-4 if name == "lion" else 1e-5, atol=1e-6)
    for key, value in weights(model).items():
        close = torch.isclose(actual[key], value, rtol=1e-5, atol=1e-6)
        assert close.float().mean() >= (0.99 if name == "lion" else 1.0), key


@pytest.mark.parametrize("seed", SEEDS)
def test_streamed_is_bitwise_device(seed):
    name = list(CASES)[seed % len(CASES)]
    expected, expected_weights, _ = run(name)
    losses, actual, _ = run(
        name,
        SimEngine(seed),
        offload_fraction=[1.0, 0.5, 0.77][seed % 3],
        placement="streamed",
        attach=seed % 4 > 0,
        overlap=seed % 7 > 0,
    )
    assert torch.equal(losses, expected)
    assert_bitwise(actual, expected_weights)


@pytest.mark.skipif(kernels.backend() == "torch", reason="only the native kernel promises the same bits")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_host_is_bitwise_device(name, dtype):
    expected, expected_weights, _ = run(name, dtype=dtype, steps=8)
    for seed, host_share in enumerate((1.0, 0.4)):
        losses, actual, _ = run(
            name, SimEngine(seed), dtype=dtype, steps=8, offload_fraction=0.9, host_share=host_share, attach=True
        )
        assert torch.equal(losses, expected)
        assert_bitwise(actual, expected_weights)


@pytest.mark.parametrize("placement", ["streamed", "host"])
@pytest.mark.parametrize("name", CASES)
def test_nonfinite_gradient_leaves_everything_untouched(name, placement):
    _, before, optimizer = run(name, offload_fraction=0.6, placement=placement, skip_nonfinite=True)
    assert_nonfinite_step_changes_nothing(optimizer, before)


def test_a_skipped_first_step_is_not_the_first():
    # The first update that is made copies the gradient, without dampening.
    results = []
    for placement, fraction in (("auto", 0.0), ("streamed", 1.0), ("host", 1.0)):
        param = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
        optimizer = forebay.SGD(
            [param],
            lr=0.5,
            momentum=0.9,
            dampening=0.5,
            skip_nonfinite=True,
            placement=placement,
            offload_fraction=fraction,
            engine=SimEngine(0),
        )
        for grad in (float("inf"), 1.0, 1.0):
            param.grad = torch.full_like(param, grad)
            optimizer.step()
        optimizer.synchronize()
        results.append(param.detach().clone())
    # 1 - 0.5 * 1 - 0.5 * (0.9 + 0.5), rounded.
    assert torch.equal(results[0], torch.full((5000,), -0.2, dtype=torch.bfloat16))
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("source", ["streamed", "host"])
@pytest.mark.parametrize("target", ["streamed", "host", "device"])
def test_resumes_bit_for_bit_in_any_placement(name, source, target):
    if kernels.backend() == "torch" and source != target:
        pytest.skip("only the native kernel promises the same bits")
    first = {"offload_fraction": 0.6, "placement": source}
    second = {"offload_fraction": 1.0, "placement": target} if target != "device" else {}
    expected, expected_weights, _ = run(name, max_norm=None, **first)
    model, optimizer = make(name, **first)
    train(model, optimizer, num_steps=3)
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    other, resumed = make(name, **second)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert torch.equal(train(other, resumed, num_steps=3, first_step=3), expected[3:])
    assert_bitwise(weights(other), expected_weights)


@pytest.mark.parametrize("name", CASES)
def test_state_is_the_usual_class_s(name):
    _, usual_class, hyperparameters = CASES[name]
    model = build(torch.float32)
    usual = usual_class(model.parameters(), **hyperparameters)
    train(model, usual, num_steps=2)
    other, optimizer = make(name, dtype=torch.float32, offload_fraction=0.6)
    train(other, optimizer, num_steps=2)
    expected, actual = usual.state_dict()["state"], optimizer.state_dict()["state"]
    for index, entry in expected.items():
        own = actual.get(index, {})
        assert own.keys() == {key for key, value in entry.items() if value is not None}
        for key, value in own.items():
            torch.testing.assert_close(value, entry[key], rtol=1e-5, atol=1e-6)
    usual.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(usual.state_dict()))
    assert optimizer.state_dict()["state"].keys() == actual.keys()


@pytest.mark.parametrize("name", CASES)
def test_copies(name):
    _, _, optimizer = run(name, offload_fraction=0.6, steps=2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        for index, entry in other.state_dict()["state"].items():
            assert_bitwise(entry, optimizer.state_dict()["state"][index])


@pytest.mark.parametrize(
    ("optimizer_class", "arguments", "error", "message"),
    [
        (forebay.SGD, {"lr": -1.0}, ValueError, r"lr must be 0 or more, not -1\.0"),
        (forebay.SGD, {"momentum": -0.1}, ValueError, r"momentum must be 0 or more"),
        (forebay.SGD, {"nesterov": True}, ValueError, r"nesterov=True needs momentum above 0 and dampening=0"),
        (forebay.Lion, {"betas": (0.9, 1.0)}, ValueError, r"betas must be two numbers in \[0, 1\)"),
        (forebay.Lion, {"offload_fraction": 1.5}, ValueError, r"offload_fraction must be between 0\.0 and 1\.0"),
        (forebay.Lion, {"eps": 1e-8}, TypeError, r"unknown argument 'eps'; choose from lr, betas, .*offload_fraction"),
    ],
)
def test_refused(optimizer_class, arguments, error, message):
    with pytest.raises(error, match=message):
        optimizer_class([nn.Parameter(torch.zeros(8))], **arguments)


def test_momentum_that_comes_too_late_is_refused():
    optimizer = forebay.SGD([nn.Parameter(torch.zeros(8))], lr=0.1, engine=SimEngine(0))
    with pytest.raises(ValueError, match=r"a group with momentum=0\.9 comes too late"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(8))], "momentum": 0.9})
