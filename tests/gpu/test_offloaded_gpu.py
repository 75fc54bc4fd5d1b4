"""Any optimizer class, streamed on the GPU: bitwise equal to the same class without offload."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_bitwise, build, train, weights

import forebay
from forebay.engine.cuda import CudaEngine
from forebay.optim.device_momentum import MomentumValues, momentum

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "values",
    [
        MomentumValues(False, 1e-2, 0.1, 0.9, 0.2, False, False),
        MomentumValues(False, 1e-2, 0.0, 0.9, 0.0, True, True),
        MomentumValues(False, 1e-2, 0.1, 0.0, 0.0, False, False),
        MomentumValues(True, 1e-2, 0.1, 0.9, 0.99, False, False),
    ],
)
def test_triton_gives_the_bits_of_torch_operations(dtype, values):
    generator = torch.Generator().manual_seed(0)
    num_elements = 100_003
    weight = torch.randn(num_elements, generator=generator).to(dtype)
    grad = torch.randn(num_elements, generator=generator).to(dtype)
    fields = {}
    if dtype is torch.bfloat16:
        fields["remainder"] = torch.randint(-(2**15), 2**15, (num_elements,), generator=generator).to(torch.int16)
    if dtype is torch.float16:
        fields["master"] = weight.float()
    results = []
    for device in ("cpu", "cuda"):
        own = [weight.to(device, copy=True), {k: v.to(device, copy=True) for k, v in fields.items()}]
        moment = torch.zeros(num_elements, device=device)
        for step in range(3):
            scale = torch.tensor([0.37], device=device)
            count = torch.tensor(float(step), device=device)
            momentum(own[0], grad.to(device), own[1], moment, count, values, scale, None)
        results.append([own[0].cpu(), moment.cpu(), *(value.cpu() for value in own[1].values())])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("placement", ["streamed", "host", "auto"])
@pytest.mark.parametrize("optimizer_class", [forebay.SGD, forebay.Lion])
def test_momentum_optimizers_are_bitwise_device(optimizer_class, placement):
    def run(**kwargs):
        model = build(torch.bfloat16, "cuda", width=1024, num_blocks=4)
        extra = {"momentum": 0.9} if optimizer_class is forebay.SGD else {}
        optimizer = optimizer_class(model.parameters(), lr=1e-4, chunk_elements=1 << 20, **extra, **kwargs)
        optimizer.attach(model)
        return train(model, optimizer, num_steps=6, max_norm=0.1), weights(model)

    expected, expected_weights = run()
    losses, actual = run(offload_fraction=1.0, placement=placement)
    assert torch.equal(losses, expected)
    assert_bitwise(actual, expected_weights)
