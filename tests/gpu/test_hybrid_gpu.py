"""HybridDeviceOptimizer on the CUDA engine: sizes at which a missing wait shows, with random delays on every lane."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hybrid_helpers import (
    Reference,
    SmallBuckets,
    assert_same_weights,
    build,
    check_against_reference,
    offloaded_by_rule,
    train,
)

from forebay import HybridDeviceOptimizer
from forebay.engine.cuda import CudaEngine
from forebay.host.ledger import Tier
from forebay.optim.host_adamw import HostAdamW

pytestmark = pytest.mark.gpu

WIDTH = 1536  # 7 M parameters
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
HYPER = {"lr": 1e-3, "weight_decay": 0.1}


def cuda_engine(delay_seed=None):
    return CudaEngine(torch.device("cuda"), delay_seed=delay_seed)


def make(model, fraction, cpu_cls=AdamW, gpu_cls=AdamW, *, engine=None, **kwargs):
    engine = engine or cuda_engine()
    return SmallBuckets(model.parameters(), fraction, cpu_cls, gpu_cls, engine=engine, **(HYPER | kwargs))


def model_of(dtype=torch.bfloat16):
    return build(WIDTH, dtype, "cuda")


@pytest.mark.parametrize("delay_seed", [None, *range(4)])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_equals_the_synchronous_reference(delay_seed, fraction, masters, overlap):
    optimizer = check_against_reference(
        cuda_engine(delay_seed),
        device="cuda",
        width=WIDTH,
        fraction=fraction,
        masters=masters,
        overlap=overlap,
        dtype=torch.bfloat16 if masters else torch.float32,
        skip={1: (0,), 2: (2,)},
        **HYPER,
    )
    chosen = set(offloaded_by_rule(optimizer.param_groups[0]["params"], fraction))
    for param, state in optimizer.state.items():
        for key in {"exp_avg", "exp_avg_sq", "master_param"} & set(state):
            assert state[key].device.type == ("cpu" if param in chosen else "cuda"), key


@pytest.mark.parametrize(
    ("cpu_cls", "gpu_cls", "kwargs"),
    [
        (HostAdamW, AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
        (HostAdamW, AdamW, {"lr": 1e-3, "fused": True}),
        (torch.optim.Adam, torch.optim.Adam, {"lr": 1e-3}),
        (SGD, SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_pairs_of_classes(cpu_cls, gpu_cls, kwargs):
    model, twin = model_of(), model_of()
    optimizer = SmallBuckets(
        model.parameters(), 0.5, cpu_cls, gpu_cls, param_update_in_fp32=True, engine=cuda_engine(0), **kwargs
    )
    cpu_kwargs = {key: value for key, value in kwargs.items() if key != "fused"}
    reference = Reference(twin.parameters(), 0.5, cpu_cls, gpu_cls, masters=True, cpu_kwargs=cpu_kwargs, **kwargs)
    assert torch.equal(train(model, optimizer), train(twin, reference))
    assert_same_weights(model, twin)


def test_defaults_and_pinned_memory():
    model, twin = model_of(), model_of()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, param_update_in_fp32=True, **HYPER)
    reference = Reference(twin.parameters(), 1.0, HostAdamW, AdamW, masters=True, **HYPER)
    assert torch.equal(train(model, optimizer), train(twin, reference))
    assert_same_weights(model, twin)
    assert all(master.is_pinned() for master in optimizer.param_to_fp32_param.values())
    assert all(slot.grad_memory.is_pinned() for slot in optimizer._slots.values())


def test_device_memory_holds_no_state_of_offloaded_parameters():
    model = model_of()
    optimizer = make(model, 1.0, param_update_in_fp32=True)
    train(model, optimizer, steps=2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    train(model, optimizer, steps=3, first=2)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert optimizer._engine.ledger.num_bytes(Tier.DEVICE) == 0


@pytest.mark.parametrize("after", [0.0, 0.5, 1.0])
def test_state_dict_round_trip_across_fractions(after):
    """A step of another class, on another device, follows, so only what was loaded is compared."""
    model, other = model_of(), model_of()
    optimizer = make(model, 0.5, param_update_in_fp32=True)
    train(model, optimizer, steps=3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = make(other, after, param_update_in_fp32=True, engine=cuda_engine(1))
    loaded.load_state_dict(torch.load(file, weights_only=True))
    other.load_state_dict(model.state_dict())
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[param].items():
            assert torch.equal(value.cpu(), loaded.state[twin][key].cpu()), key
            assert value.dtype == loaded.state[twin][key].dtype
    if after == 0.5:
        train(model, optimizer, first=3)
        train(other, loaded, first=3)
        assert_same_weights(model, other)
    else:
        train(other, loaded, first=3)


def test_deepcopy_and_writes_from_outside():
    model = model_of()
    optimizer = make(model, 0.5, param_update_in_fp32=True, engine=cuda_engine(2))
    train(model, optimizer, steps=2)
    twin, other = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (twin, other)):
        with torch.no_grad():
            for param in m.parameters():
                param.mul_(0.5)
        train(m, o, first=2)
    assert_same_weights(model, twin)
    for param, master in optimizer.param_to_fp32_param.items():
        assert torch.equal(master.to(param.device, param.dtype), param)


class FaultyEngine(CudaEngine):
    fault = None

    def wait(self, lane, event):
        if self.fault != (lane, event.lane):
            super().wait(lane, event)
