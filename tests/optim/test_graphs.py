"""A captured step, in the simulator: every launch does what an eager step does, under adversarial orders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_cuda import COMPUTE, EngineOnFake
from graph_trainer import GraphTrainer, assert_same, steps
from tiny import assert_bitwise
from torch import nn

import forebay
from forebay.engine import HostTaskError, Lane
from forebay.engine.sim import RaceError, SimEngine
from forebay.host import kernels
from forebay.optim.streamed_share import StreamedShare

SEEDS = range(50)
CHUNK = 4096
NUM_WARMUP, NUM_LAUNCHES, NUM_AFTER = 4, 5, 3
PLACEMENTS = [
    {"offload_fraction": 0.0},
    {"offload_fraction": 1.0, "placement": "streamed"},
    {"offload_fraction": 1.0, "placement": "host"},
    {"offload_fraction": 0.8, "host_share": 0.5},
    {"offload_fraction": 1.0, "host_share": 0.4, "staging_gib": 2**-13},
]


class Trainer(GraphTrainer):
    def __init__(self, engine, **kwargs):
        super().__init__(
            engine, engine.capture if isinstance(engine, SimEngine) else None, **{"chunk_elements": CHUNK} | kwargs
        )


TOTAL = NUM_WARMUP + NUM_LAUNCHES + NUM_AFTER


@pytest.fixture(scope="module")
def eager():
    results = {}
    for keep_grads in (False, True):
        trainer = Trainer(SimEngine(0), offload_fraction=0.0)
        trainer.eager(range(TOTAL), keep_grads=keep_grads)
        results[keep_grads] = trainer.result()
    return results


@pytest.mark.parametrize("seed", SEEDS)
def test_launches_are_eager_steps(seed, eager):
    engine = SimEngine(seed)
    with engine.watch():
        trainer = Trainer(engine, attach=seed % 2 == 0, overlap=seed % 3 > 0, **PLACEMENTS[seed % 5])
        trainer.eager(steps(0, NUM_WARMUP))
        graph = trainer.capture()
        trainer.launch(graph, steps(NUM_WARMUP, NUM_LAUNCHES))
        trainer.eager(steps(NUM_WARMUP + NUM_LAUNCHES, NUM_AFTER))
        assert_same(trainer.result(), eager[False])


@pytest.mark.parametrize("seed", SEEDS)
def test_rotated_launches_are_eager_steps(seed, eager):
    engine = SimEngine(seed)
    with engine.watch():
        trainer = Trainer(engine, attach=seed % 2 == 0, overlap=seed % 3 > 0, **PLACEMENTS[seed % 5])
        trainer.eager(steps(0, NUM_WARMUP), keep_grads=True)
        trainer.backward_ahead(NUM_WARMUP)
        graph = trainer.capture_rotated()
        trainer.launch_rotated(graph, steps(NUM_WARMUP, NUM_LAUNCHES))
        trainer.update_behind(NUM_WARMUP + NUM_LAUNCHES)
        trainer.eager(steps(NUM_WARMUP + NUM_LAUNCHES + 1, NUM_AFTER - 1), keep_grads=True)
        assert_same(trainer.result(), eager[True])


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_eager_steps_and_state_dicts_between_launches(seed, rotated, eager):
    engine = SimEngine(seed)
    with engine.watch():
        trainer = Trainer(engine, attach=seed % 2 == 0, **PLACEMENTS[seed % 5])
        trainer.eager(steps(0, NUM_WARMUP), keep_grads=True)
        step = NUM_WARMUP
        if rotated:
            trainer.backward_ahead(step)
        graph = trainer.capture_rotated() if rotated else trainer.capture()
        for _ in range(2):
            if rotated:
                trainer.launch_rotated(graph, [step, step + 1])
                trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
                trainer.update_behind(step + 2)
                trainer.backward_ahead(step + 3)
            else:
                trainer.launch(graph, [step, step + 1])
                trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
                trainer.eager([step + 2], keep_grads=True)
            step += 3
        if rotated:
            trainer.update_behind(step)
            trainer.eager([step + 1], keep_grads=True)
        else:
            trainer.eager([step, step + 1], keep_grads=True)
        assert_same(trainer.result(), eager[True])


def captured(placement, *, seed=0, rotated=False, engine=None, **kwargs):
    trainer = Trainer(engine or SimEngine(seed), **PLACEMENTS[placement], **kwargs)
    trainer.eager(steps(0, NUM_WARMUP), keep_grads=True)
    if rotated:
        trainer.backward_ahead(NUM_WARMUP)
        return trainer, trainer.capture_rotated()
    return trainer, trainer.capture()


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_other_state_dtypes(state_dtype):
    eager = Trainer(SimEngine(0), offload_fraction=0.0, state_dtype=state_dtype)
    eager.eager(range(NUM_WARMUP + NUM_LAUNCHES), keep_grads=True)
    placement = 3 if state_dtype == "bf16" else 1
    trainer, graph = captured(placement, seed=3, state_dtype=state_dtype)
    trainer.launch(graph, steps(NUM_WARMUP, NUM_LAUNCHES))
    assert_same(trainer.result(), eager.result())


@pytest.mark.parametrize("placement", range(5))
def test_a_capture_carries_nothing_out(placement):
    trainer = Trainer(SimEngine(placement), **PLACEMENTS[placement])
    trainer.eager(steps(0, NUM_WARMUP))
    before = trainer.result()
    trainer.capture()
    assert_same(trainer.result(), before)


def test_skipped_steps_count_in_launches_too():
    def run(launched):
        trainer = Trainer(SimEngine(1), skip_nonfinite=True, offload_fraction=0.8, host_share=0.5)
        trainer.eager(steps(0, NUM_WARMUP))
        graph = trainer.capture() if launched else None
        for step in steps(NUM_WARMUP, 4):
            spoiled = trainer.model.blocks[0][1].bias
            kept = spoiled.detach().clone()
            if step == NUM_WARMUP + 1:
                spoiled.data.fill_(torch.inf)
            if launched:
                trainer.launch(graph, [step])
            else:
                trainer.eager([step])
            trainer.optimizer.synchronize()
            if step == NUM_WARMUP + 1:
                spoiled.data.copy_(kept)
        return trainer.result()

    actual, expected = run(True), run(False)
    assert float(actual[2]["state"][0]["step"]) == NUM_WARMUP + 3
    assert_bitwise(actual[1], expected[1])


def test_weights_written_between_launches_refresh_the_masters():
    def run(launched):
        trainer, graph = captured(3, seed=2)
        for step in steps(NUM_WARMUP, 3):
            trainer.optimizer.synchronize()
            with torch.no_grad():
                trainer.model.head.weight.mul_(0.5)
            if launched:
                trainer.launch(graph, [step])
            else:
                trainer.eager([step])
        return trainer.result()

    assert_same(run(True), run(False))


class TestPlantedFaults:
    @pytest.mark.parametrize(
        ("placement", "lane"),
        [(1, lane) for lane in (Lane.COMPUTE, Lane.DOWN, Lane.UP)] + [(2, lane) for lane in Lane],
    )
    def test_a_wait_left_out_of_the_capture_is_noticed(self, placement, lane, monkeypatch):
        engine = SimEngine(0)
        with engine.watch():
            trainer = Trainer(engine, **PLACEMENTS[placement])
            trainer.eager(steps(0, NUM_WARMUP))
            wait = engine.wait
            monkeypatch.setattr(
                engine, "wait", lambda on, event: None if engine.capturing and on is lane else wait(on, event)
            )
            # The compute lane's waits are also what joins the side lanes.
            with pytest.raises((RaceError, RuntimeError), match=r"race|not joined"):
                trainer.launch(trainer.capture(), steps(NUM_WARMUP, 3))

    def test_a_capture_that_is_not_joined(self, monkeypatch):
        monkeypatch.setattr(forebay.AdamW, "join", lambda self: None)
        with pytest.raises(
            RuntimeError, match=r"work on lane '(down|host|up)' that is not joined .* call optimizer.join\(\)"
        ):
            captured(2)

    def test_a_launch_after_eager_steps_without_waiting_for_them(self, monkeypatch):
        engine = SimEngine(0)
        with engine.watch():
            trainer, graph = captured(1, engine=engine)
            trainer.eager([NUM_WARMUP], keep_grads=True)
            with pytest.raises(RaceError, match="of the graph"):
                graph.replay()

    def test_memory_for_visits_that_is_not_kept(self, monkeypatch):
        end = StreamedShare._end

        def forget(self, visit):
            self._kept_buffers.clear()
            end(self, visit)

        monkeypatch.setattr(StreamedShare, "_end", forget)
        # The captured step lets go of it, and a launch finds something else there.
        trainer, graph = captured(4, rotated=True)
        trainer.launch_rotated(graph, steps(NUM_WARMUP, 2))
        assert not torch.stack(trainer.losses).isfinite().all()


class TestErrors:
    def capture(self, trainer, body):
        with trainer.engine.capture():
            body()

    def warm(self, placement=2, **kwargs):
        trainer = Trainer(SimEngine(0), **PLACEMENTS[placement], **kwargs)
        trainer.eager(steps(0, 2))
        return trainer

    def test_before_any_step(self):
        trainer = Trainer(SimEngine(0), offload_fraction=1.0)
        with pytest.raises(RuntimeError, match=r"0 of group 0 has no state yet.*call optimizer.allocate\(\)"):
            trainer.capture()
        trainer.optimizer.allocate()
        with pytest.raises(RuntimeError, match=r"the first step cannot be captured.*make at least one step"):
            trainer.capture()

    def test_a_parameter_that_first_gets_a_gradient(self):
        trainer = Trainer(SimEngine(0), offload_fraction=1.0)
        trainer.model.head.weight.requires_grad_(False)
        trainer.eager(steps(0, 2))
        trainer.model.head.weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match="parameter 13 of group 0 has no state yet"):
            trainer.capture()

    def test_closure(self):
        trainer = self.warm()
        with pytest.raises(ValueError, match=r"a closure cannot be captured.*call it before step\(\)"):
            self.capture(trainer, lambda: trainer.optimizer.step(lambda: None))

    def test_clipping_outside(self):
        trainer = self.warm()
        trainer.backward_ahead(2)
        trainer.optimizer.clip_grad_norm_(0.1)
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) was called before the capture"):
            self.capture(trainer, trainer.optimizer.step)

    def test_other_optimizers(self):
        param = nn.Parameter(torch.ones(64))
        engine = SimEngine(0)
        optimizer = forebay.SGD([param], lr=0.1, engine=engine)
        param.grad = torch.ones(64)
        optimizer.step()
        with pytest.raises(ValueError, match="a step of SGD cannot be captured in a CUDA graph, only one of AdamW"):
            self.capture(SimpleNamespace(engine=engine), optimizer.step)

    @pytest.mark.skipif(kernels.backend() == "torch", reason="spoils a task of the native kernel")
    def test_a_host_update_that_fails_in_a_launch(self):
        trainer, graph = captured(2)
        trainer.launch(graph, [NUM_WARMUP])
        for task in trainer.optimizer.placed._host._tasks():
            task._c_segments[0].grad = None
        trainer.launch(graph, [NUM_WARMUP + 1])
        with pytest.raises(HostTaskError, match=r"host task 'update of .* failed"):
            trainer.launch(graph, [NUM_WARMUP + 2])

    def test_no_gradients(self):
        trainer = self.warm()
        trainer.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="no parameter has a gradient"):
            self.capture(trainer, trainer.optimizer.step)

    def test_written_parameters(self):
        trainer = self.warm()
        with torch.no_grad():
            trainer.model.head.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"parameters were written .* call optimizer.refresh_masters\(\)"):
            trainer.capture()

    def test_pageable_memory(self):
        trainer = self.warm(pinned=False)
        with pytest.raises(ValueError, match="pinned=False: a CUDA graph needs pinned host memory"):
            trainer.capture()

    @pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
    def test_state_in_a_capture(self, method):
        trainer = self.warm()
        arguments = [trainer.optimizer.state_dict()] if method == "load_state_dict" else []
        with pytest.raises(RuntimeError, match="state cannot be read or written while a CUDA graph is being captured"):
            self.capture(trainer, lambda: getattr(trainer.optimizer, method)(*arguments))

    def test_gradients_that_move(self):
        trainer = self.warm(1)
        trainer.backward_ahead(2)

        def rotated():
            trainer.update()
            trainer.optimizer.zero_grad()
            trainer.backward()
            trainer.optimizer.join()

        with pytest.raises(RuntimeError, match=r"gradient of 0 of group 0 is not where.*set_to_none=False"):
            self.capture(trainer, rotated)
        trainer, graph = captured(1, rotated=True)
        trainer.optimizer.zero_grad()
        trainer.backward()
        with pytest.raises(RuntimeError, match=r"gradient of 0 of group 0 is not where.*set_to_none=False"):
            trainer.launch_rotated(graph, [NUM_WARMUP])

    def test_a_step_whose_gradients_no_backward_sends(self):
        trainer = self.warm(2)
        trainer.backward_ahead(2)

        def alone():
            trainer.update()
            trainer.optimizer.join()

        with pytest.raises(
            RuntimeError, match=r"the captured step needs the gradient of .* no backward in the capture"
        ):
            self.capture(trainer, alone)

    def test_refreshing(self):
        trainer = self.warm()
        with pytest.raises(RuntimeError, match="no step has been captured in a CUDA graph"):
            trainer.optimizer.refresh_hyperparameters()
        with pytest.raises(RuntimeError, match="comes before a launch of a CUDA graph, not into a capture"):
            self.capture(trainer, trainer.optimizer.refresh_hyperparameters)
        trainer, graph = captured(2)
        trainer.optimizer.param_groups[0]["betas"] = (0.8, 0.999)
        with pytest.raises(ValueError, match=r"beta1 of group 0 was 0.9 .* is 0.8 now; lr and weight_decay may change"):
            trainer.launch(graph, [NUM_WARMUP])
        trainer, graph = captured(2)
        trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))]})
        with pytest.raises(RuntimeError, match="or parameters were added since"):
            trainer.launch(graph, [NUM_WARMUP])

    @pytest.mark.parametrize("placement", range(5))
    def test_a_capture_that_fails_leaves_the_optimizer_usable(self, placement, eager):
        trainer = Trainer(SimEngine(placement), **PLACEMENTS[placement])
        trainer.eager(steps(0, NUM_WARMUP))

        def failing():
            trainer.optimizer.zero_grad()
            trainer.backward()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            self.capture(trainer, failing)
        trainer.eager(steps(NUM_WARMUP, TOTAL - NUM_WARMUP))
        assert_same(trainer.result(), eager[False])


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("placement", range(5))
def test_the_cuda_engine_captures_a_step_by_the_rules(placement, overlap, attach, rotated):
    """Nothing is carried out here, so values mean nothing; a wait or query that CUDA would refuse is an error."""
    bench = EngineOnFake()
    trainer = Trainer(bench.engine, attach=attach, overlap=overlap, **PLACEMENTS[placement])
    trainer.eager(steps(0, NUM_WARMUP), keep_grads=True)
    for _ in range(2):
        if rotated:
            trainer.backward_ahead(NUM_WARMUP)
        bench.cuda.calls.clear()
        bench.cuda.begin_capture(COMPUTE)
        if rotated:
            trainer.update()
        trainer.optimizer.zero_grad(set_to_none=not rotated)
        trainer.backward()
        if not rotated:
            trainer.update()
        trainer.optimizer.join()
        assert bench.cuda.end_capture() == 0
        captured = [call[-1] > 0 for call in bench.cuda.calls if call[0] in ("copy", "launch")]
        assert all(captured), "a copy was carried out at once"
        assert bool(captured) == (placement > 0)
        for step in steps(NUM_WARMUP, 2):
            trainer.schedule(step)
            trainer.optimizer.refresh_hyperparameters()
        trainer.eager(steps(NUM_WARMUP, 2), keep_grads=True)
