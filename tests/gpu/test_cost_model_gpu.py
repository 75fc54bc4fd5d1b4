"""Calibration on the CUDA engine: it gives everything back, and training with its division is bitwise the same."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tiny import assert_bitwise, build, train, weights

import forebay
from forebay.engine.cuda import CudaEngine
from forebay.optim import cost_model

pytestmark = pytest.mark.gpu


def test_measures_and_gives_its_memory_back(capsys):
    engine = CudaEngine(torch.device("cuda"))
    before = torch.cuda.memory_allocated()
    rates = cost_model.calibrate(engine)
    engine.synchronize()
    assert all(0 < rate < math.inf for rate in dataclasses.astuple(rates))
    assert engine.ledger.num_bytes() == 0
    assert torch.cuda.memory_allocated() == before
    with capsys.disabled():
        element = cost_model.ElementBytes(2.0, 10.0)
        print(f"\n{rates}: host share {cost_model.best_host_share(element, rates):.3f}")


def test_training_with_the_calibrated_division():
    def go(**kwargs):
        model = build(torch.bfloat16, "cuda", width=512)
        optimizer = forebay.AdamW(model.parameters(), chunk_elements=1 << 18, **kwargs)
        optimizer.attach(model)
        return train(model, optimizer, num_steps=6, max_norm=0.1), weights(model)

    expected, expected_weights = go()
    losses, actual = go(offload_fraction=1.0, host_share="calibrated")
    assert torch.equal(losses, expected)
    assert_bitwise(actual, expected_weights)
