"""Runs a script with the optimizer under test and with plain torch, and compares what it did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import tiny
import torch
from torch import nn

from . import Differs, Maker

LR = 1e-2
# Two correct implementations round differently, by about eps of each result. Gradients of the next step then differ by
# about eps of the largest, which is a relative sqrt(eps) of one that is sqrt(eps) as large, and AdamW's update is the
# gradient over its own size. So changes of weights, and moments, may differ by sqrt(eps) of the tensor's largest.
RELATIVE = math.sqrt(torch.finfo(torch.float32).eps)
# A weight itself may be rounded differently in each of the few steps of a script.
ROUNDINGS = 8


class Model(nn.Module):
    """An embedding, two blocks and a head: few operations, since the simulator watches each."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        width = tiny.WIDTH
        self.embedding = nn.Embedding(tiny.VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width, bias=False)) for _ in range(2)
        )
        self.head = nn.Linear(width, tiny.VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


class Side:
    """One of the two runs: a model, and how to make its optimizer."""

    def __init__(self, make: Maker | None, device: str, dtype: torch.dtype, *, masters: bool, tied: bool) -> None:
        self._make = make
        self._masters = masters
        self.device = device
        self._dtype, self._tied = dtype, tied
        self.model = self.new_model()

    def new_model(self) -> nn.Module:
        """Return a model with the weights that every run starts from."""
        torch.manual_seed(0)
        return Model(tied=self._tied).to(device=self.device, dtype=self._dtype)

    def optimizer(self, params: Any = None, *, other_fraction: bool = False, **adamw: Any) -> torch.optim.Optimizer:
        """Return the optimizer of this side for ``params``, by default all of the model's.

        ``other_fraction`` asks for a fraction other than the tested one (to load state across fractions).
        """
        params = self.model.parameters() if params is None else params
        adamw = {"lr": LR, "weight_decay": 0.1, **adamw}
        if self._make is not None:
            fraction = self._make.fraction
            other = 1.0 if fraction == 0 else 0.0
            return self._make(params, other if other_fraction else fraction, **adamw)
        return MasterAdamW(params, **adamw) if self._masters else torch.optim.AdamW(params, **adamw)

    def loss(self, step: int, micro: int = 0, model: nn.Module | None = None) -> torch.Tensor:
        """Return the loss on a batch that ``step`` and ``micro`` determine."""
        return tiny.loss_of(self.model if model is None else model, tiny.batch(10 * step + micro, self.device))

    def train(
        self, optimizer: torch.optim.Optimizer, steps: range, between: Callable[[int], Any] | None = None
    ) -> None:
        """Take ordinary steps; ``between(step)`` runs between backward and the update."""
        for step in steps:
            optimizer.zero_grad()
            self.loss(step).backward()
            if between is not None:
                between(step)
            optimizer.step()


class MasterAdamW(torch.optim.AdamW):
    """Plain torch on fp32 copies of low-precision parameters: the usual mixed-precision recipe."""

    def __init__(self, params: Any, **adamw: Any) -> None:
        self.models = list(params)
        super().__init__([param.detach().float().clone() for param in self.models], **adamw)
        self.masters = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param, master in zip(self.models, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        super().step(closure)
        for param, master in zip(self.models, self.masters, strict=True):
            param.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.models:
            param.grad = None


def compare(
    make: Maker,
    script: Callable[[Side], dict[str, Any] | None],
    *,
    dtype: torch.dtype = torch.float32,
    masters: bool = False,
    tied: bool = False,
) -> tuple[Side, Side]:
    """Run ``script`` on both sides; compare the models after it, and what it returns, a dict of observations.

    Tensors in observations, nested or not, are compared within the tolerance above; all else must be equal.
    ``masters`` makes the reference plain torch on fp32 copies.

    Returns:
        The side under test and the reference.

    Raises:
        Differs: with a sentence that says what is not the same.
    """
    ours = Side(make, make.device, dtype, masters=masters, tied=tied)
    before = {name: value.clone() for name, value in ours.model.state_dict().items()}
    with make.watch():
        observed = script(ours) or {}
    torchs, expected = _reference(script, make.device, dtype, masters=masters, tied=tied)
    assert observed.keys() == expected.keys(), "a script observes the same on both sides"
    for what, value in expected.items():
        _compare_observation(what, observed[what], value)
    compare_weights(ours.model, torchs.model, before)
    return ours, torchs


_references: dict[tuple[Any, ...], tuple[Side, dict[str, Any]]] = {}


def _reference(script: Callable[[Side], Any], device: str, dtype: torch.dtype, **options: bool) -> tuple[Side, dict]:
    # It does not depend on the optimizer under test, so one run serves all fractions.
    key = (script.__module__, script.__qualname__, device)
    if key not in _references:
        side = Side(None, device, dtype, **options)
        _references[key] = (side, script(side) or {})
    return _references[key]


def compare_weights(ours: nn.Module, torchs: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Compare weights by how far training from ``before`` took them."""
    after = ours.state_dict()
    for name, expected in torchs.state_dict().items():
        eps = torch.finfo(expected.dtype).eps
        expected, actual, start = expected.double(), after[name].double(), before[name].double()
        way = (expected - start).abs().max()
        error = (actual - expected).abs()
        worst = (error - ROUNDINGS * eps * expected.abs()).max()
        if not worst <= RELATIVE * way:
            raise Differs(
                f"weight {name} is up to {error.max().item():.1e} away from where torch takes it "
                f"(torch moves it by up to {way.item():.1e})"
            )


def _compare_observation(what: str, actual: Any, expected: Any) -> None:
    for (path, got), (expected_path, wanted) in zip(_leaves(what, actual), _leaves(what, expected), strict=False):
        if path != expected_path:
            raise Differs(f"there is {path} where torch has {expected_path}")
        if isinstance(wanted, torch.Tensor):
            _compare_tensor(path, got, wanted)
        elif isinstance(got, torch.Tensor) or got != wanted:
            raise Differs(f"{path}: {got!r} instead of {wanted!r}")


def _compare_tensor(path: str, actual: Any, expected: torch.Tensor) -> None:
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        raise Differs(f"{path}: {actual!r} instead of a tensor of shape {tuple(expected.shape)}")
    if not torch.isfinite(actual).all():
        raise Differs(f"{path} is not finite")
    error = (actual.detach().cpu().double() - expected.detach().cpu().double()).abs().max().item()
    if error > RELATIVE * expected.detach().abs().max().item():
        raise Differs(f"{path} is {error:.1e} away from torch's")


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield f"the keys of {path}", sorted(value, key=str)
        for key in sorted(value, key=str):
            yield from _leaves(f"{path}[{key!r}]", value[key])
    elif isinstance(value, (list, tuple)):
        yield f"the length of {path}", len(value)
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    else:
        yield path, value


def moments(state_dict: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return of a state dict's state what torch's schema has; an optimizer may add entries of its own."""
    return {
        number: {key: entry.get(key) for key in ("step", "exp_avg", "exp_avg_sq")}
        for number, entry in state_dict["state"].items()
    }


def direction(param: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a fixed random tensor like ``param``, of values whose size is about 1 and never near 0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(param.shape, generator=generator) + 0.5
    signs = torch.randint(2, param.shape, generator=generator) * 2 - 1
    return (values * signs).to(device=param.device, dtype=param.dtype)


def linear_loss(model: nn.Module) -> torch.Tensor:
    """Return a loss whose gradient does not depend on the weights, nor therefore on how they were rounded."""
    terms = [(param * direction(param, seed)).sum().float() for seed, param in enumerate(model.parameters())]
    return torch.stack(terms).sum()
