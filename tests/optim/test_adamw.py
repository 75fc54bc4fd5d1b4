"""forebay.AdamW: exact, whatever the placement; checked in the simulator under many seeds."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from tiny import VOCABULARY, assert_bitwise, batch, build, loss_of, train, weights
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import forebay
from forebay.engine import HostTaskError, Lane
from forebay.engine.sim import RaceError, SimEngine
from forebay.host import kernels
from forebay.optim.layout import Placement
from forebay.optim.options import plan_memory
from forebay.optim.streamed_share import StreamedShare

SEEDS = range(50)
CHUNK = 4096  # several chunks for the tiny model, and tensors cut by their boundaries


def optimizer_for(model, engine=None, **kwargs):
    kwargs = {"lr": 1e-2, "weight_decay": 0.1, "chunk_elements": CHUNK} | kwargs
    return forebay.AdamW(model.parameters(), engine=engine or SimEngine(0), **kwargs)


def run(engine=None, *, dtype=torch.bfloat16, attach=False, tied=False, watch=True, steps=6, max_norm=None, **kwargs):
    engine = engine or SimEngine(0)
    model = build(dtype, tied=tied)
    optimizer = optimizer_for(model, engine, **kwargs)
    if attach:
        optimizer.attach(model)
    losses = train(model, optimizer, num_steps=steps, max_norm=max_norm, watch=engine if watch else None)
    return losses, weights(model), optimizer


@pytest.fixture(scope="module")
def resident():
    """Losses and weights without offload, by max_norm."""
    return {max_norm: run(offload_fraction=0.0, max_norm=max_norm)[:2] for max_norm in (None, 0.1)}


def reference(dtype, num_steps, max_norm=None):
    """Train by hand with torch.optim.AdamW on fp32 masters, each weight the rounded master."""
    model = build(dtype)
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float().clone()) for param in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, foreach=False)
    losses = []
    for step in range(num_steps):
        model.zero_grad()
        loss = loss_of(model, batch(step * 10))
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(masters, max_norm)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(kernels.split_master(master.detach())[0] if dtype is torch.bfloat16 else master)
        losses.append(loss.detach())
    return torch.stack(losses), weights(model), masters


class TestArithmetic:
    @pytest.mark.parametrize("max_norm", [None, 0.1])
    @pytest.mark.parametrize("placement", ["streamed", "host"])
    @pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
    def test_fp32_is_torch_adamw(self, fraction, placement, max_norm):
        expected, expected_weights, _ = reference(torch.float32, 6, max_norm)
        losses, actual, _ = run(dtype=torch.float32, offload_fraction=fraction, placement=placement, max_norm=max_norm)
        # Both round every operation once; operands are ordered differently in a few places.
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        for name, value in expected_weights.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=2e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("placement", ["streamed", "host"])
    def test_low_precision_has_fp32_masters(self, dtype, placement):
        # A learning rate so small that a weight without a master would never move.
        torch.manual_seed(0)
        param = nn.Parameter(torch.ones(4096, dtype=dtype))
        optimizer = forebay.AdamW(
            [param], lr=1e-4, weight_decay=0.0, offload_fraction=1.0, placement=placement, engine=SimEngine(1)
        )
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        # 100 steps of 1e-4 each: 0.99, to within the dtype's rounding.
        assert (param.detach().float() - 0.99).abs().max() <= torch.finfo(dtype).eps / 2

    def test_bf16_stays_close_to_hand_written_masters(self, resident):
        expected, _, _ = reference(torch.bfloat16, 6)
        assert (resident[None][0] - expected).abs().max() < 1e-3

    def test_clipping_is_exact_in_fp32(self):
        expected, _, _ = reference(torch.bfloat16, 6, max_norm=0.1)
        assert (run(max_norm=0.1)[0] - expected).abs().max() < 1e-3


class TestPlacementsAgree:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("max_norm", [None, 0.1])
    def test_streamed_is_bitwise_device(self, seed, max_norm, resident):
        fraction = [1.0, 0.5, 0.25, 0.77][seed % 4]
        losses, actual, _ = run(
            SimEngine(seed), offload_fraction=fraction, max_norm=max_norm, attach=seed % 2 == 0, overlap=seed % 3 > 0
        )
        assert torch.equal(losses, resident[max_norm][0])
        assert_bitwise(actual, resident[max_norm][1])

    @pytest.mark.parametrize("seed", SEEDS)
    def test_host_is_the_same_under_every_order(self, seed, resident):
        fraction = [1.0, 0.5][seed % 2]
        expected, expected_weights, _ = run(offload_fraction=fraction, placement="host", overlap=False)
        losses, actual, _ = run(SimEngine(seed), offload_fraction=fraction, placement="host", attach=seed % 3 > 0)
        assert torch.equal(losses, expected)
        assert_bitwise(actual, expected_weights)

    @pytest.mark.skipif(kernels.backend() == "torch", reason="only the native kernel promises the same bits")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
    @pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.95)])
    def test_host_is_bitwise_device(self, dtype, betas):
        expected, expected_weights, _ = run(dtype=dtype, betas=betas, max_norm=0.1, steps=12)
        for host_share in (1.0, 0.4):
            losses, actual, _ = run(
                dtype=dtype, betas=betas, max_norm=0.1, steps=12, offload_fraction=0.9, host_share=host_share
            )
            assert torch.equal(losses, expected)
            assert_bitwise(actual, expected_weights)

    @pytest.mark.parametrize("attach", [False, True])
    def test_tied_weights(self, attach):
        expected, expected_weights, _ = run(tied=True)
        losses, actual, _ = run(SimEngine(3), tied=True, offload_fraction=1.0, attach=attach)
        assert torch.equal(losses, expected)
        assert_bitwise(actual, expected_weights)

    def test_splitting_changes_nothing(self, resident):
        losses, actual, _ = run(offload_fraction=1.0, chunk_elements=1 << 20)
        assert torch.equal(losses, resident[None][0])
        assert_bitwise(actual, resident[None][1])


class TestPlantedFaults:
    """Leave out one ordering at a time; the simulator must notice every one."""

    @pytest.mark.parametrize(
        ("placement", "lane"),
        [("streamed", Lane.UP), ("streamed", Lane.COMPUTE), ("streamed", Lane.DOWN)]
        + [("host", lane) for lane in Lane],
    )
    def test_a_wait_left_out_is_noticed(self, placement, lane, monkeypatch):
        engine = SimEngine(0)
        wait = engine.wait
        monkeypatch.setattr(engine, "wait", lambda on, event: None if on is lane else wait(on, event))
        with pytest.raises(RaceError):
            run(engine, offload_fraction=1.0, placement=placement, attach=True)

    def test_memory_of_a_visit_given_back_too_early_is_noticed(self, monkeypatch):
        monkeypatch.setattr(StreamedShare, "_end", lambda self, visit: visit.buffer.release())
        with pytest.raises(RaceError, match="release of staging"):
            run(SimEngine(0), offload_fraction=1.0)


class TestSemantics:
    def test_frozen_and_unused_parameters(self):
        def go(**kwargs):
            model = build()
            model.head.weight.requires_grad_(False)
            model.unused = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
            optimizer = optimizer_for(model, SimEngine(5), **kwargs)
            train(model, optimizer, num_steps=4)
            return weights(model), optimizer

        expected, _ = go(offload_fraction=0.0)
        actual, optimizer = go(offload_fraction=1.0)
        assert_bitwise(actual, expected)
        assert torch.equal(actual["unused"], torch.ones(10, dtype=torch.bfloat16))
        assert len(optimizer.state_dict()["state"]) == len(list(build().parameters())) - 1

    @pytest.mark.parametrize("placement", ["streamed", "host"])
    def test_parameters_without_a_gradient_in_some_steps(self, placement):
        def go(**kwargs):
            params = [nn.Parameter(torch.full((3000,), 0.5, dtype=torch.bfloat16)) for _ in range(3)]
            optimizer = forebay.AdamW(params, lr=1e-2, chunk_elements=CHUNK, engine=SimEngine(7), **kwargs)
            for step in range(6):
                for index, param in enumerate(params):
                    param.grad = torch.full_like(param, 0.1 * (step + 1)) if step % (index + 1) == 0 else None
                optimizer.step()
            return [p.detach().clone() for p in params], optimizer.state_dict()["state"]

        expected, expected_state = go(offload_fraction=0.0)
        actual, state = go(offload_fraction=1.0, placement=placement)
        assert [float(state[index]["step"]) for index in range(3)] == [6, 3, 2]
        assert [float(expected_state[index]["step"]) for index in range(3)] == [6, 3, 2]
        for left, right in zip(actual, expected, strict=True):
            assert torch.equal(left, right) if placement == "streamed" else torch.allclose(left, right, rtol=2**-7)

    def test_groups_and_changes_of_hyperparameters_between_steps(self):
        def go(**kwargs):
            model = build()
            groups = [
                {"params": list(model.blocks.parameters()), "lr": 3e-3, "wd_mult": 2.0},
                {"params": [*model.embedding.parameters(), *model.head.parameters()], "weight_decay": 0.0},
            ]
            optimizer = forebay.AdamW(groups, lr=1e-2, chunk_elements=CHUNK, engine=SimEngine(2), **kwargs)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            for step in range(5):
                train(model, optimizer, num_steps=1, first_step=step)
                scheduler.step()
                optimizer.param_groups[0]["weight_decay"] = 0.01 * step
            return weights(model), optimizer

        expected, _ = go(offload_fraction=0.0)
        actual, optimizer = go(offload_fraction=0.6)
        assert_bitwise(actual, expected)
        assert optimizer.param_groups[0]["wd_mult"] == 2.0
        host, _ = go(offload_fraction=1.0, placement="host")
        for name, value in expected.items():
            torch.testing.assert_close(host[name], value, rtol=2**-6, atol=1e-4)

    def test_gradient_accumulation(self):
        def go(**kwargs):
            model = build()
            optimizer = optimizer_for(model, SimEngine(4), **kwargs)
            return train(model, optimizer, micro_batches=3), weights(model)

        expected, expected_weights = go(offload_fraction=0.0)
        losses, actual = go(offload_fraction=1.0)
        assert torch.equal(losses, expected)
        assert_bitwise(actual, expected_weights)

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("placement", ["streamed", "host"])
    def test_gradients_sent_early_are_sent_again_when_they_change(self, placement, seed):
        """Steps that differ from the one before in every way that a guess about the last backward can be wrong."""

        def go(engine, **kwargs):
            model = build()
            optimizer = optimizer_for(model, engine, placement=placement, **kwargs)
            optimizer.attach(model)
            with engine.watch():
                for step, num_backwards in enumerate([1, 1, 3, 1, 2, 2, 1, 1, 1]):
                    for micro in range(num_backwards):
                        loss_of(model, batch(10 * step + micro)).backward()
                    if step == 3:  # gradients dropped, not by the optimizer, and made again
                        for param in model.parameters():
                            param.grad = None
                        loss_of(model, batch(10 * step + 5)).backward()
                    if step == 5:  # a step left out
                        optimizer.zero_grad(set_to_none=False)
                        continue
                    if step == 6:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    if step == 7:
                        model.head.weight.grad.mul_(2.0)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
            optimizer.synchronize()
            engine.synchronize()
            return weights(model)

        expected = go(SimEngine(0), offload_fraction=1.0, overlap=False)
        assert_bitwise(go(SimEngine(seed), offload_fraction=1.0), expected)

    def test_stats_count_what_a_step_moves(self):
        engine = SimEngine(0)
        model = build()
        optimizer = optimizer_for(model, engine, offload_fraction=1.0, host_share=0.5)
        train(model, optimizer, num_steps=1)
        assert set(optimizer.stats().values()) == {None}
        before = engine.traffic()
        train(model, optimizer, num_steps=1)
        moved = engine.traffic()
        num_elements = sum(param.numel() for param in model.parameters())
        # Half is streamed, 10 bytes each way, padding included; half goes down and up as 2 bytes.
        assert moved.down_bytes - before.down_bytes == pytest.approx(6 * num_elements, rel=0.05)
        assert moved.up_bytes - before.up_bytes == pytest.approx(6 * num_elements, rel=0.05)
        stats = optimizer.stats()
        assert stats["down_gbps"] > 0
        assert stats["host_update_ms"] > 0
        assert stats["stall_ms"] == 0

    def test_closure_runs_once_with_gradients_enabled(self):
        model = build()
        optimizer = optimizer_for(model, offload_fraction=1.0)
        calls = []

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch(0))
            loss.backward()
            calls.append(torch.is_grad_enabled())
            return loss

        assert optimizer.step(closure).item() > 0
        assert calls == [True]

    @pytest.mark.parametrize("placement", ["streamed", "host"])
    def test_nonfinite_gradient_leaves_everything_untouched(self, placement):
        engine = SimEngine(6)
        model = build()
        optimizer = optimizer_for(model, engine, offload_fraction=0.7, placement=placement, skip_nonfinite=True)
        train(model, optimizer, num_steps=2, max_norm=1.0)
        before, state = weights(model), copy.deepcopy(optimizer.state_dict())
        loss_of(model, batch(3)).backward()
        model.head.weight.grad[0, 0] = float("nan")
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        assert_bitwise(weights(model), before)
        for index, entry in optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                assert torch.equal(value, state["state"][index][name]), name
        train(model, optimizer, num_steps=1, first_step=4, max_norm=1.0)
        assert float(optimizer.state_dict()["state"][0]["step"]) == 3

    @pytest.mark.parametrize("placement", ["streamed", "host"])
    def test_a_write_by_the_user_is_taken_over(self, placement):
        def go(**kwargs):
            model = build()
            optimizer = optimizer_for(model, SimEngine(8), lr=1e-4, **kwargs)
            train(model, optimizer, num_steps=3)
            with torch.no_grad():
                model.head.weight.mul_(0.5)
            train(model, optimizer, num_steps=1, first_step=3)
            return weights(model)

        expected = go(offload_fraction=0.0)
        actual = go(offload_fraction=1.0, placement=placement)
        for name, value in expected.items():
            assert torch.equal(actual[name], value) if placement == "streamed" else True
        torch.testing.assert_close(actual["head.weight"], expected["head.weight"], rtol=2**-7, atol=1e-5)

    def test_zero_grad_in_place_waits_for_the_copies(self):
        engine = SimEngine(0)
        model = build()
        optimizer = optimizer_for(model, engine, offload_fraction=1.0, placement="host")
        optimizer.attach(model)
        with engine.watch():
            for step in range(3):
                loss_of(model, batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

    def test_failed_host_task_is_named(self):
        model = build()
        optimizer = forebay.AdamW(
            model.named_parameters(), offload_fraction=1.0, placement="host", engine=SimEngine(0), chunk_elements=CHUNK
        )
        train(model, optimizer, num_steps=1)
        task = next(iter(optimizer.placed.shares[Placement.HOST]._host_chunks[0].current.tasks.values()))
        task._c_task.status = 3
        with pytest.raises(HostTaskError, match=r"embedding\.weight.*failed with status 3"):
            train(model, optimizer, num_steps=1)

    def test_weights_are_current_in_a_state_dict_of_the_model(self):
        engine = SimEngine(0)
        model = build()
        optimizer = optimizer_for(model, engine, offload_fraction=1.0, placement="host")
        optimizer.attach(model)
        with engine.watch():
            loss_of(model, batch(0)).backward()
            optimizer.step()
            seen = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.synchronize()
        assert_bitwise(seen, weights(model))


class TestState:
    def combos(self):
        return [(0.0, "auto"), (0.6, "streamed"), (1.0, "streamed"), (1.0, "host"), (0.3, "host")]

    def test_schema_is_that_of_torch(self):
        _, _, optimizer = run(dtype=torch.float32, offload_fraction=1.0)
        expected_optimizer = torch.optim.AdamW(build(torch.float32).parameters())
        state = optimizer.state_dict()
        assert set(state) == {"state", "param_groups"}
        assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
        assert state["param_groups"][0]["params"] == expected_optimizer.state_dict()["param_groups"][0]["params"]
        assert all(value.device.type == "cpu" for entry in state["state"].values() for value in entry.values())

    def test_saving_writes_each_tensor_once(self):
        model, stream = build(), io.BytesIO()
        optimizer = optimizer_for(model, offload_fraction=1.0)
        train(model, optimizer, num_steps=1)
        torch.save(optimizer.state_dict(), stream)
        num_elements = sum(param.numel() for param in model.parameters())
        assert stream.tell() < 10 * num_elements + 50_000

    def test_empty_before_the_first_step(self):
        optimizer = optimizer_for(build(), offload_fraction=0.5)
        assert optimizer.state_dict()["state"] == {}
        assert not optimizer.state

    @pytest.mark.parametrize("masters_first", [True, False])
    def test_resumes_bit_for_bit_at_any_placement(self, masters_first, resident):
        expected, expected_weights, _ = run(steps=8)
        for fraction, placement in self.combos():
            if placement == "host":
                continue
            model = build()
            first = optimizer_for(model, SimEngine(1), offload_fraction=fraction, placement=placement)
            train(model, first, num_steps=4)
            stream = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, stream)
            for next_fraction in (0.0, 0.5, 1.0):
                stream.seek(0)
                saved = torch.load(stream, weights_only=True)
                model = build()
                second = optimizer_for(model, SimEngine(2), offload_fraction=next_fraction)
                loads = [
                    lambda o=second, s=saved: o.load_state_dict(s["optimizer"]),
                    lambda m=model, s=saved: m.load_state_dict(s["model"]),
                ]
                for load in loads if masters_first else loads[::-1]:
                    load()
                losses = train(model, second, num_steps=4, first_step=4)
                assert torch.equal(losses, expected[4:])
                assert_bitwise(weights(model), expected_weights)

    @pytest.mark.parametrize(("fraction", "placement"), [(0.0, "auto"), (1.0, "streamed"), (0.5, "host")])
    def test_exchanges_state_with_torch_adamw(self, fraction, placement):
        def torch_run(model, optimizer, steps, first):
            return train(model, optimizer, num_steps=steps, first_step=first)

        model = build(torch.float32)
        expected = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        torch_run(model, expected, 4, 0)
        ours_model = copy.deepcopy(model)
        ours = optimizer_for(ours_model, offload_fraction=fraction, placement=placement)
        ours.load_state_dict(expected.state_dict())
        theirs_model = copy.deepcopy(model)
        theirs = torch.optim.AdamW(theirs_model.parameters(), lr=1e-2, weight_decay=0.1)
        # torch keeps the tensors it is given, and ours are live.
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
        results = [torch_run(m, o, 3, 4) for m, o in ((model, expected), (ours_model, ours), (theirs_model, theirs))]
        assert torch.equal(results[0], results[2])
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)

    def test_its_own_state_dict_loads_back(self):
        expected, expected_weights, _ = run(steps=6)
        model = build()
        optimizer = optimizer_for(model, SimEngine(1), offload_fraction=1.0)
        losses = [train(model, optimizer, num_steps=3)]
        optimizer.load_state_dict(optimizer.state_dict())
        losses.append(train(model, optimizer, num_steps=3, first_step=3))
        assert torch.equal(torch.cat(losses), expected)
        assert_bitwise(weights(model), expected_weights)

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_goes_through_distributed_checkpoint(self, tmp_path):
        expected, expected_weights, _ = run(steps=6)

        def make(seed, **kwargs):
            model = build()
            return model, optimizer_for(model, SimEngine(seed), **kwargs)

        model, optimizer = make(1, offload_fraction=0.6, host_share=0.5)
        losses = [train(model, optimizer, num_steps=3)]
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.save(saved, checkpoint_id=tmp_path)
        model, optimizer = make(2, offload_fraction=1.0)
        loaded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(loaded, checkpoint_id=tmp_path)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        losses.append(train(model, optimizer, num_steps=3, first_step=3))
        assert torch.equal(torch.cat(losses), expected)
        assert_bitwise(weights(model), expected_weights)

    def test_loading_only_the_model_refreshes_the_masters(self):
        model = build()
        optimizer = optimizer_for(model, SimEngine(3), offload_fraction=1.0, placement="host", lr=0.0)
        train(model, optimizer, num_steps=2)
        other = {name: value * 0.25 for name, value in weights(model).items()}
        model.load_state_dict(other)
        train(model, optimizer, num_steps=1)
        # lr 0: the weights are what was loaded.
        assert_bitwise(weights(model), other)

    @pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
    @pytest.mark.parametrize(("fraction", "placement"), [(0.0, "auto"), (0.6, "streamed"), (1.0, "host")])
    def test_copies_go_on_like_the_original(self, how, fraction, placement):
        model = build()
        optimizer = optimizer_for(model, SimEngine(3), offload_fraction=fraction, placement=placement)
        optimizer.attach(model)
        train(model, optimizer, num_steps=3)
        copied_model, copied = how((model, optimizer))
        left = train(model, optimizer, num_steps=3, first_step=3)
        right = train(copied_model, copied, num_steps=3, first_step=3)
        assert torch.equal(left, right)
        assert_bitwise(weights(copied_model), weights(model))

    def test_add_param_group_after_steps(self):
        def go(fraction):
            params = [nn.Parameter(torch.ones(5000, dtype=torch.bfloat16)) for _ in range(2)]
            optimizer = forebay.AdamW(
                params[:1], lr=1e-2, offload_fraction=fraction, chunk_elements=CHUNK, engine=SimEngine(9)
            )
            for step in range(4):
                if step == 2:
                    optimizer.add_param_group({"params": params[1:], "lr": 3e-2})
                for param in params:
                    param.grad = torch.full_like(param, 0.1 + step)
                optimizer.step()
            return [param.detach().clone() for param in params]

        for left, right in zip(go(0.0), go(0.8), strict=True):
            assert torch.equal(left, right)

    def test_refuses_a_state_dict_of_another_model(self):
        _, _, optimizer = run(steps=1)
        state = optimizer.state_dict()
        small = forebay.AdamW([nn.Parameter(torch.zeros(3))], engine=SimEngine(0))
        with pytest.raises(ValueError, match=r"groups of \[14\] parameters, this optimizer has \[1\]"):
            small.load_state_dict(state)
        state["state"][0]["exp_avg"] = torch.zeros(2, 2)
        with pytest.raises(ValueError, match=r"exp_avg of shape \(2, 2\) for parameter 0 of group 0"):
            optimizer.load_state_dict(state)


class TestMemory:
    def test_ledger_follows_the_plan(self):
        for fraction, placement in [(0.0, "auto"), (0.5, "streamed"), (1.0, "streamed"), (1.0, "host")]:
            engine = SimEngine(0)
            model = build()
            optimizer = optimizer_for(model, engine, offload_fraction=fraction, placement=placement)
            optimizer.allocate()
            plan = plan_memory(
                model.parameters(), device="cpu", offload_fraction=fraction, placement=placement, chunk_elements=CHUNK
            )
            for tier in ("device", "pinned", "pageable"):
                for purpose in ("optimizer_state", "weights", "gradients"):
                    assert engine.ledger.num_bytes(tier, purpose) == plan[tier].get(purpose, 0), (tier, purpose)

    def test_a_frozen_parameter_has_state_from_its_first_gradient_on(self):
        def go(**kwargs):
            engine = SimEngine(3)
            model = build()
            model.head.weight.requires_grad_(False)
            optimizer = optimizer_for(model, engine, **kwargs)
            train(model, optimizer, num_steps=2)
            held = sum(engine.ledger.num_bytes(purpose=purpose) for purpose in ("optimizer_state", "master_weights"))
            model.head.weight.requires_grad_(True)
            train(model, optimizer, num_steps=3, first_step=2)
            return weights(model), held, optimizer.state_dict()

        expected, held, _ = go(offload_fraction=0.0)
        trained = sum(param.numel() for name, param in build().named_parameters() if name != "head.weight")
        assert 10 * trained <= held < 10.5 * trained
        actual, _, state = go(offload_fraction=1.0, host_share=0.5)
        assert_bitwise(actual, expected)
        assert float(state["state"][len(expected) - 1]["step"]) == 3

    def test_ten_bytes_of_state_for_a_bf16_element(self):
        params = [torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")]
        assert plan_memory(params)["device"] == {"optimizer_state": 10 << 20}

    def test_staging_is_given_back_after_every_step(self):
        engine = SimEngine(1)
        run(engine, offload_fraction=1.0, steps=3)
        assert engine.ledger.num_bytes("device") == 0


class TestErrors:
    @pytest.mark.parametrize(
        ("kwargs", "text"),
        [
            ({"offload_fraction": 1.5}, "offload_fraction must be between 0.0 and 1.0, got 1.5"),
            ({"placement": "gpu"}, "unknown placement 'gpu'; choose one of auto, streamed, host"),
            ({"host_share": 2.0}, "host_share must be between 0.0 and 1.0, got 2.0"),
            (
                {"host_share": 0.5, "placement": "host"},
                "host_share=0.5 divides what is offloaded, as placement='host' does; give one",
            ),
            ({"staging_gib": -1.0}, "staging_gib must not be negative, got -1.0"),
            ({"lr": -1.0}, "lr must be 0 or more, not -1.0"),
            ({"betas": (1.0, 0.9)}, r"betas must be two numbers in \[0, 1\), not \(1.0, 0.9\)"),
            ({"eps": -1e-8}, "eps must be 0 or more"),
            ({"weight_decay": -0.1}, "weight_decay must be 0 or more"),
            ({"chunk_elements": 10}, "chunk_elements must be at least 4096, got 10"),
        ],
    )
    def test_values(self, kwargs, text):
        with pytest.raises(ValueError, match=text):
            forebay.AdamW(build().parameters(), engine=SimEngine(0), **kwargs)

    def test_dtype(self):
        with pytest.raises(ValueError, match=r"parameter a is torch.float64; forebay.AdamW takes float32"):
            forebay.AdamW([("a", nn.Parameter(torch.zeros(3, dtype=torch.float64)))])

    def test_strides(self):
        with pytest.raises(ValueError, match=r"parameter 0 of group 0 is not contiguous \(shape \(3, 4\)"):
            forebay.AdamW([nn.Parameter(torch.zeros(4, 3).t())])

    def test_devices(self):
        with pytest.raises(ValueError, match="is on meta, others are on cpu; use one optimizer per device"):
            forebay.AdamW([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device="meta"))])

    def test_sparse_gradient(self):
        embedding = nn.Embedding(VOCABULARY, 4, sparse=True)
        optimizer = forebay.AdamW(embedding.parameters(), engine=SimEngine(0))
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match="the gradient of 0 of group 0 is sparse"):
            optimizer.step()

    def test_max_norm(self):
        with pytest.raises(ValueError, match="max_norm must be above 0, got 0"):
            optimizer_for(build()).clip_grad_norm_(0)

    def test_attached_twice(self):
        model = build()
        optimizer = optimizer_for(model)
        optimizer.attach(model)
        with pytest.raises(ValueError, match="attached to one model, once"):
            optimizer.attach(model)
