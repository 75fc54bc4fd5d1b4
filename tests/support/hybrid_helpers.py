"""A model, a synchronous reference and the comparisons that HybridDeviceOptimizer's tests share, on any engine."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from forebay import HybridDeviceOptimizer
from forebay.engine.sim import SimEngine


class SmallBuckets(HybridDeviceOptimizer):
    """Has several buckets for the small model; on a GPU, several for millions of elements."""

    bucket_bytes = 512


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x * self.scale.to(x.dtype)))


class Net(nn.Module):
    """Blocks of which a step may leave some out, so that their parameters have no gradient."""

    def __init__(self, width: int, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x, skip=()):
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x)
        return x


FRACTIONS = (0.0, 0.3, 0.5, 1.0)
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


def build(width=12, dtype=torch.float32, device="cpu", *, scales_in_fp32=False) -> Net:
    torch.manual_seed(0)
    model = Net(width).to(dtype)
    if scales_in_fp32:
        for block in model.blocks:
            block.scale.data = block.scale.data.float()
    return model.to(device)


def loss_of(model, step, skip=()):
    param = model.blocks[0].linear.weight
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, param.shape[0], generator=generator).to(param)
    return model(x, skip).float().square().mean()


def watching(engine):
    return engine.watch() if engine is not None and engine.kind == "sim" else contextlib.nullcontext()


def train(model, optimizer, *, steps=5, first=0, skip=None, engine=None, before_step=None):
    """Train; ``skip`` maps a step to the blocks left out, ``before_step(step)`` runs between backward and update."""
    losses = []
    with watching(engine):
        for step in range(first, first + steps):
            optimizer.zero_grad()
            loss = loss_of(model, step, (skip or {}).get(step, ()))
            loss.backward()
            if before_step is not None:
                before_step(step)
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses)


def offloaded_by_rule(params, fraction):
    """The placement rule of SPEC section 8, written down once more."""
    params = list(params)
    total, so_far, chosen = sum(p.numel() for p in params), 0, []
    for param in params:
        if so_far < fraction * total:
            chosen.append(param)
            so_far += param.numel()
    return chosen


class Reference:
    """What HybridDeviceOptimizer computes, without engine, buckets or overlap: every copy blocks."""

    def __init__(self, params, fraction, cpu_cls, gpu_cls, *, masters=False, cpu_kwargs=None, **kwargs) -> None:
        self.params = list(params)
        offloaded = set(offloaded_by_rule(self.params, fraction))
        self.inner = {}
        for param in self.params:
            inner = param.detach().cpu().clone() if param in offloaded else param.detach().clone()
            self.inner[param] = inner.float() if masters and param.dtype.itemsize < 4 else inner
        host = [self.inner[p] for p in self.params if p in offloaded]
        device = [self.inner[p] for p in self.params if p not in offloaded]
        self.optimizers = [cpu_cls(host, **(cpu_kwargs or kwargs))] if host else []
        self.optimizers += [gpu_cls(device, **kwargs)] if device else []

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for param, inner in self.inner.items():
            inner.grad = None if param.grad is None else param.grad.to(device=inner.device, dtype=inner.dtype)
        for optimizer in self.optimizers:
            optimizer.step()
        for param, inner in self.inner.items():
            param.copy_(inner)

    def state_of(self, param):
        inner = self.inner[param]
        return next((dict(o.state[inner]) for o in self.optimizers if inner in o.state), {})


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def assert_same_weights(actual, expected) -> None:
    actual, expected = weights(actual), weights(expected)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{name} differs"


def assert_same_state(actual, expected) -> None:
    """Compare two states of parameters, bit for bit; the master apart."""
    assert {key for key in actual if key != "master_param"} == set(expected)
    for key, value in expected.items():
        assert torch.equal(torch.as_tensor(actual[key]).cpu(), torch.as_tensor(value).cpu()), f"{key} differs"
        assert actual[key].dtype == value.dtype, key


def check_against_reference(
    engine,
    *,
    fraction,
    device="cpu",
    width=12,
    dtype=torch.float32,
    masters=False,
    overlap=True,
    cpu_cls=torch.optim.AdamW,
    gpu_cls=torch.optim.AdamW,
    optimizer_cls=SmallBuckets,
    steps=5,
    skip=None,
    **kwargs,
):
    """Train with HybridDeviceOptimizer and, apart from it, with the reference; weights, losses and state are equal."""
    kwargs = kwargs or HYPER
    model = build(width, dtype, device, scales_in_fp32=masters)
    optimizer = optimizer_cls(
        model.parameters(),
        fraction,
        cpu_cls,
        gpu_cls,
        param_update_in_fp32=masters,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        engine=engine,
        **kwargs,
    )
    losses = train(model, optimizer, steps=steps, skip=skip, engine=engine)
    engine.synchronize()

    expected = build(width, dtype, device, scales_in_fp32=masters)
    reference = Reference(expected.parameters(), fraction, cpu_cls, gpu_cls, masters=masters, **kwargs)
    assert torch.equal(losses, train(expected, reference, steps=steps, skip=skip))
    assert_same_weights(model, expected)
    for param, twin in zip(model.parameters(), expected.parameters(), strict=True):
        state = optimizer.state.get(param, {})
        assert_same_state(state, reference.state_of(twin))
        if masters and state:
            assert torch.equal(state["master_param"].cpu(), reference.inner[twin].cpu())
    return optimizer


def make(params, fraction=0.5, cpu_cls=torch.optim.AdamW, gpu_cls=torch.optim.AdamW, *, engine=None, **kwargs):
    return SmallBuckets(params, fraction, cpu_cls, gpu_cls, engine=engine or SimEngine(0), **(HYPER | kwargs))


def plain(params, **kwargs):
    return torch.optim.AdamW(params, foreach=False, **(HYPER | kwargs))


def pair(fraction=0.5, **kwargs):
    """Return a model with the hybrid optimizer and the same model with plain torch.optim.AdamW."""
    model, twin = build(), build()
    engine = SimEngine(3)
    return model, make(model.parameters(), fraction, engine=engine, **kwargs), twin, plain(twin.parameters()), engine
