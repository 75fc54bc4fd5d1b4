"""500 steps in which everything on the side lanes happens at another moment each time, in the simulator."""

from __future__ import annotations

import pytest
import torch
from long_runs import irregular_run
from tiny import assert_bitwise, build

import forebay
from forebay.engine.sim import SimEngine
from forebay.host import kernels

NUM_STEPS = 500


def run(engine, **kwargs):
    model = build(width=24, num_blocks=1)
    optimizer = forebay.AdamW(
        model.parameters(), lr=3e-3, chunk_elements=4096, skip_nonfinite=True, engine=engine, **kwargs
    )
    optimizer.attach(model)
    losses, weights = irregular_run(model, optimizer, NUM_STEPS)
    engine.synchronize()
    return losses, weights, [float(entry["step"]) for entry in optimizer.state_dict()["state"].values()]


@pytest.fixture(scope="module")
def resident():
    return run(SimEngine(checked=False))


@pytest.mark.parametrize("host_share", [0.0, 0.5, 1.0])
def test_500_steps(host_share, resident):
    if host_share > 0 and kernels.backend() == "torch":
        pytest.skip("only the native kernel promises the same bits")
    losses, weights, steps = run(SimEngine(11 + int(10 * host_share)), offload_fraction=0.9, host_share=host_share)
    assert torch.equal(losses, resident[0])
    assert_bitwise(weights, resident[1])
    assert steps == resident[2]
    assert len(set(steps)) == 1
    assert 400 < steps[0] < 480, "some steps are left out and some skipped"
    assert losses[-50:].mean() < losses[:50].mean()
