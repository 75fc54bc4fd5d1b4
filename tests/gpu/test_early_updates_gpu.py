"""Early host updates on the CUDA engine: bitwise what updates at the step give."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_bitwise, batch, build, loss_of, weights

import forebay
from forebay.engine.cuda import CudaEngine
from forebay.optim import early_updates, spares
from forebay.optim.layout import Placement

pytestmark = pytest.mark.gpu

CHUNK = 1 << 20
CLIPPED, UNCLIPPED = 1e-3, 1e9  # below and above the norm of every gradient here


def train(*, early, num_steps=50, delay_seed=None, bad_steps=(), **kwargs):
    model = build(torch.bfloat16, "cuda", width=1024, num_blocks=4)
    optimizer = forebay.AdamW(
        model.named_parameters(),
        lr=1e-3,
        weight_decay=0.1,
        chunk_elements=CHUNK,
        offload_fraction=1.0,
        early_updates=early,
        skip_nonfinite=True,
        engine=CudaEngine(torch.device("cuda"), delay_seed=delay_seed),
        **kwargs,
    )
    optimizer.attach(model)
    optimizer.allocate()
    generator = torch.Generator().manual_seed(7)
    losses = []
    for step in range(num_steps):
        loss = loss_of(model, batch(step, "cuda")) * (float("nan") if step in bad_steps else 1.0)
        loss.backward()
        optimizer.clip_grad_norm_(CLIPPED if torch.rand((), generator=generator) < 0.5 else UNCLIPPED)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    optimizer.synchronize()
    optimizer.engine.synchronize()
    state = {
        f"{index}.{name}": value.clone()
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }
    losses = torch.stack(losses).nan_to_num(-1.0)
    return {"losses": losses, **weights(model), **state}, optimizer.placed.shares[Placement.HOST]


@pytest.fixture(scope="module")
def expected():
    return train(early=False, placement="host")[0]


@pytest.mark.parametrize("delay_seed", [None, 0, 1])
@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize("spare_bytes", [1, 20])
def test_fifty_steps_clipped_at_random(spare_bytes, pauses, delay_seed, expected, monkeypatch):
    monkeypatch.setattr(spares, "SPARE_BYTES_PER_ELEMENT", spare_bytes)
    if not pauses:
        monkeypatch.setattr(early_updates, "MOST_PAUSED_STEPS", 0)
    found, host = train(early=True, placement="host", delay_seed=delay_seed)
    assert_bitwise(found, expected)
    tasks = host._early._resolving.values()
    kept, again = sum(task.num_kept for task in tasks), sum(task.num_runs for task in tasks)
    assert kept + again > 0
    if not pauses:
        # In every step after the first, of which the last backward cannot be guessed: Python, which is ahead of the
        # device, must not find it too early to write the hyperparameters.
        assert kept + again == 49 * sum(chunk.spare is not None for chunk in host._host_chunks)
        assert min(kept, again) > 0


@pytest.mark.parametrize("delay_seed", [None, 0, 1])
def test_nonfinite_steps_are_skipped(delay_seed, monkeypatch):
    monkeypatch.setattr(spares, "SPARE_BYTES_PER_ELEMENT", 20)
    monkeypatch.setattr(early_updates, "MOST_PAUSED_STEPS", 0)
    options = {"num_steps": 12, "bad_steps": (3, 4, 8), "host_share": 0.6}
    found, host = train(early=True, delay_seed=delay_seed, **options)
    assert_bitwise(found, train(early=False, **options)[0])
    assert sum(task.num_skipped for task in host._early._resolving.values()) > 0
