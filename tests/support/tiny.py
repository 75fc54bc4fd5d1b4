"""A small language model and a training loop that the optimizer tests share."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn

VOCABULARY = 61
WIDTH = 48  # so small that a step takes milliseconds; GPU tests use wider models


class TinyLM(nn.Module):
    """Embedding, two blocks of norm, linear and GELU, and a head; sizes that no chunk boundary divides."""

    def __init__(self, *, width: int = WIDTH, num_blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def build(dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **kwargs) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(**kwargs).to(device=device, dtype=dtype)


def batch(step: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (4, 17), generator=generator).to(device)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model, optimizer, *, num_steps=6, first_step=0, max_norm=None, micro_batches=1, watch=None):
    """Train and return the losses; ``watch`` is a SimEngine whose watch the steps run under."""
    losses = []
    device = next(model.parameters()).device
    with watch.watch() if watch is not None else contextlib.nullcontext():
        for step in range(first_step, first_step + num_steps):
            optimizer.zero_grad()
            for micro in range(micro_batches):
                loss = loss_of(model, batch(step * 10 + micro, device)) / micro_batches
                loss.backward()
            if max_norm is not None:
                clip = getattr(optimizer, "clip_grad_norm_", None)
                if clip is not None:
                    clip(max_norm)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            losses.append(loss.detach().clone())
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
        if watch is not None:
            watch.synchronize()
    return torch.stack(losses)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_bitwise(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{name} differs"


def assert_nonfinite_step_changes_nothing(optimizer, before: dict[str, torch.Tensor], *, clip: bool = True) -> None:
    """Make a step with NaN gradients, which ``skip_nonfinite`` leaves out; ``before`` are the weights so far."""
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    params = optimizer.param_groups[0]["params"]
    for param in params:
        param.grad = torch.full_like(param, float("nan"))
    if clip:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.synchronize()
    optimizer.engine.synchronize()
    for param, (name, value) in zip(params, before.items(), strict=True):
        assert torch.equal(param, value), name
    for index, entry in optimizer.state_dict()["state"].items():
        assert_bitwise(entry, saved[index])
