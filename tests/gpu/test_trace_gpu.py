"""Traces on a GPU: times are the device's own, lanes overlap, and tracing changes no bit."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

import forebay
from forebay.engine import Lane, get_engine
from forebay.report.trace import trace

pytestmark = pytest.mark.gpu


def trained(tmp_path, placement, *, is_traced):
    model = tiny.build(device="cuda", width=512)
    optimizer = forebay.AdamW(model.named_parameters(), lr=1e-2, offload_fraction=1.0, placement=placement)
    optimizer.attach(model)
    tiny.train(model, optimizer, num_steps=4)
    recorder = None
    if is_traced:
        with trace(tmp_path / "step.json") as recorder:
            for step in range(4, 7):
                tiny.train(model, optimizer, num_steps=1, first_step=step)
                recorder.mark_step()
    else:
        tiny.train(model, optimizer, num_steps=3, first_step=4)
    torch.cuda.synchronize()
    return tiny.weights(model), recorder


@pytest.mark.parametrize("placement", ["streamed", "host"])
def test_what_was_traced_is_there_and_no_bit_changes(tmp_path, placement):
    actual, recorder = trained(tmp_path, placement, is_traced=True)
    tiny.assert_bitwise(actual, trained(tmp_path, placement, is_traced=False)[0])
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "copy"]
    what = "state of " if placement == "streamed" else ("gradient of ", "weight of ")
    assert copies
    assert sum(e["name"].startswith(what) for e in copies) >= 0.9 * len(copies)
    # A copy cannot beat the bus by much, so the times are those of the copies and not of their launches.
    large = [e["args"]["gb_per_s"] for e in copies if e["args"]["num_bytes"] > 2**20]
    assert all(rate < 200 for rate in large), large
    names = {e["name"] for e in events if e["ph"] == "X" and e["tid"] == 1}
    assert {"forward blocks.0", "backward blocks.0", "AdamW.step"} <= names
    assert any(e["name"] == "device bytes, all" for e in events)
    recording = recorder.recording
    begin, end = recording.window_ms
    assert 0 < begin < end
    assert recording.busy_ms(Lane.DOWN) > 0
    assert "copy" not in vars(get_engine("cuda"))
