"""forebay.OffloadedOptimizer: whatever the class, streaming its state changes no bit; what cannot be cut is refused."""

from __future__ import annotations

import copy
import io
import pickle

import lion_pytorch
import pytest
import torch
import transformers
from tiny import assert_bitwise, assert_nonfinite_step_changes_nothing, batch, build, loss_of, train, weights
from torch import nn

import forebay
from forebay.engine import Lane
from forebay.engine.sim import RaceError, SimEngine
from forebay.optim.streamed_share import StreamedShare

SEEDS = range(50)
CHUNK = 4096


class SignDescent(torch.optim.Optimizer):
    """A class of which forebay knows nothing: two state tensors, a counter, and a schedule of its own in the group."""

    def __init__(self, params, lr=1e-2, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay, "rounds": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["rounds"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["calls"] = 0
                    state["slow"] = torch.zeros_like(param)
                    state["flips"] = torch.zeros_like(param, dtype=torch.int32)
                state["calls"] += 1
                before = state["slow"].sign()
                state["slow"].mul_(group["decay"]).add_(param.grad)
                state["flips"] += (before != state["slow"].sign()).int()
                scale = group["lr"] / (state["calls"] ** 0.5 * group["rounds"] ** 0.1)
                param.sub_(state["slow"].sign() * scale / (1 + state["flips"]))


class Replacing(torch.optim.Optimizer):
    """Makes a new state tensor at every step, and writes to its gradient."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.clamp_(-0.01, 0.01)
                self.state[param]["mean"] = 0.5 * self.state[param].get("mean", 0.0) + param.grad
                param.sub_(self.param_groups[0]["lr"] * self.state[param]["mean"])


CLASSES = {
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "radam": (torch.optim.RAdam, {"lr": 1e-3}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-3}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-3}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
    "lion": (lion_pytorch.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "own": (SignDescent, {"decay": 0.8}),
    "replacing": (Replacing, {}),
}
NAMES = sorted(CLASSES)


def make(name, engine=None, *, dtype=torch.float32, **kwargs):
    optimizer_class, hyperparameters = CLASSES[name]
    model = build(dtype)
    kwargs = {"chunk_elements": CHUNK, "engine": engine or SimEngine(0)} | kwargs
    return model, forebay.OffloadedOptimizer(model.parameters(), optimizer_class, **kwargs, **hyperparameters)


def run(name, engine=None, *, attach=False, max_norm=None, steps=5, **kwargs):
    engine = engine or SimEngine(0)
    model, optimizer = make(name, engine, **kwargs)
    if attach:
        optimizer.attach(model)
    losses = train(model, optimizer, num_steps=steps, max_norm=max_norm, watch=engine)
    return losses, weights(model), optimizer


def plain(name, steps=5):
    """Train with the class itself."""
    optimizer_class, hyperparameters = CLASSES[name]
    model = build(torch.float32)
    optimizer = optimizer_class(model.parameters(), **hyperparameters)
    return train(model, optimizer, num_steps=steps), weights(model), optimizer


class TestUpdates:
    @pytest.mark.parametrize("name", NAMES)
    def test_fp32_is_the_class_itself(self, name):
        expected, expected_weights, reference = plain(name)
        losses, actual, optimizer = run(name, offload_fraction=0.7)
        # The same operations on pieces: vectorized loops may treat the ends of a piece differently in the last bit.
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        for key, value in expected_weights.items():
            torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-6)
        state = optimizer.state_dict()["state"]
        for index, entry in reference.state_dict()["state"].items():
            assert {k for k, v in state.get(index, {}).items() if v is not None} == {
                k for k, v in entry.items() if v is not None
            }
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(state[index][key], value, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["momentum", "nadam", "own"])
    def test_low_precision_has_fp32_masters(self, name, dtype):
        # Steps so small that a weight without a master would never move.
        param = nn.Parameter(torch.ones(5000, dtype=dtype))
        optimizer_class, hyperparameters = CLASSES[name]
        optimizer = forebay.OffloadedOptimizer(
            [param], optimizer_class, offload_fraction=0.5, engine=SimEngine(0), **{**hyperparameters, "lr": 1e-5}
        )
        master = nn.Parameter(torch.ones(5000))
        reference = optimizer_class([master], **{**hyperparameters, "lr": 1e-5})
        for _ in range(300):
            param.grad, master.grad = torch.ones_like(param), torch.ones_like(master)
            optimizer.step()
            reference.step()
        assert (param.detach().float() - master.detach()).abs().max() <= torch.finfo(dtype).eps / 2
        assert master.detach()[0] < 1 - 1e-4

    @pytest.mark.parametrize("seed", SEEDS)
    def test_streamed_is_bitwise_device(self, seed):
        name = NAMES[seed % len(NAMES)]
        kwargs = {"dtype": torch.bfloat16, "max_norm": [None, 0.1][seed % 2]}
        expected, expected_weights, _ = run(name, **kwargs)
        losses, actual, _ = run(
            name,
            SimEngine(seed),
            offload_fraction=[1.0, 0.5, 0.77][seed % 3],
            attach=seed % 4 > 0,
            overlap=seed % 5 > 0,
            **kwargs,
        )
        assert torch.equal(losses, expected)
        assert_bitwise(actual, expected_weights)

    def test_a_missing_wait_is_found(self, monkeypatch):
        def forgetful(self, state, slot):
            visit = fetch(self, state, slot)
            return type(visit)(visit.state, visit.buffer, self.engine.record(Lane.COMPUTE))

        fetch = StreamedShare._fetch
        monkeypatch.setattr(StreamedShare, "_fetch", forgetful)
        with pytest.raises(RaceError):
            run("nadam", offload_fraction=1.0, attach=True)


class TestInterface:
    def test_hyperparameters_reach_every_piece(self):
        results = []
        for fraction in (0.0, 0.6):
            model, optimizer = make("momentum", offload_fraction=fraction)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, batch(step)).backward()
                optimizer.step()
                scheduler.step()
            optimizer.synchronize()
            results.append(weights(model))
        assert_bitwise(results[1], results[0])
        reference_model = build(torch.float32)
        reference = torch.optim.SGD(reference_model.parameters(), **CLASSES["momentum"][1])
        scheduler = torch.optim.lr_scheduler.StepLR(reference, 1, gamma=0.5)
        for step in range(4):
            reference.zero_grad()
            loss_of(reference_model, batch(step)).backward()
            reference.step()
            scheduler.step()
        for key, value in weights(reference_model).items():
            torch.testing.assert_close(results[1][key], value, rtol=1e-5, atol=1e-6)

    def test_what_a_class_counts_in_its_groups_is_shown_and_counted_once(self):
        _, _, optimizer = run("own", offload_fraction=0.6, steps=5)
        assert optimizer.param_groups[0]["rounds"] == 5
        _, _, reference = plain("own", steps=5)
        assert optimizer.state_dict()["state"][0]["calls"] == reference.state_dict()["state"][0]["calls"] == 5

    def test_groups_with_different_state(self):
        def groups(model):
            params = list(model.parameters())
            return [{"params": params[:3]}, {"params": params[3:], "momentum": 0.9, "lr": 1e-3}]

        model, reference_model = build(torch.float32), build(torch.float32)
        optimizer = forebay.OffloadedOptimizer(
            groups(model), torch.optim.SGD, lr=1e-2, offload_fraction=0.5, chunk_elements=CHUNK, engine=SimEngine(3)
        )
        reference = torch.optim.SGD(groups(reference_model), lr=1e-2)
        torch.testing.assert_close(
            train(model, optimizer, num_steps=4), train(reference_model, reference, num_steps=4), rtol=1e-5, atol=1e-6
        )

    def test_a_group_that_needs_room_for_new_state_comes_too_late(self):
        model, optimizer = make("sgd")
        train(model, optimizer, num_steps=1)
        with pytest.raises(ValueError, match=r"makes SGD keep momentum_buffer.*add all groups before the first step"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(8))], "momentum": 0.9})
        assert len(optimizer.param_groups) == 1

    def test_add_param_group_later(self):
        model, optimizer = make("momentum", offload_fraction=0.5)
        train(model, optimizer, num_steps=1)
        extra = nn.Parameter(torch.ones(5000))
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
        extra.grad = torch.ones(5000)
        optimizer.step()
        optimizer.synchronize()
        # lr 0.5, gradient 1 + 0.1 * weight, nesterov: the gradient plus 0.9 of the first buffer.
        torch.testing.assert_close(extra.detach(), torch.full((5000,), 1 - 0.5 * 1.1 * 1.9))

    def test_params_without_a_gradient_in_some_steps(self):
        results = []
        for fraction in (0.0, 1.0):
            model, optimizer = make("adagrad", SimEngine(5), offload_fraction=fraction)
            for step in range(5):
                optimizer.zero_grad()
                loss_of(model, batch(step)).backward()
                if step % 2 == 0:
                    model.head.weight.grad = None
                optimizer.step()
            optimizer.synchronize()
            results.append((weights(model), optimizer.state_dict()["state"]))
        assert_bitwise(results[1][0], results[0][0])
        last = len(results[1][1]) - 1
        assert float(results[1][1][last]["step"]) == 2
        assert float(results[1][1][0]["step"]) == 5

    def test_nonfinite_gradient_leaves_everything_untouched(self):
        _, before, optimizer = run("nadam", offload_fraction=0.6, skip_nonfinite=True)
        assert_nonfinite_step_changes_nothing(optimizer, before, clip=False)

    def test_no_memory_is_held_between_steps(self):
        engine = SimEngine(0)
        _, _, optimizer = run("nadam", engine, offload_fraction=1.0)
        optimizer.placed._streamed.shrink(0)
        assert engine.ledger.num_bytes("device") == 0
        assert all(row.stand_in.numel() == 0 for row in optimizer.placed.rule._rows)


class TestState:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("target", [0.0, 1.0])
    def test_resumes_bit_for_bit_at_any_fraction(self, name, target):
        expected, expected_weights, _ = run(name, dtype=torch.bfloat16, steps=6)
        model, optimizer = make(name, dtype=torch.bfloat16, offload_fraction=0.6)
        train(model, optimizer, num_steps=3)
        stream = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
        stream.seek(0)
        saved = torch.load(stream, weights_only=True)
        other, resumed = make(name, dtype=torch.bfloat16, offload_fraction=target)
        other.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
        assert torch.equal(train(other, resumed, num_steps=3, first_step=3), expected[3:])
        assert_bitwise(weights(other), expected_weights)

    @pytest.mark.parametrize("name", NAMES)
    def test_loads_into_the_class_itself_and_back(self, name):
        expected, expected_weights, _ = plain(name, steps=4)
        optimizer_class, hyperparameters = CLASSES[name]
        model, optimizer = make(name, offload_fraction=0.6)
        train(model, optimizer, num_steps=2)
        plain_model = build(torch.float32)
        plain_model.load_state_dict(model.state_dict())
        reference = optimizer_class(plain_model.parameters(), **hyperparameters)
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(plain_model, reference, num_steps=1, first_step=2)
        other, resumed = make(name, offload_fraction=1.0)
        other.load_state_dict(plain_model.state_dict())
        resumed.load_state_dict(copy.deepcopy(reference.state_dict()))
        torch.testing.assert_close(train(other, resumed, num_steps=1, first_step=3), expected[3:], rtol=1e-5, atol=1e-6)
        for key, value in expected_weights.items():
            torch.testing.assert_close(weights(other)[key], value, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
    def test_copies_go_on_alike(self, copied):
        model, optimizer = make("nadam", offload_fraction=0.6)
        train(model, optimizer, num_steps=2)
        other = copied(optimizer)
        grads = [torch.randn_like(param) for param in model.parameters()]
        for one in (optimizer, other):
            for param, grad in zip(one.param_groups[0]["params"], grads, strict=True):
                param.grad = grad.clone()
            one.step()
            one.synchronize()
        for own, copied_param in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
            assert torch.equal(own, copied_param)


class Normalized(SignDescent):
    """Divides by a norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.sub_(0.1 * param.grad / param.grad.norm())


class TestRefused:
    @pytest.mark.parametrize(
        ("optimizer_class", "hyperparameters", "message"),
        [
            (Normalized, {}, r"Normalized is not elementwise: its weights come out differently.*HybridDeviceOptimizer"),
            (Normalized, {"lr": 0.0}, r"Normalized is not elementwise"),
            (transformers.Adafactor, {}, r"Adafactor keeps 'exp_avg_sq_row' of shape \(16,\)"),
            (torch.optim.LBFGS, {}, r"LBFGS.step\(\) cannot be called without a closure"),
            (torch.optim.SparseAdam, {}, r"SparseAdam"),
            (torch.optim.SGD, {"lr": -1.0}, r"Invalid learning rate: -1.0"),
        ],
    )
    def test_classes(self, optimizer_class, hyperparameters, message):
        with pytest.raises((ValueError, RuntimeError), match=message):
            forebay.OffloadedOptimizer(
                [nn.Parameter(torch.zeros(8))], optimizer_class, engine=SimEngine(0), **hyperparameters
            )

    def test_an_instance_instead_of_a_class(self):
        params = [nn.Parameter(torch.zeros(8))]
        with pytest.raises(ValueError, match=r"must be a subclass of torch\.optim\.Optimizer, such as"):
            forebay.OffloadedOptimizer(params, torch.optim.SGD(params), engine=SimEngine(0))

    def test_unknown_hyperparameter(self):
        with pytest.raises(TypeError, match="momentun"):
            forebay.OffloadedOptimizer(
                [nn.Parameter(torch.zeros(8))], torch.optim.SGD, engine=SimEngine(0), momentun=0.9
            )
