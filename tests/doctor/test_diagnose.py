from pathlib import Path

import pytest

from forebay.config.rules_megatron import MEGATRON_RULES
from forebay.doctor import diagnose
from forebay.doctor.log_facts import read

LOGS = Path(__file__).parent / "logs"
# Each log, and every symptom that it shows, in the order of certainty.
EXPECTED = {
    "deepspeed_oom": ["oom"],
    "deepspeed_slow": ["scalar_cpu_adam", "slow_cpu_update"],
    "forebay_does_not_fit": ["run_does_not_fit"],
    "forebay_nan": ["nan_after_offload"],
    "fsdp_oom": ["oom", "oom_logits"],
    "killed_kernel": ["host_oom_killed"],
    "killed_shell": ["host_oom_killed"],
    "killed_slurm": ["host_oom_killed"],
    "killed_torchrun": ["host_oom_killed"],
    "megatron_activation_oom": ["oom", "oom_activation_offload_pp1"],
    "megatron_both": ["both_activation_offloads"],
    "megatron_decay": ["optimizer_offload_distributed_or_optimizer_offload_decoupled"],
    "megatron_fraction_one_only": ["slow_cpu_update"],
    "megatron_graphs": ["activation_offload_cuda_graphs"],
    "megatron_healthy": [],
    "megatron_layers": ["activation_offload_layers"],
    "megatron_nan": ["nan_after_offload"],
    "megatron_partial_oom": ["oom", "oom_partial_fraction"],
    "megatron_pp": ["activation_offload_pp"],
    "megatron_recompute": ["activation_offload_recompute"],
    "megatron_slow": ["slow_cpu_update"],
    "megatron_slow_timers": ["slow_cpu_update"],
    "pinned_forebay": ["pinned_memory"],
    "pinned_infiniband": ["pinned_memory"],
    "pinned_torch": ["pinned_memory"],
    "timeout": ["collective_timeout"],
    "torch_oom_fragmented": ["oom", "oom_fragmentation"],
    "torch_oom_old_format": ["oom"],
    "torch_oom_shared": ["oom_shared_gpu", "oom"],
    "torch_oom_step": ["oom", "oom_optimizer_step"],
}


def _lines(name):
    return (LOGS / f"{name}.log").read_text("utf-8").splitlines(keepends=True)


@pytest.mark.parametrize("name", sorted(path.stem for path in LOGS.glob("*.log")))
def test_a_log_shows_these_symptoms_and_no_others(name):
    found = diagnose(_lines(name))
    assert [diagnosis.symptom for diagnosis in found] == EXPECTED[name]
    for diagnosis in found:
        assert diagnosis.cause
        assert diagnosis.fix
        for number, text in diagnosis.evidence:
            assert text[:40] in _lines(name)[number - 1].replace("\x1b[32m", "")


def test_every_rule_of_megatron_is_known_by_its_message():
    for rule in MEGATRON_RULES:
        found = diagnose([f"AssertionError: {rule.message.format(num_layers=48)}."])
        assert len(found) == 1, rule.id
        assert rule.id in found[0].symptom
        assert rule.fix in found[0].fix


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("megatron_slow", "megatron"),
        ("deepspeed_oom", "deepspeed"),
        ("fsdp_oom", "fsdp"),
        ("torch_oom_step", "torch"),
        ("forebay_nan", "forebay"),
    ],
)
def test_the_fix_is_for_who_wrote_the_log(name, framework):
    assert read(_lines(name)).framework == framework


def test_confidence_follows_the_evidence():
    def slow(name):
        return next(d for d in diagnose(_lines(name)) if d.symptom == "slow_cpu_update").confidence

    assert slow("megatron_slow") == "likely"
    assert slow("megatron_slow_timers") == "likely"
    assert slow("megatron_fraction_one_only") == "possible"


def test_a_timer_that_clears_the_optimizer_is_believed():
    lines = [line.replace("(3", "(0") for line in _lines("megatron_slow_timers")]
    assert diagnose(lines) == []


def test_the_documents_list_every_symptom():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
    for symptom in {name for names in EXPECTED.values() for name in names} | {"torch_host_kernel", "nan"}:
        if not any(rule.id in symptom for rule in MEGATRON_RULES):
            assert f"`{symptom}`" in page


def test_amounts_are_read():
    facts = read(_lines("megatron_activation_oom"))
    error = facts.out_of_memory[0]
    assert (error.tried_gib, error.total_gib, error.allocated_gib) == (0.5, 79.11, 70.3)
    assert facts.settings["cpu_offloading_num_layers"] == "24"
    oom = next(d for d in diagnose(_lines("megatron_partial_oom")) if d.symptom == "oom_partial_fraction")
    assert "at least 2.3 GiB are missing" in oom.fix[0]


def test_symptoms_without_a_log_of_their_own():
    assert [d.symptom for d in diagnose(["iteration 3 | lm loss: nan"])] == ["nan"]
    warning = "forebay was installed without its native host kernels (no C++ compiler at install time?)."
    assert [d.symptom for d in diagnose([warning])] == ["torch_host_kernel"]
    assert diagnose(["all is well", "the loss: nanoscopic", "loss 3.1 | nan iterations: 0"]) == []


def test_step_times_are_kept_apart_by_fraction():
    facts = read(_lines("megatron_slow"))
    assert facts.median_step_ms(None) == pytest.approx(995.95)
    assert facts.median_step_ms(1.0) == pytest.approx(4190.15)
