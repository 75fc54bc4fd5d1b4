"""Every behaviour of torch.optim.AdamW in forebay's two optimizers, at fractions 0, 0.5 and 1, in the simulator."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import parity_behaviours
import pytest
import torch
from parity_behaviours import BEHAVIOURS, Differs, Maker

from forebay import AdamW, HybridDeviceOptimizer
from forebay.engine.sim import SimEngine

FRACTIONS = (0.0, 0.5, 1.0)
# Several chunks in the small model, some of which span parameters, and several buckets.
CHUNK_ELEMENTS = 4096


class SmallBuckets(HybridDeviceOptimizer):
    bucket_bytes = 16384


def adamw(engine, placement, params, fraction, **kwargs):
    return AdamW(
        params, offload_fraction=fraction, placement=placement, chunk_elements=CHUNK_ELEMENTS, engine=engine, **kwargs
    )


def hybrid(engine, params, fraction, **kwargs):
    return SmallBuckets(params, fraction, param_update_in_fp32=True, engine=engine, **kwargs)


def run(name, build, fraction):
    engine = SimEngine(list(BEHAVIOURS).index(name))
    # At fraction 0 nothing moves, so there is no wait to be missed: unless state is loaded at another fraction.
    watch = contextlib.nullcontext if fraction == 0 and name != "state_dict_round_trip" else engine.watch
    BEHAVIOURS[name].check(Maker(partial(build, engine), fraction, watch=watch))
    engine.synchronize()


@pytest.mark.parametrize(
    ("placement", "fraction"), [("auto", 0.0), ("streamed", 0.5), ("host", 0.5), ("streamed", 1.0), ("host", 1.0)]
)
@pytest.mark.parametrize("name", list(BEHAVIOURS))
def test_adamw(name, placement, fraction):
    run(name, lambda engine, *args, **kwargs: adamw(engine, placement, *args, **kwargs), fraction)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("name", list(BEHAVIOURS))
def test_hybrid(name, fraction):
    run(name, hybrid, fraction)


class Skewed(torch.optim.AdamW):
    """Plain torch with a learning rate that is 1% too high."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 1.01
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] /= 1.01
        return loss


def without_fraction(cls):
    return lambda params, fraction, **kwargs: cls(params, **kwargs)


@pytest.mark.parametrize("name", list(BEHAVIOURS))
def test_every_behaviour_notices_an_update_that_is_slightly_wrong(name):
    with pytest.raises(Differs):
        BEHAVIOURS[name].check(Maker(without_fraction(Skewed), 1.0))


@pytest.mark.parametrize("name", list(BEHAVIOURS))
def test_plain_torch_passes_but_for_bf16(name):
    maker = Maker(without_fraction(torch.optim.AdamW), 1.0)
    if "bf16" in name:
        with pytest.raises(Differs):
            BEHAVIOURS[name].check(maker)
    else:
        BEHAVIOURS[name].check(maker)


def test_every_module_is_a_behaviour_and_says_what_it_expects():
    modules = {path.stem for path in Path(parity_behaviours.__path__[0]).glob("*.py")}
    assert modules - {"__init__", "common"} == set(BEHAVIOURS)
    assert all(len(behaviour.expectation) > 20 for behaviour in BEHAVIOURS.values())
