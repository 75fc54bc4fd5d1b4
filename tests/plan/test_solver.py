import dataclasses

import pytest

from forebay.config import resolve, validate
from forebay.plan.native import NativePlanner
from forebay.plan.options import GIB, Budget, Choice
from forebay.plan.profile import load
from forebay.plan.solver import Solver, apply, choice_of, is_accepted, words

ANSWERS = ("no_offload", "offload", "cheapest", "fastest", "smallest")


def _solver(config, model, gpu_gib, host_gib=None):
    budget = Budget(int(gpu_gib * GIB), None if host_gib is None else int(host_gib * GIB))
    count = len(model.layers)
    planner = NativePlanner(model, config, load("h200"))
    return Solver(planner, config, budget, "native", num_layers=count, num_stage_layers=count)


@pytest.mark.parametrize("gpu_gib", [5, 7, 12, 16, 20, 24, 30, 48, 139])
@pytest.mark.parametrize("host_gib", [None, 6, 12])
def test_what_is_said_to_fit_fits_and_the_words_are_accepted(planned, gpu_gib, host_gib):
    config, model = planned("llama_1b_pretrain", "train.global_batch_size=4")
    solver = _solver(config, model, gpu_gib, host_gib)
    answer = solver.solve()
    budget = Budget(int(gpu_gib * GIB), None if host_gib is None else int(host_gib * GIB))
    for name in ANSWERS:
        option = getattr(answer, name)
        if option is None:
            continue
        assert option.fits is budget.fits(option.estimate)
        changed = words(config, option.choice, len(model.layers))
        resolved = resolve("llama_1b_pretrain", ["train.global_batch_size=4", *changed])
        # As on the command line, where values that nothing reads are refused too.
        validate(resolved.config, sources=resolved.sources)
        assert resolved.config == apply(config, option.choice, len(model.layers))
        assert choice_of(resolved.config, len(model.layers)) == option.choice
    for name in ("offload", "cheapest", "fastest"):
        assert getattr(answer, name) is None or getattr(answer, name).fits


def test_the_answers_are_what_they_are_called(planned):
    config, model = planned("llama_1b_pretrain", "train.global_batch_size=4")
    answer = _solver(config, model, 22).solve()
    assert not answer.no_offload.fits
    assert (answer.offload.choice.micro_batch, answer.offload.choice.recompute_layers) == (2, 0)
    assert answer.cheapest.estimate.host_total_bytes <= answer.offload.estimate.host_total_bytes
    assert answer.fastest.estimate.step_seconds <= answer.offload.estimate.step_seconds
    assert answer.fastest.estimate.step_seconds <= answer.cheapest.estimate.step_seconds
    assert all(
        answer.smallest.estimate.gpu_peak_bytes <= getattr(answer, name).estimate.gpu_peak_bytes for name in ANSWERS
    )


@pytest.mark.parametrize("placement", ["auto", "streamed", "host"])
def test_the_fraction_is_the_least_that_fits(planned, placement):
    config, model = planned("llama_1b_pretrain")
    solver = _solver(config, model, 24)
    fraction = solver.least_fraction(Choice(2, placement=placement))
    assert 0 < fraction < 1
    planner, budget = NativePlanner(model, config, load("h200")), Budget(24 * GIB)
    assert budget.fits(planner.estimate(Choice(2, fraction, placement)))
    assert not budget.fits(planner.estimate(Choice(2, round(fraction - 0.01, 2), placement)))


def test_every_hundredth_against_all_hundredths(planned):
    # The solver computes the least fraction; here all of them are tried.
    config, model = planned("llama_1b_pretrain")
    planner = NativePlanner(model, config, load("h200"))
    for gib in (19.5, 21, 25.3, 28):
        budget = Budget(int(gib * GIB))
        fits = [f for f in range(101) if budget.fits(planner.estimate(Choice(2, f / 100)))]
        assert _solver(config, model, gib).least_fraction(Choice(2)) == pytest.approx(min(fits, default=100) / 100)


def test_no_offload_wins_where_it_fits(planned):
    config, model = planned("llama_1b_pretrain")
    answer = _solver(config, model, 139).solve()
    assert answer.fastest.choice == answer.no_offload.choice == answer.offload.choice
    assert words(config, answer.fastest.choice, len(model.layers)) == []


def test_nothing_fits(planned):
    config, model = planned("llama_1b_pretrain")
    answer = _solver(config, model, 4).solve()
    assert (answer.offload, answer.cheapest, answer.fastest) == (None, None, None)
    assert answer.smallest.choice.fraction == 1.0
    assert not answer.smallest.fits


def test_a_host_budget_is_kept(planned):
    config, model = planned("llama_1b_pretrain")
    free = _solver(config, model, 9).solve()
    tight = _solver(config, model, 9, 8.5).solve()
    assert free.fastest.estimate.host_total_bytes > 8.5 * GIB
    assert tight.fastest is None or tight.fastest.estimate.host_total_bytes <= 8.5 * GIB


def test_only_what_the_rules_accept_is_chosen(planned):
    config, model = planned("llama_1b_pretrain")
    count = len(model.layers)
    accepts = lambda choice: is_accepted(config, choice, "native", count)  # noqa: E731
    assert accepts(Choice(2, 0.5, "host", 1.0, recompute_layers=count))
    assert not accepts(Choice(2, offload_layers=3))
    assert not accepts(Choice(2, recompute_layers=3))
    config.optimizer.use_torch_optimizer_for_cpu_offload = True
    assert accepts(Choice(2, 0.5))
    assert not accepts(Choice(2, 0.5, "host"))
    assert not accepts(Choice(2, 0.5, staging_gib=1.0))
    config = dataclasses.replace(config)
    config.optimizer = dataclasses.replace(
        config.optimizer, use_torch_optimizer_for_cpu_offload=False, optimizer_state_dtype="8bit"
    )
    assert not is_accepted(config, Choice(2, 0.5, "host"), "native", count)


def test_words_undo_what_the_configuration_offloads(planned):
    config, model = planned(
        "llama_1b_pretrain",
        "optimizer.optimizer_cpu_offload=True",
        "optimizer.optimizer_offload_fraction=0.5",
        "optimizer.optimizer_offload_placement=host",
        "model.recompute_granularity=full",
    )
    assert words(config, Choice(2), len(model.layers)) == [
        "model.recompute_granularity=null",
        "optimizer.optimizer_cpu_offload=False",
        "optimizer.optimizer_offload_fraction=0.0",
        "optimizer.optimizer_offload_placement=auto",
    ]
