"""Hundreds of steps with random delays on every stream, and long comparisons of the placements."""

from __future__ import annotations

import random

import pytest
import torch
from long_runs import irregular_run
from tiny import assert_bitwise, build, train, weights

import forebay
from forebay.engine.cuda import CudaEngine

pytestmark = pytest.mark.gpu

WIDTH = 512  # 4 M parameters
CHUNK = 1 << 19


def optimizer_for(model, engine, **kwargs):
    kwargs = {"lr": 1e-3, "weight_decay": 0.1, "chunk_elements": CHUNK, "engine": engine} | kwargs
    optimizer = forebay.AdamW(model.parameters(), **kwargs)
    optimizer.attach(model)
    return optimizer


class ComputeDelays:
    """Spins on the compute stream, on some calls; the engine does the same on its own streams."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def __call__(self):
        cycles = self._random.choice([0, 0, 0, 200_000, 2_000_000])
        if cycles:
            torch.cuda._sleep(cycles)


def irregular(*, delay_seed=None, **kwargs):
    model = build(torch.bfloat16, "cuda", width=WIDTH)
    engine = CudaEngine(torch.device("cuda"), delay_seed=delay_seed)
    optimizer = optimizer_for(model, engine, skip_nonfinite=True, **kwargs)
    interrupt = ComputeDelays(delay_seed) if delay_seed is not None else lambda: None
    losses, found = irregular_run(model, optimizer, 500, interrupt=interrupt)
    engine.synchronize()
    return losses, found


@pytest.fixture(scope="module")
def undelayed():
    return irregular()


@pytest.mark.parametrize("host_share", [0.0, 0.5, 1.0])
def test_500_steps_with_delays_on_every_stream(host_share, undelayed):
    losses, found = irregular(delay_seed=int(10 * host_share), offload_fraction=1.0, host_share=host_share)
    assert torch.equal(losses, undelayed[0])
    assert_bitwise(found, undelayed[1])


def regular(**kwargs):
    model = build(torch.bfloat16, "cuda", width=WIDTH)
    optimizer = optimizer_for(model, CudaEngine(torch.device("cuda")), **kwargs)
    # At this norm every step clips.
    return train(model, optimizer, num_steps=200, max_norm=0.05), weights(model)


@pytest.fixture(scope="module")
def resident():
    return regular()


def test_200_steps_streamed_and_device_are_bitwise_equal(resident):
    losses, found = regular(offload_fraction=1.0, placement="streamed")
    assert torch.equal(losses, resident[0])
    assert_bitwise(found, resident[1])


def test_200_steps_host_and_device_have_the_same_loss(resident):
    losses, _ = regular(offload_fraction=1.0, placement="host")
    assert (losses - resident[0]).abs().max() < 0.001
