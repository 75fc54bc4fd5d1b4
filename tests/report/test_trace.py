"""Traces: what is in them, that they change no bit, and that they are read by the tools they are for."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

import forebay
from forebay.engine import Lane, get_engine
from forebay.engine.sim import SimEngine
from forebay.report.layers import find_layers
from forebay.report.names import label_of, shortened
from forebay.report.trace import trace

PLACEMENTS = {
    "device": {"offload_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "placement": "streamed"},
    "host": {"offload_fraction": 1.0, "placement": "host"},
}


def traced(path, placement, *, seed=0, attach=True, micro_batches=1):
    """Train three steps, the middle one traced, with its neighbours; return weights, recorder and the file's events."""
    engine = SimEngine(seed)
    model = tiny.build()
    optimizer = forebay.AdamW(
        model.named_parameters(), lr=1e-2, chunk_elements=4096, engine=engine, **PLACEMENTS[placement]
    )
    if attach:
        optimizer.attach(model)
    tiny.train(model, optimizer, num_steps=4)
    with trace(path, engine=engine) as recorder:
        for step in range(4, 7):
            tiny.train(model, optimizer, num_steps=1, first_step=step, micro_batches=micro_batches)
            recorder.mark_step()
    engine.synchronize()
    return tiny.weights(model), recorder, json.loads(path.read_text())["traceEvents"]


def untraced(placement, *, seed=0):
    engine = SimEngine(seed)
    model = tiny.build()
    optimizer = forebay.AdamW(
        model.named_parameters(), lr=1e-2, chunk_elements=4096, engine=engine, **PLACEMENTS[placement]
    )
    optimizer.attach(model)
    tiny.train(model, optimizer, num_steps=7)
    engine.synchronize()
    return tiny.weights(model)


def slices(events, row, kind=None):
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[row]
    return [e for e in events if e["ph"] == "X" and e["tid"] == row and kind in (None, e["cat"])]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("seed", range(0, 50, 7))
def test_tracing_changes_no_bit(tmp_path, placement, seed):
    tiny.assert_bitwise(traced(tmp_path / "step.json", placement, seed=seed)[0], untraced(placement, seed=seed))


@pytest.mark.parametrize("seed", range(50))
def test_each_lane_shows_what_it_did_named_by_parameter(tmp_path, seed):
    _, recorder, events = traced(tmp_path / "step.json", "host", seed=seed)
    names = {name for name, _ in tiny.build().named_parameters()}
    down = {e["name"] for e in slices(events, 2, "copy")}
    up = {e["name"] for e in slices(events, 4, "copy")}
    assert {f"gradient of {name}" for name in names} <= down
    assert {f"weight of {name}" for name in names} <= up
    updates = slices(events, 3, "host task")
    assert updates
    assert all(e["name"].startswith("update of ") for e in updates)
    assert recorder.recording.busy_ms(Lane.HOST) > 0


@pytest.mark.parametrize("placement", ["streamed", "host"])
@pytest.mark.parametrize("seed", range(0, 50, 5))
def test_slices_of_a_row_lie_in_or_beside_each_other(tmp_path, placement, seed):
    """Viewers draw a slice that ends in the middle of another one wrongly, or drop it."""
    _, _, events = traced(tmp_path / "step.json", placement, seed=seed, micro_batches=2)
    for row in range(1, 5):
        ends: list[float] = []
        for event in slices(events, row):
            while ends and ends[-1] <= event["ts"] + 0.002:  # times are rounded to nanoseconds
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 0.002, event
            ends.append(end)


def test_streamed_state_goes_up_is_updated_and_goes_down(tmp_path):
    _, _, events = traced(tmp_path / "step.json", "streamed")
    for row in (2, 4):
        found = {e["name"] for e in slices(events, row, "copy")}
        assert found
        assert all(name.startswith("state of ") for name in found), found
    updated = {e["name"] for e in slices(events, 1, "declared")}
    assert updated == {f"AdamW on the device: {name}" for name, _ in tiny.build().named_parameters()}
    copies = [e for row in (2, 4) for e in slices(events, row, "copy")]
    assert all(e["args"]["num_bytes"] > 0 and e["args"]["gb_per_s"] > 0 for e in copies)


def test_compute_shows_forward_backward_and_the_step_of_each_layer(tmp_path):
    _, _, events = traced(tmp_path / "step.json", "host", micro_batches=2)
    seen = [e["name"] for e in slices(events, 1, "compute")]
    # In both micro-batches of the traced step.
    for layer in ("embedding", "blocks.0", "blocks.1", "head"):
        assert seen.count(f"forward {layer}") == 2, seen
        assert seen.count(f"backward {layer}") == 2, seen
    assert seen.count("AdamW.step") == 1
    step = next(e for e in events if e.get("cat") == "step")
    end = step["ts"] + step["dur"]
    for event in slices(events, 1, "compute"):
        assert -1 <= event["ts"] <= event["ts"] + event["dur"] <= end + 1, event


def test_backward_of_the_last_layer_comes_first(tmp_path):
    _, _, events = traced(tmp_path / "step.json", "device")
    begins = {e["name"]: e["ts"] for e in slices(events, 1, "compute")}
    order = ["backward", "backward head", "backward blocks.1", "backward blocks.0", "backward embedding"]
    assert [begins[name] for name in order] == sorted(begins[name] for name in order)


def test_gates_that_waited_say_how_long_and_for_what(tmp_path):
    # Seed 0 runs everything as late as possible, so the gates wait for all of it.
    _, recorder, events = traced(tmp_path / "step.json", "host")
    gates = [e for e in slices(events, 1, "wait") if e["args"].get("lane_waited_for") == "up"]
    assert gates
    for gate in gates:
        assert gate["name"].startswith(f"waited {gate['args']['waited_ms']:.2f} ms for weight of "), gate
        assert gate["dur"] == pytest.approx(1000 * gate["args"]["waited_ms"], abs=0.01)
        assert gate["args"]["waited_ms"] >= 0.05
    recording = recorder.recording
    assert recording.gates()[0].duration_ms == max(gate.duration_ms for gate in recording.gates())
    assert 0 < recording.stall_ms() <= recording.window_ms[1] - recording.window_ms[0]


def test_memory_counters_are_the_ledgers(tmp_path):
    _, recorder, events = traced(tmp_path / "step.json", "streamed")
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"device bytes", "pinned bytes"}
    state = {e["args"]["optimizer_state"] for e in counters if e["name"] == "pinned bytes"}
    assert len(state) == 1
    assert state.pop() == recorder.recording.memory[0].tiers["pinned"]["optimizer_state"]
    staging = [e["args"]["staging"] for e in counters if e["name"] == "device bytes"]
    assert max(staging) > 0
    assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)


def test_without_marks_the_whole_block_is_shown(tmp_path):
    engine = get_engine("cpu")
    model = tiny.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Any optimizer and model; the default engine is the process's own.
    with forebay.trace(tmp_path / "step.json") as recorder:
        tiny.train(model, optimizer, num_steps=2)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [e["name"] for e in slices(events, 1)].count("SGD.step") == 2
    assert recorder.recording.gates() == []
    assert "copy" not in vars(engine)


def test_the_recorder_keeps_no_model_alive(tmp_path):
    import gc
    import weakref

    model = tiny.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(tmp_path / "step.json", engine=SimEngine(0)) as recorder:
        tiny.train(model, optimizer, num_steps=1)
    alive = weakref.ref(model.head.weight)
    del model, optimizer
    gc.collect()
    assert alive() is None
    assert recorder.recording.slices


def test_hybrid_optimizer_is_traced_too(tmp_path):
    engine = SimEngine(3)
    model = tiny.build()
    optimizer = forebay.HybridDeviceOptimizer(
        list(model.parameters()), offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW, engine=engine, lr=1e-2,
        gpu_optimizer_cls=torch.optim.AdamW, param_update_in_fp32=True,
    )  # fmt: skip
    tiny.train(model, optimizer, num_steps=1)
    with trace(tmp_path / "step.json", engine=engine):
        tiny.train(model, optimizer, num_steps=1, first_step=1)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["name"] for e in slices(events, 2, "copy")} >= {
        "gradient of blocks.0.1.weight",
        "gradient of head.weight",
    }
    assert {e["name"] for e in slices(events, 4, "copy")} >= {"weight of blocks.0.1.weight", "weight of head.weight"}
    assert next(e["name"] for e in slices(events, 3, "host task")) == "update of bucket 0"


def test_recomputation_is_told_from_forward(tmp_path):
    from torch.utils.checkpoint import checkpoint

    model = tiny.build()
    block = model.blocks[0]
    tokens = tiny.batch(0)
    with trace(tmp_path / "step.json", engine=SimEngine(0)):
        model(tokens).sum().backward()
        hidden = model.embedding(tokens)
        checkpoint(block, hidden, use_reentrant=False).sum().backward()
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    seen = [e["name"] for e in slices(events, 1)]
    assert seen.count("recompute blocks.0") == 1
    assert seen.count("forward blocks.0") == 2


def test_a_layer_with_two_outputs_is_in_backward_from_the_first_to_its_end(tmp_path):
    class Split(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return {"a": (x * self.weight).exp(), "b": x * 2}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            self.split = Split()

        def forward(self, x):
            parts = self.split(self.first(x))
            return parts["a"] + parts["b"].sin()

    order = []
    model = Model()
    with trace(tmp_path / "step.json", engine=SimEngine(0)) as recorder:
        loss = model(torch.randn(2, 4)).sum()
        model.split.weight.register_post_accumulate_grad_hook(lambda p: order.append(recorder.begin("mark")()))
        loss.backward()
    spans = {s.name: s for s in recorder.recording.slices}
    split, first = spans["backward split"], spans["backward first"]
    assert split.begin_ms <= spans["mark"].begin_ms <= split.end_ms <= first.begin_ms
    assert len(order) == 1


def test_an_exception_writes_nothing_and_removes_all_hooks(tmp_path):
    from torch.nn.modules import module as torch_module

    hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    before = [len(h) for h in hooks]
    engine = SimEngine(0)
    with pytest.raises(RuntimeError, match="stop"), trace(tmp_path / "step.json", engine=engine):
        raise RuntimeError("stop")
    assert not (tmp_path / "step.json").exists()
    assert [len(h) for h in hooks] == before
    with trace(tmp_path / "step.json", engine=engine):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "step.json"]


def test_mistakes(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"trace file .*gone/step.json: the folder .*gone does not exist"):
        trace(tmp_path / "gone" / "step.json", engine=SimEngine(0)).__enter__()
    engine = SimEngine(0)
    with trace(tmp_path / "a.json", engine=engine), pytest.raises(ValueError, match="traced already"):
        trace(tmp_path / "b.json", engine=engine).__enter__()


def test_layers_are_members_of_the_outermost_lists_and_what_is_in_none():
    model = tiny.build()
    assert list(find_layers(model).values()) == ["embedding", "blocks.0", "blocks.1", "head"]
    nested = torch.nn.ModuleDict({"a": torch.nn.ModuleList([torch.nn.ModuleList([torch.nn.Linear(1, 1)])])})
    assert list(find_layers(nested).values()) == ["a.0"]


def test_labels():
    assert label_of("state", ["a"]) == "state of a"
    assert label_of("state", ["a", "b", "c", "d"]) == "state of a, b + 2 more"
    assert shortened("update of a, b, c") == "update of a, b + 1 more"
    assert shortened("AdamW on the device") == "AdamW on the device"
