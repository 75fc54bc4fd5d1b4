"""Any optimizer class, streamed on the GPU: bitwise equal to the same class without offload."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_bitwise, build, train, weights

import forebay
from forebay.engine.cuda import CudaEngine

pytestmark = pytest.mark.gpu

CLASSES = {
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-4}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-4}),
    "fused": (torch.optim.Adam, {"lr": 1e-4, "fused": True}),
}


@pytest.mark.parametrize("delay_seed", [None, 0, 1])
@pytest.mark.parametrize("name", CLASSES)
def test_streamed_is_bitwise_device(name, delay_seed):
    optimizer_class, hyperparameters = CLASSES[name]

    def run(fraction, delay_seed):
        model = build(torch.bfloat16, "cuda", width=1024, num_blocks=4)
        optimizer = forebay.OffloadedOptimizer(
            model.parameters(),
            optimizer_class,
            offload_fraction=fraction,
            chunk_elements=1 << 20,
            engine=CudaEngine(torch.device("cuda"), delay_seed=delay_seed),
            **hyperparameters,
        )
        optimizer.attach(model)
        return train(model, optimizer, num_steps=6, max_norm=0.1), weights(model)

    expected, expected_weights = run(0.0, None)
    losses, actual = run(0.8, delay_seed)
    assert torch.equal(losses, expected)
    assert_bitwise(actual, expected_weights)
