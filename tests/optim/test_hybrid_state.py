"""HybridDeviceOptimizer: state, saving and loading, copies, and writes to the parameters from outside."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hybrid_helpers import (
    FRACTIONS,
    SmallBuckets,
    assert_same_weights,
    build,
    make,
    pair,
    plain,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from forebay.engine.sim import SimEngine
from forebay.optim.host_adamw import HostAdamW

AdamW = torch.optim.AdamW


# State


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_state_is_keyed_by_the_users_parameters(fraction):
    model = build(dtype=torch.bfloat16, scales_in_fp32=True)
    optimizer = make(model.parameters(), fraction, param_update_in_fp32=True)
    assert len(optimizer.state) == 0
    assert optimizer.state_dict()["state"] == {}
    low = [p for p in model.parameters() if p.dtype is torch.bfloat16]
    assert set(optimizer.param_to_fp32_param) == set(low)
    for param in low:
        assert torch.equal(optimizer.param_to_fp32_param[param], param.float())
    train(model, optimizer, steps=2)
    for param in model.parameters():
        state = optimizer.state[param]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
        assert {state[key].dtype for key in state} == {torch.float32}
        assert state["step"] == 2
        assert torch.equal(state["master_param"].to(param.dtype), param)
        if param in optimizer.param_to_fp32_param:
            assert state["master_param"] is optimizer.param_to_fp32_param[param]


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("cpu_cls", [AdamW, HostAdamW])
def test_dummy_step_makes_state_and_changes_nothing_else(fraction, cpu_cls):
    model = build(dtype=torch.bfloat16)
    optimizer = make(model.parameters(), fraction, cpu_cls, param_update_in_fp32=True)
    train(model, optimizer, steps=1, skip={0: (1, 2)})
    old = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    assert 0 < len(old) < 9
    untouched = build(dtype=torch.bfloat16)
    untouched.load_state_dict(model.state_dict())
    optimizer.dummy_step()
    assert_same_weights(model, untouched)
    for param in model.parameters():
        state = optimizer.state[param]
        if param in old:
            assert all(torch.equal(state[key], old[param][key]) for key in state)
        else:
            assert set(state) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
            assert state["step"] == 1
            assert not state["exp_avg"].any()
            assert not state["exp_avg_sq"].any()
            assert torch.equal(state["master_param"], param.float())


def test_state_edited_by_the_user_is_used():
    model, optimizer, twin, reference, _ = pair(0.5)
    for m, o in ((model, optimizer), (twin, reference)):
        train(m, o, steps=2)
        for p in m.parameters():
            o.state[p]["exp_avg"].mul_(0.5)
            o.state[p]["exp_avg_sq"] = o.state[p]["exp_avg_sq"] * 2
        del o.state[m.blocks[0].scale]
        train(m, o, steps=2, first=2)
    assert_same_weights(model, twin)


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("before", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("after", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("cpu_cls", [AdamW, HostAdamW])
def test_state_dict_round_trip_across_fractions(before, after, cpu_cls):
    """Bit for bit: the same class on both sides goes on as if nothing had happened."""

    def start():
        model = build(dtype=torch.bfloat16, scales_in_fp32=True)
        optimizer = make(model.parameters(), before, cpu_cls, cpu_cls, param_update_in_fp32=True)
        train(model, optimizer, steps=3, skip={0: (2,), 1: (2,), 2: (2,)})
        return model, optimizer

    model, optimizer = start()
    other = build(dtype=torch.bfloat16, scales_in_fp32=True)
    other.load_state_dict(model.state_dict())
    engine = SimEngine(8)
    loaded = make(other.parameters(), after, cpu_cls, cpu_cls, engine=engine, param_update_in_fp32=True, lr=0.5)
    loaded.load_state_dict(saved(optimizer))
    assert loaded.param_groups[0]["lr"] == 1e-2
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert (param in optimizer.state) == (twin in loaded.state)
        for key, value in optimizer.state.get(param, {}).items():
            assert torch.equal(value, loaded.state[twin][key]), key
            assert value.dtype == loaded.state[twin][key].dtype
    train(model, optimizer, first=3)
    train(other, loaded, first=3, engine=engine)
    assert_same_weights(model, other)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_masters_survive_either_order_of_loading(order):
    model = build(dtype=torch.bfloat16)
    optimizer = make(model.parameters(), 0.5, param_update_in_fp32=True)
    train(model, optimizer, steps=3)
    other = build(dtype=torch.bfloat16)
    loaded = make(other.parameters(), 0.5, param_update_in_fp32=True)
    train(other, loaded, steps=1, first=50)
    if order == "model first":
        other.load_state_dict(model.state_dict())
    loaded.load_state_dict(saved(optimizer))
    if order == "optimizer first":
        other.load_state_dict(model.state_dict())
    train(model, optimizer, first=3)
    train(other, loaded, first=3)
    assert_same_weights(model, other)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_loads_and_gives_plain_adamw_state(fraction):
    twin = build()
    reference = plain(twin.parameters())
    train(twin, reference, steps=3)
    model = build()
    model.load_state_dict(twin.state_dict())
    optimizer = make(model.parameters(), fraction)
    optimizer.load_state_dict(reference.state_dict())
    train(model, optimizer, first=3)
    back = build()
    back.load_state_dict(model.state_dict())
    plain_again = plain(back.parameters())
    plain_again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(twin, reference, first=3)
    assert_same_weights(model, twin)
    for m, o in ((back, plain_again), (twin, reference)):
        train(m, o, first=8)
    assert_same_weights(back, twin)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_plain_state_of_a_bf16_model_gives_masters_from_the_parameters(fraction):
    twin = build(dtype=torch.bfloat16)
    reference = plain(twin.parameters())
    train(twin, reference, steps=2)
    model = build(dtype=torch.bfloat16)
    optimizer = make(model.parameters(), fraction, param_update_in_fp32=True)
    train(model, optimizer, steps=1)
    model.load_state_dict(twin.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        state = optimizer.state[param]
        assert torch.equal(state["master_param"], other.float())
        assert state["exp_avg"].dtype is torch.float32
        assert torch.equal(state["exp_avg"], reference.state[other]["exp_avg"].float())
    train(model, optimizer, first=2)


def test_loading_copies():
    model, optimizer, *_ = pair(0.5)
    train(model, optimizer, steps=1)
    other = build()
    loaded = make(other.parameters(), 0.5)
    loaded.load_state_dict(optimizer.state_dict())
    before = {p: s["exp_avg"].clone() for p, s in optimizer.state.items()}
    train(other, loaded, steps=2)
    assert all(torch.equal(optimizer.state[p]["exp_avg"], value) for p, value in before.items())


def test_state_dict_hooks_see_plain_state():
    model, optimizer, *_ = pair(0.5)
    train(model, optimizer, steps=1)
    seen = []

    def double_step(_, state_dict):
        seen.append(state_dict["state"][0]["exp_avg"].shape)
        state = {k: {**v, "step": v["step"] * 2} for k, v in state_dict["state"].items()}
        return {**state_dict, "state": state}

    optimizer.register_load_state_dict_pre_hook(double_step)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[model.blocks[0].scale]["step"].item()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [model.blocks[0].scale.shape, 2.0]


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_distributed_checkpoint_functions(fraction):
    """They make state with a step of zero gradients and lr 0, address it by name, and load in place."""
    model = build(dtype=torch.bfloat16)
    optimizer = make(model.parameters(), fraction, param_update_in_fp32=True)
    train(model, optimizer, steps=2)
    other = build(dtype=torch.bfloat16)
    other.load_state_dict(model.state_dict())
    loaded = make(other.parameters(), 0.5, param_update_in_fp32=True)
    state_dict = get_optimizer_state_dict(model, optimizer)
    assert "master_param" in state_dict["state"]["blocks.0.scale"]
    set_optimizer_state_dict(other, loaded, copy.deepcopy(state_dict))
    train(model, optimizer, first=2)
    train(other, loaded, first=2)
    assert_same_weights(model, other)


def test_old_checkpoints():
    """A step counter that is a number, and groups without today's options, as old versions of torch wrote them."""
    model, optimizer, twin, reference, _ = pair(0.5)
    for m, o in ((model, optimizer), (twin, reference)):
        train(m, o, steps=2)
        state_dict = copy.deepcopy(o.state_dict())
        for state in state_dict["state"].values():
            state["step"] = int(state["step"])
        for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            del state_dict["param_groups"][0][key]
        o.load_state_dict(state_dict)
        train(m, o, steps=2, first=2)
    assert_same_weights(model, twin)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alike_and_are_independent(fraction, how):
    model = build(dtype=torch.bfloat16)
    optimizer = make(model.parameters(), fraction, param_update_in_fp32=True)
    train(model, optimizer, steps=2, skip={0: (1,), 1: (1,)})
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
    both = (model, optimizer)
    twin, other = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert type(other) is SmallBuckets
    assert (other._engine is optimizer._engine) == (how == "deepcopy")
    assert [slot.offloaded for slot in other._slots.values()] == [s.offloaded for s in optimizer._slots.values()]
    assert set(other.state) == {
        q for p, q in zip(model.parameters(), twin.parameters(), strict=True) if p in optimizer.state
    }
    before = copy.deepcopy(model)
    train(twin, other, first=2)
    assert_same_weights(model, before)
    train(model, optimizer, first=2)
    assert_same_weights(model, twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["master_param"], other.state[q]["master_param"])


# Writes from outside


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("how", ["in place", "load_state_dict", "data"])
def test_a_write_from_outside_is_seen(fraction, how):
    def write(model, step):
        if step != 2:
            return
        with torch.no_grad():
            if how == "in place":
                model.blocks[0].linear.weight.mul_(0.5)
                model.blocks[2].scale[3] = 7.0
            elif how == "load_state_dict":
                model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()})
            else:
                for param in model.parameters():
                    param.data = param.data * 1.1

    model, optimizer, twin, reference, engine = pair(fraction)
    train(model, optimizer, engine=engine, before_step=lambda step: write(model, step))
    train(twin, reference, before_step=lambda step: write(twin, step))
    assert_same_weights(model, twin)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_masters_keep_their_precision_where_nothing_was_written(fraction):
    model = build(dtype=torch.bfloat16)
    optimizer = make(model.parameters(), fraction, param_update_in_fp32=True)
    train(model, optimizer, steps=3)
    masters = {p: m.clone() for p, m in optimizer.param_to_fp32_param.items()}
    with torch.no_grad():
        for param in model.parameters():
            param.view(-1)[0] = 0.25
    optimizer.state_dict()
    for param, master in masters.items():
        now = optimizer.param_to_fp32_param[param]
        assert now.view(-1)[0] == 0.25
        assert torch.equal(now.view(-1)[1:], master.view(-1)[1:])
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values())
    optimizer.update_fp32_param_by_new_param()
    assert all(torch.equal(m, p.float()) for p, m in optimizer.param_to_fp32_param.items())


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_update_fp32_param_by_new_param_sees_what_version_counters_do_not(fraction):
    model, optimizer, twin, reference, _ = pair(fraction)
    for m, o in ((model, optimizer), (twin, reference)):
        train(m, o, steps=2)
        for param in m.parameters():
            param.data.mul_(0.5)
        if o is optimizer:
            o.update_fp32_param_by_new_param()
        train(m, o, steps=2, first=2)
    assert_same_weights(model, twin)


def test_wider_gradients_than_before():
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = make([param], 1.0, param_update_in_fp32=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.decoupled_grad = torch.full((8,), 1 + 2**-12)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].bfloat16().float().ne(optimizer.state[param]["exp_avg"]).all()
    assert optimizer.state[param]["step"] == 2
