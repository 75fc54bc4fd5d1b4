"""The division between streamed state and the host's updates, from rates."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tiny import assert_bitwise, build, train, weights

import forebay
from forebay.engine import measure
from forebay.engine.sim import RaceError, SimEngine
from forebay.host import kernels
from forebay.optim import cost_model
from forebay.optim.adamw_rule import AdamWRule
from forebay.optim.cost_model import H200, ElementBytes, Rates
from forebay.optim.layout import Placement
from forebay.optim.options import plan_memory

BF16 = ElementBytes(weight=2.0, state=10.0)
CPU = torch.device("cpu")
SMALL = {"num_elements": 40_000, "copy_bytes": 1 << 14}


def rates(**changes):
    return dataclasses.replace(H200, **changes)


def share_held(optimizer):
    """Return the share of the offloaded elements that the host updates."""
    optimizer.allocate()
    elements = {
        placement: sum(s.num_elements for state in share.chunks for s in state.chunk.segments)
        for placement, share in optimizer.placed.shares.items()
    }
    return elements[Placement.HOST] / (elements[Placement.HOST] + elements[Placement.STREAMED])


class TestModel:
    @pytest.mark.parametrize("element", [BF16, ElementBytes(4.0, 8.0), ElementBytes(2.0, 6.0)])
    @pytest.mark.parametrize("overlap", [True, False])
    @pytest.mark.parametrize("host_update_gbps", [5.0, 69.0, 500.0])
    def test_no_share_is_better_than_the_best(self, element, overlap, host_update_gbps):
        machine = rates(host_update_gbps=host_update_gbps)
        best = cost_model.best_host_share(element, machine, overlap=overlap)
        least = cost_model.exposed_ns(best, element, machine, overlap=overlap)
        for share in torch.linspace(0, 1, 1001).tolist():
            assert cost_model.exposed_ns(share, element, machine, overlap=overlap) >= least * (1 - 1e-12)

    def test_a_slow_host_updates_nothing_and_a_slow_bus_streams_nothing(self):
        assert cost_model.best_host_share(BF16, rates(host_update_gbps=1e-6)) == pytest.approx(0.0, abs=1e-6)
        # The weights of host updates cross the bus as well, so a slow bus leaves the ratio of the bytes at worst.
        slow = dict.fromkeys(("down_gbps", "up_gbps", "down_both_gbps", "up_both_gbps"), 1e-06)
        assert cost_model.best_host_share(BF16, rates(**slow)) == pytest.approx(10 / 12)
        assert cost_model.best_host_share(BF16, rates(down_both_gbps=1e-6)) == pytest.approx(1.0, abs=1e-6)

    def test_monotonic(self):
        def shares(name, values):
            return [cost_model.best_host_share(BF16, rates(**{name: value})) for value in values]

        steps = [1.0, 10.0, 40.0, 100.0, 1000.0]
        assert sorted(shares("host_update_gbps", steps)) == shares("host_update_gbps", steps)
        # As fast as the slower direction; what is above it changes nothing.
        assert sorted(shares("down_both_gbps", steps), reverse=True) == shares("down_both_gbps", steps)
        assert len(set(shares("down_both_gbps", steps))) == 4
        # Less state to stream, less for the host to do. The kernel's bytes fall less than the bus's.
        states = [2.0, 4.1, 6.0, 10.0, 12.0]
        by_state = [cost_model.best_host_share(ElementBytes(2.0, state), H200) for state in states]
        assert sorted(by_state) == by_state

    def test_without_overlap_one_direction_follows_the_other(self):
        assert cost_model.streamed_ns(BF16, H200, overlap=False) == pytest.approx(20 / 55)
        assert cost_model.streamed_ns(BF16, H200, overlap=True) == pytest.approx(10 / 48)

    def test_the_default_is_what_was_measured_to_be_best(self):
        assert cost_model.best_host_share(BF16, H200) == pytest.approx(0.33, abs=0.01)

    def test_bytes_of_an_element(self):
        params = [torch.empty(300, dtype=torch.bfloat16), torch.empty(100)]
        element = cost_model.element_bytes(params, AdamWRule(CPU))
        assert element == ElementBytes(weight=(3 * 2 + 4) / 4, state=(3 * 10 + 8) / 4)
        eight = cost_model.element_bytes(params[:1], AdamWRule(CPU, "8bit"))
        assert 4.0 < eight.state < 4.2
        assert cost_model.element_bytes([], AdamWRule(CPU)) == BF16

    @pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
    def test_impossible_rates(self, rate):
        with pytest.raises(ValueError, match="up_gbps must be above 0 and finite, got"):
            rates(up_gbps=rate)


class TestOptions:
    def test_auto_uses_the_model_for_what_the_optimizer_holds(self):
        params = [torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")]

        def streamed_share(**kwargs):
            state = plan_memory(params, offload_fraction=1.0, **kwargs)
            return state["pinned"].get("optimizer_state", 0) / (10 << 20)

        assert streamed_share() == pytest.approx(1 - 0.33, abs=0.01)
        assert streamed_share(device="cpu") == 1.0
        assert streamed_share(host_share=0.25) == pytest.approx(0.75, abs=0.01)
        # 8-bit state has no kernel on the host.
        assert "weights" not in plan_memory(params, offload_fraction=1.0, state_dtype="8bit")["pinned"]

    def test_calibrated_is_measured_once_and_only_when_asked(self, monkeypatch):
        calls = []

        def measured(engine):
            calls.append(engine)
            return rates(host_update_gbps=69.0 * 4)

        monkeypatch.setattr(cost_model, "calibrate", measured)
        monkeypatch.setattr(cost_model, "_measured", {})
        options = {"offload_fraction": 1.0, "chunk_elements": 4096, "engine": SimEngine(0)}
        forebay.AdamW(build().parameters(), **options).allocate()
        assert calls == []
        expected = cost_model.best_host_share(BF16, rates(host_update_gbps=69.0 * 4))
        for _ in range(2):
            optimizer = forebay.AdamW(build().parameters(), host_share="calibrated", **options)
            assert share_held(optimizer) == pytest.approx(expected, abs=0.01)
        assert len(calls) == 1

    def test_calibrated_without_a_host_kernel_streams_all(self):
        optimizer = forebay.AdamW(
            build().parameters(), offload_fraction=1.0, host_share="calibrated", state_dtype="8bit", engine=SimEngine(0)
        )
        assert share_held(optimizer) == 0.0

    @pytest.mark.parametrize(
        ("kwargs", "text"),
        [
            (
                {"host_share": "measured"},
                r"unknown host_share 'measured'; give a number between 0.0 and 1.0, or 'calibrated' to divide by what",
            ),
            (
                {"host_share": "calibrated", "placement": "streamed"},
                "host_share='calibrated' divides what is offloaded, as placement='streamed' does; give one of them",
            ),
        ],
    )
    def test_errors(self, kwargs, text):
        with pytest.raises(ValueError, match=text):
            forebay.AdamW(build().parameters(), engine=SimEngine(0), **kwargs)


class TestCalibration:
    @pytest.mark.parametrize("seed", range(50))
    def test_orders_what_it_does_and_gives_its_memory_back(self, seed):
        engine = SimEngine(seed)
        with engine.watch():
            found = cost_model.calibrate(engine, **SMALL)
        engine.synchronize()
        assert all(0 < rate < math.inf for rate in dataclasses.astuple(found))
        assert engine.ledger.num_bytes() == 0

    def test_a_wait_left_out_is_noticed(self, monkeypatch):
        monkeypatch.setattr(measure, "finish", lambda ends: None)
        with pytest.raises(RaceError):
            cost_model.calibrate(SimEngine(0), **SMALL)

    @pytest.mark.skipif(kernels.backend() == "torch", reason="only the native kernel promises the same bits")
    def test_training_after_a_calibration(self):
        def go(**kwargs):
            model = build()
            optimizer = forebay.AdamW(model.parameters(), lr=1e-2, chunk_elements=4096, engine=SimEngine(2), **kwargs)
            return train(model, optimizer, num_steps=2), weights(model)

        expected, expected_weights = go()
        losses, actual = go(offload_fraction=1.0, host_share="calibrated")
        assert torch.equal(losses, expected)
        assert_bitwise(actual, expected_weights)


def test_rates_are_all_used():
    """A rate that no cost depends on would be measured for nothing."""
    for field in dataclasses.fields(Rates):
        slower = rates(**{field.name: getattr(H200, field.name) / 2})
        costs = [
            (
                cost_model.best_host_share(BF16, machine, overlap=True),
                cost_model.best_host_share(BF16, machine, overlap=False),
            )
            for machine in (H200, slower)
        ]
        assert costs[0] != costs[1], field.name
