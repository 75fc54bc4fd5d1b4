"""Low-precision moments on the GPU: Triton gives the bits of torch operations, and every placement the same."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_bitwise, build, train, weights

import forebay
from forebay.engine.cuda import CudaEngine
from forebay.optim import device_update, low_precision
from forebay.optim.low_precision import Noise

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_elements", [100_003, 1 << 16])
def test_triton_gives_the_bits_of_torch_operations(state_dtype, dtype, num_elements):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_elements, generator=generator).to(dtype)
    grad = torch.randn(num_elements, generator=generator).to(dtype)
    fields = {
        name: torch.zeros(field.num_values(num_elements), dtype=field.dtype)
        for some in (low_precision.moment_fields(state_dtype), low_precision.scale_fields(state_dtype))
        for name, field in some.items()
    }
    if dtype is torch.bfloat16:
        fields["remainder"] = torch.randint(-(2**15), 2**15, (num_elements,), generator=generator).to(torch.int16)
    values = device_update.GroupValues(1e-2, 0.1, 0.9, 0.95, 1e-8, False)
    row, scale = torch.tensor([0.999, 0.1, 0.5]), torch.tensor([0.37])
    copies = [(weight.to(d), grad.to(d), {k: v.to(d) for k, v in fields.items()}, d) for d in ("cpu", "cuda")]
    for step in range(3):
        key = low_precision.mix_keys(torch.tensor([step]))
        for w, g, f, d in copies:
            device_update.adamw(w, g, f, row.to(d), values, scale.to(d), None, Noise(key.to(d), 2**32 - 1000))
    assert torch.equal(copies[1][0].cpu(), copies[0][0])
    for name in fields:
        assert torch.equal(copies[1][2][name].cpu(), copies[0][2][name]), name


@pytest.mark.parametrize(
    ("state_dtype", "options"),
    [
        ("bf16", {"placement": "streamed"}),
        ("bf16", {"placement": "host"}),
        ("bf16", {"placement": "auto"}),
        ("8bit", {"placement": "streamed"}),
    ],
)
def test_placements_are_bitwise_device(state_dtype, options):
    def run(**kwargs):
        model = build(torch.bfloat16, "cuda", width=1024, num_blocks=4)
        engine = CudaEngine(torch.device("cuda"))
        optimizer = forebay.AdamW(
            model.parameters(), lr=1e-3, chunk_elements=1 << 20, state_dtype=state_dtype, engine=engine, **kwargs
        )
        optimizer.attach(model)
        return train(model, optimizer, num_steps=8, max_norm=0.1), weights(model)

    expected, expected_weights = run()
    losses, actual = run(offload_fraction=1.0, **options)
    assert torch.equal(losses, expected)
    assert_bitwise(actual, expected_weights)
