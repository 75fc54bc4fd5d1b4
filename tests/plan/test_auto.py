import pytest

from forebay.cli.main import main
from forebay.config import resolve
from forebay.plan import auto
from forebay.plan.auto import choose_fraction
from forebay.plan.native import NativePlanner
from forebay.plan.options import GIB, Choice
from forebay.plan.profile import load
from forebay.train.optimizers import effective_fraction

AUTO = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=auto"]


def _resolve(*words):
    return resolve("llama_1b_pretrain", [*AUTO, *words])


@pytest.mark.parametrize("available_gib", [12, 19, 20, 25, 28.8, 40])
def test_the_least_fraction_that_fits(planned, available_gib):
    resolved = _resolve()
    said = choose_fraction(resolved, available_gpu_bytes=int(available_gib * GIB))
    fraction = resolved.config.optimizer.optimizer_offload_fraction
    assert said.startswith(
        f"optimizer.optimizer_offload_fraction=auto: {fraction:g}; without offload the peak would be 28.7"
    )
    assert resolved.source("optimizer.optimizer_offload_fraction") == "auto"
    _, model = planned("llama_1b_pretrain")
    planner = NativePlanner(model, resolved.config, load("h200"))
    usable_gib = 0.97 * available_gib
    if fraction < 1:
        assert planner.estimate(Choice(2, fraction)).gpu_peak_bytes / GIB <= usable_gib
    if fraction > 0:
        assert planner.estimate(Choice(2, fraction - 0.01)).gpu_peak_bytes / GIB > usable_gib
    assert (fraction == 1.0) is (available_gib <= 19)
    assert (fraction == 0.0) is (available_gib > 30)


def test_what_is_configured_counts():
    plain, recomputed, staged = _resolve(), _resolve("model.recompute_granularity=full"), _resolve()
    staged.config.optimizer.optimizer_staging_gib = 2.0
    for resolved in (plain, recomputed, staged):
        choose_fraction(resolved, available_gpu_bytes=22 * GIB)
    fractions = [r.config.optimizer.optimizer_offload_fraction for r in (recomputed, plain, staged)]
    assert fractions == sorted(set(fractions))


def test_the_chosen_number_can_be_trained_with_and_auto_itself_cannot():
    resolved = _resolve()
    with pytest.raises(ValueError, match="has not been turned into a number; `forebay train` does that"):
        effective_fraction(resolved.config.optimizer)
    choose_fraction(resolved, available_gpu_bytes=22 * GIB)
    assert effective_fraction(resolved.config.optimizer) == resolved.config.optimizer.optimizer_offload_fraction
    assert resolve("llama_1b_pretrain", [*AUTO, "train.seed=2"]).config.optimizer.optimizer_offload_fraction == "auto"


def test_without_a_gpu_there_is_nothing_to_free(capsys):
    assert main(["train", "tiny_llama_demo", *AUTO, "train.device=cpu"]) == 2
    assert "without a GPU both tiers are the same memory" in capsys.readouterr().err


def test_train_trains_with_the_chosen_fraction(monkeypatch, capsys):
    from forebay.train import trainer

    seen = []
    monkeypatch.setattr(trainer, "train", lambda resolved: seen.append(resolved) or 0)
    monkeypatch.setattr(auto, "available_bytes", lambda device: (24 * GIB, 64 * GIB))
    assert main(["train", "llama_1b_pretrain", *AUTO]) == 0
    assert 0 < seen[0].config.optimizer.optimizer_offload_fraction < 1
    assert "optimizer_offload_fraction=auto: 0." in capsys.readouterr().err


def test_a_plan_starts_from_no_offload(capsys):
    assert main(["plan", "llama_1b_pretrain", *AUTO, "--gpu-mem", "24GiB", "--profile", "h200"]) == 0
    assert "no offload              no     28.7" in capsys.readouterr().out
