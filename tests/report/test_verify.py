"""Verification passes what is right, and fails each planted fault, naming the first step and parameter."""

from __future__ import annotations

import json
import re
import sys

import pytest
import tiny_run
import yaml

from forebay.cli.main import main
from forebay.report import points
from forebay.report.verify import first_difference

OFFLOAD = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
HOST = [*OFFLOAD, "optimizer.optimizer_offload_placement=host"]

# Each runs in both processes, and does nothing where nothing is offloaded.
FAULTS = {
    "a skipped upload": """
from forebay.engine import Lane
from forebay.engine.sim import SimEngine
from forebay.optim.host_share import HostShare
uploads, copy, upload = [], SimEngine.copy, HostShare.upload

def counted_upload(self, context):
    uploads.append(0)
    return upload(self, context)

def faulty_copy(self, lane, destination, source, **options):
    if lane is Lane.UP and uploads:
        uploads[-1] += 1
        if len(uploads) == 3 and uploads[-1] == 2:  # the second weight of the third step
            return
    copy(self, lane, destination, source, **options)

HostShare.upload, SimEngine.copy = counted_upload, faulty_copy
""",
    "a wrong beta": """
from forebay.optim.adamw_rule import AdamWRule
set_hyper = AdamWRule.set_hyper

def wrong(self, hyper, group):
    set_hyper(self, hyper, group)
    hyper.beta2 = 0.9

AdamWRule.set_hyper = wrong
""",
    "a lost remainder": """
from forebay.optim.host_share import HostShare
step = HostShare.step

def forgetful(self, context):
    step(self, context)
    self.settle()
    for state in self.chunks:
        for fields in state.segment_fields(state.region):
            fields["remainder"].zero_()

HostShare.step = forgetful
""",
}
WORKER = "\nimport sys\nfrom forebay.report.worker import main\nsys.exit(main(sys.argv[1:]))\n"


def verify(tmp_path, capsys, *arguments, recipe="tiny_llama_demo"):
    """Return the exit code and the printed result."""
    output = tmp_path / "out"
    code = main(["verify", recipe, "--json", "--output", str(output), *arguments])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else captured.err


def failed(result):
    return {check["number"]: check for check in result["checks"] if check["status"] == "fail"}


@pytest.mark.parametrize(
    ("fault", "words", "where"),
    [
        ("a skipped upload", [], r"first differ after step 3 of 4, in model.layers.0.self_attn.q_proj.weight \(1 of"),
        ("a wrong beta", [], r"first differ after step [12] of 4, in model\."),
        ("a lost remainder", ["model.params_dtype=bf16"], r"first differ after step [23] of 4, in model\."),
    ],
)
def test_planted_faults_fail(tmp_path, capsys, monkeypatch, fault, words, where):
    monkeypatch.setattr(points, "WORKER", [sys.executable, "-c", FAULTS[fault] + WORKER])
    arguments = ["--steps", "4", "--timed-steps", "1", *tiny_run.words(tmp_path, *HOST, *words)]
    code, result = verify(tmp_path, capsys, *arguments)
    assert code == 1
    assert not result["passed"]
    assert result["status"] == "failed"
    assert re.match(where, failed(result)[4]["figures"]), failed(result)
    assert re.match(r"first differs in model\..* / ", failed(result)[5]["figures"])
    # Nothing else is blamed: memory and configuration are as they should be.
    assert failed(result).keys() <= {3, 4, 5}
    assert "until all checks pass" in result["avoid_when"]


def test_in_processes_of_their_own_and_quietly(tmp_path, capsys):
    words = tiny_run.words(tmp_path, *HOST)
    output = tmp_path / "out"
    argv = ["verify", "tiny_llama_demo", *words, "--steps", "2", "--timed-steps", "2", "--output", str(output)]
    assert main([*argv, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    card = yaml.safe_load((output / "card.yaml").read_text())
    assert card["status"] == "verified"
    assert (output / "baseline" / "step.json").exists()
    assert (output / "offloaded" / "step.json").exists()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "words",
    [
        HOST,
        [*OFFLOAD, "optimizer.optimizer_offload_placement=streamed", "model.params_dtype=bf16"],
        ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=0.3"],
        [*HOST, "optimizer.optimizer_state_dtype=bf16", "optimizer.overlap_cpu_optimizer_d2h_h2d=False"],
    ],
    ids=["host", "streamed bf16", "fraction 0.3", "bf16 moments"],
)
def test_what_is_right_passes(tmp_path, capsys, words):
    code, result = verify(tmp_path, capsys, "--steps", "3", "--timed-steps", "2", *tiny_run.words(tmp_path, *words))
    assert code == 0, failed(result)
    assert [check["status"] for check in result["checks"]] == ["pass"] * 10
    assert result["passed"]
    assert result["measured_results"][1]["loss_match"] == "bitwise"
    assert result["measured_results"][1]["mem_saved_gb"] > 0


@pytest.mark.usefixtures("in_process")
def test_the_lines_and_the_card(tmp_path, capsys):
    output = tmp_path / "out"
    words = tiny_run.words(tmp_path, *HOST)
    assert main(["verify", "tiny_llama_demo", "--output", str(output), "--timed-steps", "2", *words]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "1. PASS  configuration accepted: with and without offloading"
    assert lines[2].startswith("3. PASS  loss equal bit for bit: 6 steps, ")
    assert lines[6] == "7. PASS  its share that left the device: 100.00% at fraction 1"
    assert lines[-1] == f"verified: 10 of 10 checks passed; card: {output / 'card.md'}"
    assert captured.err.count("running ") == 2
    card = yaml.safe_load((output / "card.yaml").read_text())
    assert set(card) >= {
        "title", "summary", "hardware", "versions", "effects", "enable_when", "avoid_when", "measured_results",
        "failure_modes",
    }  # fmt: skip
    assert card["effects"].keys() == {"speed", "memory", "scale", "convergence", "stability"}
    assert all(claim["confidence"] in ("low", "medium", "high") for claim in card["effects"].values())
    claims = [*card["effects"].values(), *card["failure_modes"]]
    assert {claim["validation"] for claim in claims} == {"measured", "code_verified"}
    row = card["measured_results"][1]
    assert row.keys() >= {"config", "iter_ms", "slowdown", "mem_allocated_gb", "mem_saved_gb", "loss_match", "status"}
    # On a CPU a time says nothing about a GPU: it is not a reason for anything.
    assert card["effects"]["speed"]["confidence"] == "low"
    assert "times" not in str(card["enable_when"])
    text = (output / "card.md").read_text()
    assert "| 4 | weights equal bit for bit | pass |" in text
    assert "forebay verify tiny_llama_demo" in text


@pytest.mark.usefixtures("in_process")
def test_torchs_own_classes_are_held_to_a_tolerance(tmp_path, capsys):
    words = tiny_run.words(tmp_path, *OFFLOAD, "optimizer.use_torch_optimizer_for_cpu_offload=True")
    code, result = verify(tmp_path, capsys, "--timed-steps", "1", "--steps", "3", *words)
    names = {check["name"]: check["status"] for check in result["checks"]}
    assert code == 0, failed(result)
    assert names["loss equal within 0.001"] == "pass"
    assert names["final weights equal within 0.001"] == "pass"
    # What was not measured is not claimed.
    assert names["optimizer state equal bit for bit"] == "not measured"
    assert names["host memory as predicted"] == "not measured"
    assert not list((tmp_path / "out").glob("*.pt"))


@pytest.mark.usefixtures("in_process")
def test_without_deterministic_kernels_tolerances_are_used(tmp_path, capsys, monkeypatch):
    import torch

    from forebay.report import worker

    seen = []
    measure = worker._compared_steps
    monkeypatch.setattr(
        worker,
        "_compared_steps",
        lambda *args: seen.append(torch.are_deterministic_algorithms_enabled()) or measure(*args),
    )
    words = ["--timed-steps", "1", "--steps", "2", *tiny_run.words(tmp_path, *HOST)]
    code, result = verify(tmp_path, capsys, "--nondeterministic", *words)
    assert code == 0, failed(result)
    names = {check["name"]: check["status"] for check in result["checks"]}
    assert names["final weights equal within 0.001"] == "pass"
    assert names["optimizer state equal bit for bit"] == "not measured"
    assert verify(tmp_path, capsys, *words)[0] == 0
    assert seen == [False, False, True, True]


@pytest.mark.usefixtures("in_process")
def test_a_kernel_without_a_deterministic_form_is_told_what_to_do(tmp_path, capsys, monkeypatch):
    from forebay.report import worker

    def measure(point, folder):
        raise RuntimeError("histc does not have a deterministic implementation, but you set ...")

    monkeypatch.setattr(worker, "measure", measure)
    code, result = verify(tmp_path, capsys, *tiny_run.words(tmp_path, *HOST))
    assert code == 1
    assert result["checks"][1]["figures"].endswith("--nondeterministic compares within tolerances instead")


@pytest.mark.usefixtures("in_process")
def test_a_run_that_does_not_fit_fails_the_second_check(tmp_path, capsys, monkeypatch):
    from forebay.host import HostMemoryError
    from forebay.report import worker

    def measure(point, folder):
        raise HostMemoryError("1.0 GiB needed, 0.5 GiB available")

    monkeypatch.setattr(worker, "measure", measure)
    code, result = verify(tmp_path, capsys, *tiny_run.words(tmp_path, *HOST))
    assert code == 1
    assert [check["status"] for check in result["checks"]] == ["pass", "fail"]
    assert result["checks"][1]["figures"] == "baseline: out of memory: 1.0 GiB needed, 0.5 GiB available"
    assert "effects" not in result
    assert "measured_results" not in result


@pytest.mark.usefixtures("in_process")
def test_too_slow_is_a_failure_if_asked_for(tmp_path, capsys):
    words = tiny_run.words(tmp_path, *HOST)
    code, result = verify(tmp_path, capsys, "--max-slowdown", "0.000001", "--timed-steps", "1", *words)
    assert code == 1
    assert failed(result).keys() == {10}
    assert failed(result)[10]["figures"].endswith("; allowed 1e-06")


def test_a_killed_process_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(points, "WORKER", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    point = points.Point("tiny_llama_demo", (), 1, 1)
    result = points.run_point(point, tmp_path, "p")
    assert (result.status, result.data) == ("killed", {})
    assert "killed by the system, most likely because the host ran out of memory" in result.error
    monkeypatch.setattr(points, "WORKER", [sys.executable, "-c", "raise SystemExit(7)"])
    assert points.run_point(point, tmp_path, "p").error == f"ended with exit code 7 and no result; see {tmp_path}/p.log"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "error: --steps 0: must be at least 1"),
        (["optimizer.optimizer_offload_fraction=auto"],
         "error: optimizer.optimizer_offload_fraction=auto depends on what is free on the GPU when a run starts; give"),
        (["optimizer.optimizer_cpu_offload=False", "optimizer.optimizer_offload_fraction=0.0",
          "optimizer.optimizer_offload_placement=auto"],
         "error: this run offloads nothing, so there is nothing to verify; add optimizer.optimizer_cpu_offload=True"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path, capsys, arguments, message):
    code, error = verify(tmp_path, capsys, *arguments)
    assert code == 2
    assert error.startswith(message)


def test_first_difference():
    assert first_difference({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) is None
    assert first_difference({"a": "1", "b": "3", "c": "9"}, {"a": "1", "b": "2", "c": "4"}) == "b"
    assert first_difference({"a": "1"}, {"a": "1", "b": "2"}) == "b"
    assert first_difference({"a": "1", "z": "1"}, {"a": "1"}) == "z"
