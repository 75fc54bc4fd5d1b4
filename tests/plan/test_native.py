"""The models against what was measured on an H200: the rows in benchmarks/results."""

import csv
import json
from pathlib import Path

import pytest
import torch

from forebay.config import resolve
from forebay.plan.native import NativePlanner
from forebay.plan.options import GIB, Choice
from forebay.plan.profile import load
from forebay.train.optimizers import optimizer_plan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def _rows(name):
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def llama(planned):
    config, model = planned("llama_1b_pretrain")
    return NativePlanner(model, config, load("h200"))


@pytest.mark.parametrize("row", _rows("loss_curves_llama_1b_summary.csv"), ids=lambda row: row["fraction"])
def test_peak_of_every_fraction_is_within_one_percent(llama, row):
    estimate = llama.estimate(Choice(2, float(row["fraction"])))
    assert estimate.gpu_peak_bytes / GIB == pytest.approx(float(row["peak_gib"]), rel=0.01)


def _last_runs():
    found = {}
    for row in _rows("optimizer_2026-12-01.csv"):
        options = json.loads(row["options"])
        # Runs before the fifth held gradients into the next forward, or shared a detour between the lanes.
        is_current = row["run"] in ("5", "7") or options.get("placement") in ("streamed", "host")
        is_modelled = not options.keys() & {"state_dtype", "host_share", "graph", "early_updates"}
        if row["system"] == "forebay" and is_current and is_modelled:
            found[row["tokens"], row["options"]] = (options, row)
    return list(found.values())


@pytest.mark.parametrize(("options", "row"), _last_runs(), ids=lambda value: str(value)[:60])
def test_peak_and_time_of_the_benchmark(planned, options, row):
    config, model = planned("llama_1b_pretrain")
    config.train.global_batch_size = int(row["tokens"]) // 4096
    planner = NativePlanner(model, config, load("h200"))
    choice = Choice(
        2, options["offload_fraction"], options.get("placement", "auto"), staging_gib=options.get("staging_gib", 0.0)
    )
    estimate = planner.estimate(choice)
    assert estimate.gpu_peak_bytes / GIB == pytest.approx(float(row["peak_gib"]), rel=0.05)
    # How well the model fits, not how fast anything is: the figures are in a file.
    assert 1e3 * estimate.step_seconds == pytest.approx(float(row["step_ms"]), rel=0.15)


def test_optimizer_bytes_are_those_of_the_optimizer(planned):
    config, model = planned("llama_1b_pretrain")
    planner = NativePlanner(model, config, load("h200"))
    for placement in ("auto", "streamed", "host"):
        estimate = planner.estimate(Choice(2, 0.6, placement))
        config.optimizer.optimizer_offload_placement = placement
        config.optimizer.overlap_cpu_optimizer_d2h_h2d = True
        plan = optimizer_plan(config, model.params, torch.device("cuda"), fraction=0.6)
        assert estimate.gpu_bytes["optimizer state"] == plan["device"]["optimizer_state"]
        assert estimate.host_total_bytes == sum(sum(plan[tier].values()) for tier in ("pinned", "pageable"))
    assert planner.state_bytes() == pytest.approx(10 * model.num_params, rel=1e-3)


def test_planning_leaves_the_configuration_alone(planned):
    config, model = planned("llama_1b_pretrain")
    before = resolve("llama_1b_pretrain").config
    NativePlanner(model, config, load("h200")).estimate(Choice(1, 0.5, "host"))
    assert config == before


@pytest.mark.parametrize("placement", ["auto", "streamed", "host"])
def test_more_offload_never_takes_more_gpu_memory_or_less_time(llama, placement):
    estimates = [llama.estimate(Choice(2, fraction / 10, placement)) for fraction in range(11)]
    peaks = [estimate.gpu_peak_bytes for estimate in estimates]
    waits = [estimate.seconds.get("waiting for copies and host updates", 0) for estimate in estimates]
    assert peaks == sorted(peaks, reverse=True)
    assert waits == sorted(waits)


def test_moments_of_the_peak(llama, planned):
    # One micro-batch: no gradients yet when the loss is at its peak. Several: those of the earlier ones.
    one = llama.estimate(Choice(2))
    several = llama.estimate(Choice(1))
    assert "gradients" not in one.gpu_bytes
    assert several.gpu_bytes["gradients"] == several.gpu_bytes["weights"]
    # Short sequences: the end of backward, with all gradients and the staging of streamed state.
    config, model = planned("llama_1b_pretrain")
    config.dataset.seq_length = 64
    end = NativePlanner(model, config, load("h200")).estimate(Choice(2, 1.0))
    assert {"gradients", "staging"} <= set(end.gpu_bytes)
    assert "activations" not in end.gpu_bytes


def test_recomputation_and_offload_of_layers(llama):
    kept, recomputed = llama.estimate(Choice(2)), llama.estimate(Choice(2, recompute_layers=16))
    half, offloaded = llama.estimate(Choice(2, recompute_layers=8)), llama.estimate(Choice(2, offload_layers=8))
    assert recomputed.gpu_peak_bytes < half.gpu_peak_bytes < kept.gpu_peak_bytes
    assert recomputed.step_seconds > half.step_seconds > kept.step_seconds
    # Full recomputation is one forward more.
    assert recomputed.seconds["recomputation"] == pytest.approx(sum(llama.forward_seconds(Choice(2)).values()))
    assert offloaded.gpu_peak_bytes < kept.gpu_peak_bytes
    assert offloaded.host_bytes["activations"] > 6 * GIB


def test_python_is_waited_for_when_the_gpu_is_faster(planned):
    config, model = planned("llama_1b_pretrain")
    config.dataset.seq_length = 128
    estimate = NativePlanner(model, config, load("h200")).estimate(Choice(1))
    assert estimate.seconds["waiting for Python"] > 0


def test_partial_policies_lie_between_all_and_nothing(llama):
    for kind in ("recompute_layers", "offload_layers"):
        peaks = [llama.estimate(Choice(2, **{kind: count})).gpu_peak_bytes for count in range(16)]
        assert peaks == sorted(peaks, reverse=True)
        steps = [llama.estimate(Choice(2, **{kind: count})).step_seconds for count in range(16)]
        assert steps == sorted(steps)
