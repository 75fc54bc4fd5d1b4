"""forebay.AdamW on the CUDA engine: sizes at which a missing wait shows, with random delays on every lane."""

from __future__ import annotations

import io

import pytest
import torch
from tiny import assert_bitwise, batch, build, loss_of, train, weights

import forebay
from forebay.engine.cuda import CudaEngine
from forebay.host import kernels
from forebay.optim import device_update
from forebay.optim.options import plan_memory

pytestmark = pytest.mark.gpu

WIDTH = 1024
CHUNK = 1 << 20


def run(*, delay_seed=None, dtype=torch.bfloat16, attach=False, steps=8, max_norm=None, **kwargs):
    model = build(dtype, "cuda", width=WIDTH, num_blocks=4)
    engine = CudaEngine(torch.device("cuda"), delay_seed=delay_seed)
    kwargs = {"lr": 1e-3, "weight_decay": 0.1, "chunk_elements": CHUNK} | kwargs
    optimizer = forebay.AdamW(model.parameters(), engine=engine, **kwargs)
    if attach:
        optimizer.attach(model)
    losses = train(model, optimizer, num_steps=steps, max_norm=max_norm)
    return losses, weights(model), optimizer


@pytest.fixture(scope="module")
def resident():
    return {max_norm: run(max_norm=max_norm)[:2] for max_norm in (None, 0.1)}


def test_native_kernel_is_in_use():
    assert kernels.backend().startswith("native-")


@pytest.mark.parametrize("delay_seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("fraction", [0.3, 1.0])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_streamed_is_bitwise_device(delay_seed, fraction, max_norm, resident):
    losses, actual, _ = run(
        delay_seed=delay_seed, offload_fraction=fraction, placement="streamed", max_norm=max_norm, attach=True
    )
    assert torch.equal(losses, resident[max_norm][0])
    assert_bitwise(actual, resident[max_norm][1])


@pytest.mark.parametrize("delay_seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("host_share", [1.0, 0.4])
def test_host_is_bitwise_device(delay_seed, attach, host_share, resident):
    losses, actual, _ = run(
        delay_seed=delay_seed, attach=attach, offload_fraction=1.0, host_share=host_share, max_norm=0.1
    )
    assert torch.equal(losses, resident[0.1][0])
    assert_bitwise(actual, resident[0.1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_triton_gives_the_bits_of_torch_operations(dtype):
    generator = torch.Generator().manual_seed(0)
    num_elements = 100_003
    weight = torch.randn(num_elements, generator=generator).to(dtype)
    grad = torch.randn(num_elements, generator=generator).to(dtype)
    fields = {"exp_avg": torch.zeros(num_elements), "exp_avg_sq": torch.zeros(num_elements)}
    if dtype is torch.bfloat16:
        fields["remainder"] = torch.randint(-(2**15), 2**15, (num_elements,), generator=generator).to(torch.int16)
    if dtype is torch.float16:
        fields["master"] = weight.float()
    values = device_update.GroupValues(1e-2, 0.1, 0.9, 0.95, 1e-8, False)
    row = torch.tensor([0.999, 0.1, 0.5])
    scale = torch.tensor([0.37])
    copies = [(weight.to(d), grad.to(d), {k: v.to(d) for k, v in fields.items()}, d) for d in ("cpu", "cuda")]
    for w, g, f, d in copies:
        for _ in range(3):
            device_update.adamw(w, g, f, row.to(d), values, scale.to(d), None)
    masters = [device_update.read_master(w, f).cpu() for w, _, f, _ in copies]
    assert torch.equal(masters[1], masters[0])
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(copies[1][2][name].cpu(), copies[0][2][name])


@pytest.mark.parametrize("placement", ["streamed", "host"])
def test_nonfinite_gradient_leaves_everything_untouched(placement):
    _, before, optimizer = run(offload_fraction=0.6, placement=placement, skip_nonfinite=True, max_norm=1.0)
    params = optimizer.param_groups[0]["params"]
    for param in params:
        param.grad = torch.full_like(param, float("nan"))
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.synchronize()
    for param, (name, value) in zip(params, before.items(), strict=True):
        assert torch.equal(param, value), name
    assert float(optimizer.state_dict()["state"][0]["step"]) == 8


@pytest.mark.parametrize(("fraction", "placement"), [(0.0, "auto"), (1.0, "streamed"), (1.0, "host")])
def test_resumes_bit_for_bit_without_a_memory_spike(fraction, placement):
    def make(seed):
        model = build(torch.bfloat16, "cuda", width=WIDTH, num_blocks=4)
        optimizer = forebay.AdamW(
            model.parameters(), offload_fraction=fraction, placement=placement, chunk_elements=CHUNK
        )
        return model, optimizer

    model, optimizer = make(0)
    train(model, optimizer, num_steps=4)
    optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True, map_location="cpu")
    other, resumed = make(1)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    own = sum(p.nbytes for p in other.parameters()) + sum(
        plan_memory(other.parameters(), offload_fraction=fraction)["device"].values()
    )
    assert torch.cuda.max_memory_allocated() - before < own + 64 * 2**20
    expected = train(model, optimizer, num_steps=4, first_step=4)
    assert torch.equal(train(other, resumed, num_steps=4, first_step=4), expected)
    assert_bitwise(weights(other), weights(model))


def test_state_leaves_the_device():
    model = build(torch.bfloat16, "cuda", width=WIDTH, num_blocks=4)
    engine = CudaEngine(torch.device("cuda"))
    optimizer = forebay.AdamW(model.parameters(), offload_fraction=1.0, chunk_elements=CHUNK, engine=engine)
    before = torch.cuda.memory_allocated()
    loss_of(model, batch(0, "cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.engine.synchronize()
    for purpose in ("optimizer_state", "staging"):
        assert optimizer.engine.ledger.num_bytes("device", purpose) == 0
    assert torch.cuda.memory_allocated() - before < 16 * 2**20
