"""The optimizer benchmark's bookkeeping: what is measured when, and which rows a file keeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import harness
import optimizer as benchmark
import optimizer_plot

MS = {"none": 100.0, "forebay": 150.0, "torchao": 250.0}


@pytest.fixture
def measured(monkeypatch):
    """Replace the measuring process; return the list of configurations that it was asked for."""
    asked = []

    def run_apart(script, arguments, *, timeout_s):
        spec = json.loads(arguments[1])
        asked.append(spec)
        if spec["system"] == "torchao":
            return {"status": "failed", "error": "no wheel"}
        return {"status": "ok", "step_ms": MS[spec["system"]] * spec["num_micro"], "peak_gib": 20.0}

    monkeypatch.setattr(benchmark, "run_apart", run_apart)
    monkeypatch.setattr(benchmark, "environment", lambda: {"gpu": "a GPU"})
    return asked


def call(monkeypatch, path, *words):
    monkeypatch.setattr(sys, "argv", ["optimizer.py", "--output", str(path), *words])
    benchmark.main()
    return harness.read_csv(path)


CONFIGS = json.dumps([{"system": "none"}, {"system": "torchao"}, {"system": "forebay", "offload_fraction": 1.0}])


def test_a_failure_loses_nothing_and_ratios_are_to_none_at_the_same_tokens(monkeypatch, tmp_path, measured):
    rows = call(monkeypatch, tmp_path / "a.csv", "--configs", CONFIGS, "--tokens", "8192,32768")
    assert [(row["system"], row["tokens"], row["status"], row["ratio"]) for row in rows] == [
        ("none", "8192", "ok", "1.0"),
        ("none", "32768", "ok", "1.0"),
        ("torchao", "8192", "failed", ""),
        ("torchao", "32768", "failed", ""),
        ("forebay", "8192", "ok", "1.5"),
        ("forebay", "32768", "ok", "1.5"),
    ]


def test_append_replaces_rows_of_the_same_configuration(monkeypatch, tmp_path, measured):
    path = tmp_path / "a.csv"
    call(monkeypatch, path, "--configs", CONFIGS)
    monkeypatch.setitem(MS, "forebay", 120.0)
    rows = call(monkeypatch, path, "--configs", CONFIGS, "--append", "--only", "forebay", "--tokens", "8192,16384")
    assert [(row["system"], row["tokens"], row["ratio"]) for row in rows] == [
        ("none", "8192", "1.0"),
        ("torchao", "8192", ""),
        ("forebay", "8192", "1.2"),
        ("forebay", "16384", ""),
    ]


def test_none_that_failed_gives_no_ratio(monkeypatch, tmp_path, measured):
    path = tmp_path / "a.csv"
    failed = {"system": "none", "options": "{}", "tokens": 8192, "status": "out of memory"}
    harness.write_csv(path, [failed, failed | {"tokens": 16384, "step_ms": 1.0}])
    rows = call(monkeypatch, path, "--configs", CONFIGS, "--append", "--only", "forebay")
    assert rows[-1]["ratio"] == ""


def test_missing_measures_what_has_no_good_row(monkeypatch, tmp_path, measured):
    path = tmp_path / "a.csv"
    call(monkeypatch, path, "--configs", CONFIGS, "--only", "none,torchao")
    measured.clear()
    call(monkeypatch, path, "--configs", CONFIGS, "--append", "--missing")
    assert [spec["system"] for spec in measured] == ["torchao", "forebay"]


def test_what_the_budget_leaves_out_is_said(monkeypatch, tmp_path, measured, capsys):
    rows = call(monkeypatch, tmp_path / "a.csv", "--configs", CONFIGS, "--budget-s", "-1", "--append")
    assert rows == []
    assert measured == []
    printed = capsys.readouterr().out
    assert "left out after -1 s; measure them with --append --missing:" in printed
    assert printed.count("8192") == 3


def test_tokens_are_whole_micro_batches(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, tmp_path / "a.csv", "--tokens", "10000")
    assert "--tokens 10000: must be multiples of 8192" in capsys.readouterr().err


def test_every_configuration_is_measured_once_with_options_that_forebay_has():
    import forebay

    configurations = benchmark.configurations()
    rows = [{"system": s["system"], "options": json.dumps(s), "tokens": 8192} for s in configurations]
    assert len({benchmark.row_key(row) for row in rows}) == len(rows)
    accepted = forebay.AdamW.__init__.__kwdefaults__
    for spec in configurations:
        if spec["system"] == "forebay":
            assert set(spec) - {"system"} <= set(accepted)


def test_plot_has_a_line_for_each_system(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"system": "none", "options": "{}", "tokens": "8192", "status": "ok", "peak_gib": "30", "step_ms": "100"},
        *(
            {
                "system": "forebay",
                "options": json.dumps({"offload_fraction": fraction} | extra),
                "tokens": "8192",
                "status": "ok",
                "peak_gib": str(30 - 10 * fraction),
                "step_ms": str(100 + 50 * fraction),
            }
            for fraction, extra in [(1.0, {}), (0.0, {}), (0.5, {"placement": "auto"}), (1.0, {"staging_gib": 3.0})]
        ),
        {"system": "torchao", "options": "{}", "tokens": "8192", "status": "failed"},
    ]
    lines = optimizer_plot.lines(rows, "8192")
    assert lines["forebay"] == [(30.0, 100.0, 0.0), (25.0, 125.0, 0.5), (20.0, 150.0, 1.0)]
    assert lines["forebay, staging 3.0"] == [(30.0, 100.0, 0.0), (20.0, 150.0, 1.0)]
    assert set(lines) == {"none", "forebay", "forebay, staging 3.0"}
    for path in optimizer_plot.plot(rows, tmp_path / "a.csv"):
        assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "asked_gib"), [("Tried to allocate 2.32 GiB. GPU 0", 2.32), ("Tried to allocate 512.00 MiB.", 0.5)]
)
def test_out_of_memory_is_a_result(text, asked_gib, capsys, monkeypatch):
    import torch

    def run():
        raise torch.OutOfMemoryError(f"CUDA out of memory. {text}")

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**31)
    harness.report(run)
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "out of memory"
    assert result["asked_gib"] == asked_gib
    assert (result["allocated_gib"], result["peak_gib"]) == (1.0, 2.0)


def test_the_large_model_is_measured_with_and_without_offload(monkeypatch, tmp_path, capsys):
    import qwen3_8b

    def run_apart(script, arguments, *, timeout_s):
        spec = json.loads(arguments[1])
        if spec["system"] == "none":
            return {"status": "out of memory", "error": "no room", "asked_gib": 1.2}
        figures = {"step_ms": 1.0, "tokens_per_s": 2.0, "peak_gib": 3.0, "init_s": 4.0, "total_s": 5.0}
        return {"status": "ok", "stall_share": 0.25, **figures}

    monkeypatch.setattr(qwen3_8b, "run_apart", run_apart)
    monkeypatch.setattr(qwen3_8b, "environment", dict)
    monkeypatch.setattr(sys, "argv", ["qwen3_8b.py", "--output", str(tmp_path / "a.csv"), "dataset.seq_length=2048"])
    qwen3_8b.main()
    rows = harness.read_csv(tmp_path / "a.csv")
    assert [(row["system"], row["num_micro"], row["status"]) for row in rows] == [
        ("forebay", "8", "ok"),
        ("none", "8", "out of memory"),
        ("forebay", "1", "ok"),
        ("none", "1", "out of memory"),
        ("forebay", "1", "ok"),
    ]
    assert {row["seq_length"] for row in rows} == {"2048"}
    assert "stalled 25.0%" in capsys.readouterr().out
