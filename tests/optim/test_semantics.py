"""Semantics never bend for speed: every promise of torch.optim.AdamW's, under 50 orders of execution.

Each script of tests/support/semantics.py runs without offload, where nothing can be late, and with offload in the
simulator: bit for bit the same, whatever the placement, the dtype and the order. That it is what torch does, without
offload and with, is what the scripts in tests/parity show.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from semantics import DTYPES, SCRIPTS, Case, break_update, expected, finish, steps
from tiny import assert_bitwise, batch, build, weights

import forebay
from forebay.engine import HostTaskError, Lane
from forebay.engine.sim import RaceError, SimEngine
from forebay.host import kernels

SEEDS = range(50)
CHUNK = 4096


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_offloading_changes_no_bit(script, seed):
    case = Case(DTYPES[seed % len(DTYPES)], SimEngine(seed), seed)
    with case.engine.watch():
        found = finish(script, case)
    assert_bitwise(found, expected(script, case))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 2**-7), ("8bit", 0.05)])
def test_state_goes_from_one_dtype_of_the_moments_to_another(dtype, tolerance, seed):
    """Written to the other dtype once: the larger half of each moment is there to within that dtype's rounding."""
    case = Case(torch.bfloat16, SimEngine(seed), seed)
    streamed = {"state_dtype": dtype}
    if dtype == "8bit":
        streamed |= {"placement": "streamed", "offload_fraction": 1.0}
    with case.engine.watch():
        model = case.model()
        optimizer = case.optimizer(model)
        steps(model, optimizer, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        low = forebay.AdamW(model.parameters(), chunk_elements=CHUNK, engine=case.engine, **streamed)
        low.load_state_dict(saved)
        there = low.state_dict()["state"]
        back = case.optimizer(None, model.parameters(), other=2)
        back.load_state_dict(low.state_dict())
        again = back.state_dict()["state"]
    for number, entry in saved["state"].items():
        assert float(there[number]["step"]) == float(again[number]["step"]) == 3.0
        assert torch.equal(again[number]["master_remainder"], entry["master_remainder"])
        for name in ("exp_avg", "exp_avg_sq"):
            large = entry[name].abs() >= 0.5 * entry[name].abs().max()
            torch.testing.assert_close(there[number][name].float()[large], entry[name][large], rtol=tolerance, atol=0)
            assert torch.equal(again[number][name], there[number][name].float()), name


def test_without_synchronize_a_read_is_a_race():
    """What test_offloading_changes_no_bit[read_after_synchronize] could miss: that the simulator looks at all."""
    case = Case(torch.bfloat16, SimEngine(0), 2)
    model = case.model()
    optimizer = forebay.AdamW(
        model.parameters(), offload_fraction=1.0, placement="host", chunk_elements=CHUNK, engine=case.engine
    )
    optimizer.attach(model)

    def read_too_early():
        steps(model, optimizer, [0])
        model.head.weight.detach().float()

    with case.engine.watch(), pytest.raises(RaceError, match="lane 'up'"):
        read_too_early()


class TestFailedHostUpdate:
    def start(self, seed, engine=None):
        engine = engine or SimEngine(seed)
        model = build(width=32, num_blocks=1)
        optimizer = forebay.AdamW(
            model.named_parameters(),
            lr=1e-2,
            offload_fraction=1.0,
            placement="host",
            chunk_elements=CHUNK,
            engine=engine,
        )
        if seed % 2:
            optimizer.attach(model)
        steps(model, optimizer, range(2))
        return model, optimizer

    def fail(self, seed):
        model, optimizer = self.start(seed)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        mend, label = break_update(optimizer, seed % 3)
        steps(model, optimizer, [2])  # Python is past it before the host has done it
        return model, optimizer, saved, mend, label

    @pytest.mark.parametrize("seed", SEEDS)
    def test_everything_that_would_go_on_is_refused_and_names_the_parameters(self, seed):
        model, optimizer, _, _, label = self.fail(seed)
        calls = [
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.state[model.head.weight],
            lambda: copy.deepcopy(optimizer),
            lambda: pickle.dumps(optimizer),
            lambda: steps(model, optimizer, [3]),
        ]
        first = seed % len(calls)
        for call in [*calls[first:], *calls]:
            before = weights(model)
            with pytest.raises(HostTaskError, match="reload the last checkpoint before going on") as caught:
                call()
            assert f"host task '{label}' failed with status" in str(caught.value)
            assert any(name in label for name, _ in model.named_parameters())
            assert_bitwise(weights(model), before)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_loading_a_checkpoint_of_both_is_the_way_on(self, seed):
        model, optimizer = self.start(seed)
        steps(model, optimizer, range(2, 5))
        expected = weights(model)
        model, optimizer, saved, mend, _ = self.fail(seed)
        mend()
        loads = [(model, "model"), (optimizer, "optimizer")]
        for target, key in loads[:: -1 if seed % 4 > 1 else 1]:
            target.load_state_dict(saved[key])
        steps(model, optimizer, range(2, 5))
        assert_bitwise(weights(model), expected)
        optimizer.engine.synchronize()

    def test_the_next_forward_of_an_attached_model_raises(self):
        model, optimizer, *_ = self.fail(1)
        optimizer.engine.record(Lane.HOST).synchronize()
        with pytest.raises(HostTaskError, match="reload the last checkpoint"):
            model(batch(3))

    def test_loading_only_the_model_is_not(self):
        model, optimizer, saved, mend, _ = self.fail(0)
        mend()
        model.load_state_dict(saved["model"])
        with pytest.raises(HostTaskError):
            steps(model, optimizer, [3])

    def test_another_optimizer_on_the_same_engine_goes_on(self):
        engine = SimEngine(0)
        model, optimizer = self.start(1, engine)
        other_model, other = self.start(1, engine)
        break_update(optimizer, 0)
        steps(model, optimizer, [2])
        steps(other_model, other, [2])
        assert other.state_dict()["state"]
        with pytest.raises(HostTaskError):
            optimizer.state_dict()

    def test_an_exception_in_the_fallback_is_the_cause(self, monkeypatch):
        monkeypatch.setattr(kernels.native, "library", lambda: None)
        _, optimizer, *_ = self.fail(1)
        with pytest.raises(HostTaskError, match="failed with status -1") as caught:
            optimizer.state_dict()
        assert isinstance(caught.value.__cause__, AttributeError)
        assert "'NoneType' object has no attribute" in str(caught.value.__cause__)
