"""HybridDeviceOptimizer: bit for bit what the plain classes compute, under every seed of the simulator."""

from __future__ import annotations

import gc

import pytest
import torch
from hybrid_helpers import (
    FRACTIONS,
    HYPER,
    Reference,
    assert_same_state,
    assert_same_weights,
    build,
    check_against_reference,
    loss_of,
    make,
    offloaded_by_rule,
    plain,
    train,
)
from torch import nn

from forebay import HybridDeviceOptimizer
from forebay.engine import Lane
from forebay.engine.sim import RaceError, SimEngine
from forebay.host.ledger import Tier
from forebay.optim.host_adamw import HostAdamW

Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
SEEDS = range(50)


# Equality with the plain classes


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_equals_plain_adamw(seed, overlap):
    fraction = FRACTIONS[1 + seed % 3]
    model, twin, engine = build(), build(), SimEngine(seed)
    optimizer = make(model.parameters(), fraction, engine=engine, overlap_cpu_optimizer_d2h_h2d=overlap)
    reference = plain(twin.parameters())
    assert torch.equal(train(model, optimizer, engine=engine), train(twin, reference))
    assert_same_weights(model, twin)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_state(optimizer.state[param], reference.state[other])


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_a_loop_with_fp32_masters(seed):
    skip = {1: (0,), 3: (2,)}
    fraction = FRACTIONS[seed % 4]
    check_against_reference(SimEngine(seed), fraction=fraction, dtype=torch.bfloat16, masters=True, skip=skip)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_without_masters_updates_in_the_parameter_dtype(fraction, dtype):
    # The default eps is 0 in fp16.
    check_against_reference(SimEngine(7), fraction=fraction, dtype=dtype, lr=1e-2, eps=1e-4)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize(
    ("cpu_cls", "gpu_cls", "kwargs"),
    [
        (Adam, Adam, {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}),
        (AdamW, AdamW, {"lr": 1e-2, "amsgrad": True}),
        (AdamW, AdamW, {"lr": 1e-2, "fused": True}),
        (SGD, SGD, {"lr": 0.1}),
        (SGD, SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        # Each has its own default weight decay: 0 and 0.01.
        (Adam, AdamW, {"lr": 1e-2}),
        (torch.optim.Adagrad, torch.optim.RMSprop, {"lr": 1e-2}),
    ],
)
@pytest.mark.parametrize("masters", [False, True])
def test_pairs_of_classes(fraction, cpu_cls, gpu_cls, kwargs, masters):
    dtype = torch.bfloat16 if masters else torch.float32
    check_against_reference(
        SimEngine(11), fraction=fraction, cpu_cls=cpu_cls, gpu_cls=gpu_cls, masters=masters, dtype=dtype, **kwargs
    )


def test_each_class_gets_the_arguments_that_it_takes():
    model = build()
    optimizer = make(model.parameters(), 0.5, SGD, AdamW, momentum=0.9, betas=(0.8, 0.9))
    train(model, optimizer, steps=2)
    states = [set(optimizer.state[p]) for p in model.parameters()]
    assert states[0] == {"momentum_buffer"}
    assert states[-1] == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.cpu_optimizers[0].param_groups[0]["momentum"] == 0.9
    assert optimizer.gpu_optimizer.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("masters", [False, True])
def test_default_classes(masters):
    dtype = torch.bfloat16 if masters else torch.float32
    model, engine = build(dtype=dtype), SimEngine(5)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), param_update_in_fp32=masters, engine=engine, lr=1e-2, weight_decay=0.1
    )
    assert type(optimizer.cpu_optimizers[0]) is HostAdamW
    assert type(optimizer.gpu_optimizer) is AdamW
    losses = train(model, optimizer, engine=engine)
    twin = build(dtype=dtype)
    reference = Reference(twin.parameters(), 0.5, HostAdamW, AdamW, masters=masters, lr=1e-2, weight_decay=0.1)
    assert torch.equal(losses, train(twin, reference))
    assert_same_weights(model, twin)


def test_engine_is_found_by_device():
    model, twin = build(), build()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, AdamW, **HYPER)
    train(model, optimizer)
    train(twin, plain(twin.parameters()))
    assert_same_weights(model, twin)


def test_transposed_parameters_and_gradients_in_pieces():
    def run(make_optimizer):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(7, 5).t()), nn.Parameter(torch.randn(2, 3, 4, 5).permute(0, 3, 1, 2))]
        params.append(nn.Parameter(torch.randn(6)))
        optimizer = make_optimizer(params)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            params[0].grad = torch.randn(5, 7, generator=generator)
            params[1].grad = torch.randn(2, 3, 4, 10, generator=generator)[..., ::2].permute(0, 3, 1, 2)
            params[2].grad = torch.randn(1, generator=generator).expand(6)
            optimizer.step()
        return params

    actual, expected = run(lambda params: make(params, 1.0)), run(plain)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert all(a.stride() == b.stride() for a, b in zip(actual, expected, strict=True))


def test_empty_and_scalar_parameters():
    def run(make_optimizer):
        params = [nn.Parameter(torch.ones(shape)) for shape in ((3, 0), (), (2,))]
        optimizer = make_optimizer(params)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return params

    actual, expected = run(lambda params: make(params, 1.0)), run(plain)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_class_that_takes_only_matrices():
    torch.manual_seed(0)
    weight = torch.randn(6, 4)
    results = []
    for make_optimizer in (
        lambda params: HybridDeviceOptimizer(
            params, 0.5, torch.optim.Muon, torch.optim.Muon, engine=SimEngine(0), lr=0.1
        ),
        lambda params: torch.optim.Muon(params, lr=0.1),
    ):
        params = [nn.Parameter(weight.clone()) for _ in range(2)]
        optimizer = make_optimizer(params)
        for param in params:
            param.grad = weight.sin()
        optimizer.step()
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Placement and memory


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.3, 0.5, 0.77, 1.0])
def test_placement_follows_the_rule(fraction):
    model, engine = build(), SimEngine(0)
    optimizer = make(model.parameters(), fraction, engine=engine)
    train(model, optimizer, steps=1)
    expected = offloaded_by_rule(model.parameters(), fraction)
    elements = sum(p.numel() for p in expected)
    num_states = 2 * 4 * elements + 4 * len(expected)
    assert engine.ledger.num_bytes(Tier.PAGEABLE, "optimizer_state") == num_states
    on_cpu = [p for group in optimizer.cpu_optimizers for g in group.param_groups for p in g["params"]]
    assert sum(p.numel() for p in on_cpu) == elements
    assert (optimizer.gpu_optimizer is None) == (fraction == 1.0)
    assert (optimizer.cpu_optimizers == []) == (fraction == 0.0)
    assert optimizer.sub_optimizers == optimizer.cpu_optimizers + [o for o in [optimizer.gpu_optimizer] if o]


@pytest.mark.parametrize("pinned", [True, False])
def test_host_memory_is_exact_and_goes_with_the_optimizer(pinned):
    engine = SimEngine(0)
    params = [nn.Parameter(torch.randn(64, dtype=torch.bfloat16)) for _ in range(4)]
    optimizer = make(params, 1.0, engine=engine, param_update_in_fp32=True, pin_cpu_params=pinned, pin_cpu_grads=pinned)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    tier, num_elements = Tier.PINNED if pinned else Tier.PAGEABLE, 4 * 64
    assert engine.ledger.num_bytes(tier, "weights") == 2 * num_elements
    assert engine.ledger.num_bytes(tier, "gradients") == 2 * num_elements
    assert engine.ledger.num_bytes(tier, "master_weights") == 4 * num_elements
    assert engine.ledger.num_bytes(Tier.PAGEABLE, "optimizer_state") == 8 * num_elements + 4 * 4
    assert engine.ledger.num_bytes(Tier.DEVICE) == 0
    del optimizer
    gc.collect()
    assert engine.ledger.num_bytes() == 0


def test_device_memory_falls_with_the_fraction():
    def device_bytes(fraction):
        model, engine = build(dtype=torch.bfloat16), SimEngine(0)
        optimizer = make(model.parameters(), fraction, engine=engine, param_update_in_fp32=True)
        train(model, optimizer, steps=1)
        return engine.ledger.num_bytes(Tier.DEVICE)

    num_bytes = [device_bytes(fraction) for fraction in (0.0, 0.5, 1.0)]
    assert num_bytes[0] > num_bytes[1] > num_bytes[2] == 0


def test_buckets_only_with_overlap():
    def num_cpu_optimizers(**kwargs):
        return len(make(build().parameters(), 1.0, **kwargs).cpu_optimizers)

    assert num_cpu_optimizers(overlap_cpu_optimizer_d2h_h2d=True) == 4
    assert num_cpu_optimizers(overlap_cpu_optimizer_d2h_h2d=False) == 1


# Synchronisation


class FaultyEngine(SimEngine):
    """Leaves out what ``fault`` says: a wait of (lane, lane of the event), or waits for each bucket's own event."""

    fault = None

    def wait(self, lane, event):
        if self.fault == (lane, event.lane):
            return
        if self.fault == "first bucket's event for all" and lane is Lane.HOST:
            self.first = getattr(self, "first", event)
            event = self.first
        super().wait(lane, event)


FAULTS = {
    "down before the gradient is made": ((Lane.DOWN, Lane.COMPUTE), r"copy down .* reads memory that aten"),
    "update before the gradient arrives": (
        (Lane.HOST, Lane.DOWN),
        r"update of bucket 0 .* reads memory that copy down",
    ),
    "later bucket before its gradient arrives": (
        "first bucket's event for all",
        r"update of bucket 1 .* reads memory that copy down",
    ),
    "forward before the weight arrives": ((Lane.COMPUTE, Lane.UP), r"on lane 'compute' .* memory that copy up"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_in_the_step_is_caught(seed, masters, name):
    engine = FaultyEngine(seed)
    model = build(dtype=torch.bfloat16 if masters else torch.float32)
    optimizer = make(model.parameters(), 0.7, engine=engine, param_update_in_fp32=masters)
    engine.fault, text = FAULTS[name]
    with pytest.raises(RaceError, match=text):
        train(model, optimizer, steps=2, engine=engine)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ((Lane.DOWN, Lane.COMPUTE), r"copy down .* reads memory that aten"),
        ((Lane.HOST, Lane.DOWN), r"refresh masters .* reads memory that copy down"),
    ],
)
def test_planted_fault_in_the_refresh_is_caught(seed, masters, fault, text):
    engine = FaultyEngine(seed)
    model = build(dtype=torch.bfloat16 if masters else torch.float32)
    optimizer = make(model.parameters(), 1.0, engine=engine, param_update_in_fp32=masters)
    with engine.watch(), torch.no_grad():
        model.blocks[0].linear.weight.add_(1.0)
        engine.fault = fault
        with pytest.raises(RaceError, match=text):
            optimizer.state_dict()


class TracingEngine(SimEngine):
    """Notes what is enqueued, and which buckets' gradients have arrived when a bucket is updated."""

    def __init__(self, seed):
        super().__init__(seed)
        self.trace = []

    def record(self, lane):
        event = super().record(lane)
        self.trace.append((f"record {lane.value}", event))
        return event

    def host_task(self, task, reads=(), writes=()):
        run = task.work

        def traced():
            downs = [event for name, event in self.trace if name == "record down"]
            self.trace.append((task.label, [self._done[Lane.DOWN] >= event.position for event in downs]))
            run()

        task.work = traced
        super().host_task(task, reads, writes)

    def copy(self, lane, destination, source):
        self.trace.append((f"copy {lane.value}", None))
        super().copy(lane, destination, source)


def test_an_update_waits_only_for_its_own_gradients_and_runs_while_others_travel():
    engine = TracingEngine(0)  # seed 0 runs everything as late as possible
    model = build()
    optimizer = make(model.parameters(), 1.0, engine=engine)
    loss_of(model, 0).backward()
    engine.trace.clear()
    optimizer.step()
    arrived = [value for name, value in engine.trace if name.startswith("update")]
    assert arrived == [[index <= bucket for index in range(4)] for bucket in range(4)]
    names = [name for name, _ in engine.trace]
    first_up = names.index("copy up")
    assert names.index("update of bucket 0") < first_up < names.index("update of bucket 1")


def test_a_steady_step_moves_every_byte_once():
    engine = TracingEngine(1)
    model = build(dtype=torch.bfloat16)
    optimizer = make(model.parameters(), 0.5, engine=engine, param_update_in_fp32=True)
    train(model, optimizer, steps=3)
    engine.trace.clear()
    train(model, optimizer, steps=1)
    names = [name for name, _ in engine.trace]
    num_offloaded = len(offloaded_by_rule(model.parameters(), 0.5))
    assert names.count("copy down") == names.count("copy up") == num_offloaded
    assert names.count("refresh masters") == 0


def test_device_kernels_are_enqueued_before_the_host_is_busy():
    engine = TracingEngine(0)
    model = build()
    optimizer = make(model.parameters(), 0.5, engine=engine)
    optimizer.gpu_optimizer.register_step_pre_hook(lambda *_: engine.trace.append(("device update", None)))
    loss_of(model, 0).backward()
    engine.trace.clear()
    optimizer.step()
    names = [name for name, _ in engine.trace]
    assert names.index("record down") < names.index("device update") < names.index("update of bucket 0")


def test_uploads_are_waited_for_when_a_later_bucket_fails():
    engine = SimEngine(0)
    model = build()
    optimizer = make(model.parameters(), 1.0, engine=engine)
    before = [p.detach().clone() for p in model.parameters()]

    def fail(*_):
        raise RuntimeError("out of luck")

    handle = optimizer.cpu_optimizers[1].register_step_pre_hook(fail)
    with engine.watch():
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match="out of luck"):
            optimizer.step()
        changed = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert changed == [True, True, False, False, False, False, False, False, False]
    assert all(inner.grad is None for o in optimizer.cpu_optimizers for inner in o.param_groups[0]["params"])
    handle.remove()
    train(model, optimizer, steps=1, first=1, engine=engine)


def test_deleting_the_optimizer_waits_for_its_uploads():
    model = build()
    optimizer = make(model.parameters(), 1.0)
    loss_of(model, 0).backward()
    optimizer.step()
    calls = []

    class InFlight:
        def synchronize(self):
            calls.append("synchronize")

    optimizer._step._uploaded = InFlight()
    del optimizer
    gc.collect()
    assert calls == ["synchronize"]
