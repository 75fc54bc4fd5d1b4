"""Models whose layers save tensors of many kinds, and a step that runs them with and without offloading."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn

import forebay
from forebay.engine.sim import SimEngine

WIDTH = 16
SLAB_BYTES = 1 << 16
SEEDS = range(50)
MIXED = ["offload", "recompute_offloaded_input", "recompute", "offload", "keep"]  # for a model of five layers


class Block(nn.Module):
    """Attention and a gated MLP with dropout; ``position`` is shared by all layers, as rotary embeddings are."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, hidden: torch.Tensor, *, position: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)  # slices with gaps, of one storage
        if position is not None:
            query, key = query * position, key * position
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        hidden = hidden + self.dropout(self.out(weights @ value))
        gate, up = self.up(hidden * self.scale).chunk(2, dim=-1)
        return hidden + self.down(nn.functional.silu(gate) * up)


class Model(nn.Module):
    """Embedding, blocks and a head; ``tied`` makes the head's weight the embedding's."""

    def __init__(self, num_layers: int = 4, *, tied: bool = False, block: type[nn.Module] = Block, **kwargs) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, WIDTH)
        self.layers = nn.ModuleList(block(**kwargs) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 31, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        position = torch.linspace(0.5, 1.5, tokens.shape[1])[:, None].expand(-1, WIDTH).clone()
        for layer in self.layers:
            hidden = layer(hidden, position=position)
        return self.head(hidden)


def build(num_layers: int = 4, **kwargs) -> Model:
    torch.manual_seed(0)
    return Model(num_layers, **kwargs)


def tokens(step: int = 0, length: int = 7) -> torch.Tensor:
    return torch.randint(31, (2, length), generator=torch.Generator().manual_seed(100 + step))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def offload(model, policy="offload", *, seed: int = 0, engine: SimEngine | None = None, **kwargs):
    kwargs = {"min_offloaded_tensor_size": 1, "host_slab_bytes": SLAB_BYTES} | kwargs
    return forebay.offload_activations(model, policy, engine=engine or SimEngine(seed), **kwargs)


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert value.isfinite().all(), f"{name} proves nothing"
        assert torch.equal(actual[name], value), f"the gradient of {name} differs"


def run_apart(model: nn.Module, step, make=None, *, watched: bool = True):
    """Return what ``step(model, inside)`` gives on a copy of ``model``, offloaded by ``make(copy)`` if given.

    ``inside()`` is the context to run forward in. Afterwards nothing of the step may be left.
    """
    own = copy.deepcopy(model)
    torch.manual_seed(1)
    if make is None:
        return step(own, contextlib.nullcontext)
    made = make(own)
    with made.engine.watch() if watched else contextlib.nullcontext():
        result = step(own, lambda: made)
    assert_flat(made)
    return result


def check(model: nn.Module, step, policy="offload", *, seeds=SEEDS, watched: bool = True, **kwargs) -> None:
    """Under each seed, ``step`` with offloading gives the bits that it gives without."""
    expected = run_apart(model, step)
    assert expected, "the step has no result to compare"
    for seed in seeds:
        found = run_apart(model, step, lambda own, s=seed: offload(own, policy, seed=s, **kwargs), watched=watched)
        assert_equal(found, expected)


def assert_flat(made) -> None:
    """Nothing of a step is left: no buffer lent, nothing on the device, and no slab beyond the pool's."""
    made.engine.synchronize()
    assert made.num_host_buffers == 0
    traffic = made.engine.traffic()
    assert traffic.up_bytes <= traffic.down_bytes, "something came back twice"
    assert made.engine.ledger.num_bytes("device") == 0
    made.trim()
    assert made.engine.ledger.num_bytes() == 0
