import json
from pathlib import Path

from forebay.cli.main import main
from forebay.doctor import environment
from forebay.doctor.environment import Finding

LOGS = Path(__file__).parents[1] / "doctor" / "logs"


def test_a_log(capsys):
    assert main(["doctor", "--log", str(LOGS / "megatron_pp.log")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "activation_offload_pp (certain)"
    assert lines[2].startswith("  fix: model.pipeline_model_parallel_size=1")
    assert lines[-1].startswith("  line 3: [rank0]: ValueError: Currently there is no support")
    assert main(["doctor", "--log", str(LOGS / "megatron_pp.log"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["symptom"] == "activation_offload_pp"


def test_a_log_without_symptoms_and_no_log(capsys, tmp_path):
    assert main(["doctor", "--log", str(LOGS / "megatron_healthy.log")]) == 0
    assert "none of the symptoms that forebay knows" in capsys.readouterr().out
    assert main(["doctor", "--log", str(tmp_path / "gone")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_machine(capsys, monkeypatch):
    findings = [Finding("a", "1"), Finding("topic", "2", "do this", is_problem=True), Finding("b", "3", "know this")]
    monkeypatch.setattr(environment, "inspect_environment", lambda: findings)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a      1",
        "topic  2",
        "       problem: do this",
        "b      3",
        "       note: know this",
    ]
    monkeypatch.setattr(environment, "inspect_environment", lambda: findings[:1])
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["topic"] == "a"
