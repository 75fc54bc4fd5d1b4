"""``forebay memory``: the ledger of a run in another process, live, and in the format of torch's viewer."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import time

import pytest
import tiny_run
from torch.cuda import _memory_viz

from forebay.cli import memory as verb
from forebay.cli.main import main
from forebay.config import resolve
from forebay.engine import get_engine
from forebay.report import memory
from forebay.train import memory_file
from forebay.train.trainer import Trainer

HOST = [
    "optimizer.optimizer_cpu_offload=True",
    "optimizer.optimizer_offload_fraction=1.0",
    "optimizer.optimizer_offload_placement=host",
    "logger.progress=none",
]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The folder of a run that trained and has ended, and what its ledger held."""
    from forebay import engine

    monkeypatch.setattr(engine, "_engines", {})
    with Trainer(resolve("tiny_llama_demo", tiny_run.words(tmp_path, *HOST)).config) as trainer:
        trainer.run()
        held = get_engine("cpu").ledger.snapshot()
    return tmp_path / "run", held


def test_the_file_is_the_ledger(trained, capsys):
    folder, held = trained
    assert main(["memory", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tiers"] == held
    assert held["pageable"]["optimizer_state"] > 0
    assert (found["state"], found["step"], found["total_steps"]) == ("ended", 6, 6)
    assert found["peak_bytes"]["device"] >= sum(held["device"].values())
    assert found["host_rss_bytes"] > 2**20
    assert [file.name for file in folder.iterdir() if "tmp" in file.name] == []


def test_the_view(trained, capsys):
    folder, held = trained
    assert main(["memory", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 6/6 on cpu, ended"
    state = next(line for line in lines if line.startswith("  optimizer state"))
    assert f"{held['pageable']['optimizer_state'] / 2**20:.1f} MiB" in state
    assert state.endswith("#" * 30)
    assert [line.split()[0] for line in lines if line[0] != " "][1:4] == ["device", "pinned", "pageable"]
    assert main(["memory", str(folder), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_torchs_viewer_reads_the_snapshot(trained, tmp_path, capsys):
    folder, held = trained
    assert main(["memory", str(folder), "--snapshot", "--output", str(tmp_path / "out")]) == 0
    path = tmp_path / "out" / "memory.pickle"
    assert f"for https://pytorch.org/memory_viz: {path}" in capsys.readouterr().out
    snapshot = pickle.loads(path.read_bytes())
    assert snapshot.keys() >= {"segments", "device_traces"}
    # Each tool of torch's that reads such a file.
    summary = _memory_viz.segsum(snapshot)
    assert "segments: 3" in summary
    text = _memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)
    for tier, purposes in held.items():
        for purpose, num_bytes in purposes.items():
            assert any(
                tier in line and purpose in line and line.endswith(f" {num_bytes}") for line in text.splitlines()
            )
    assert "MemoryViz" in _memory_viz.segment_plot(snapshot)
    assert "MemoryViz" in _memory_viz.trace_plot(snapshot)
    assert f"TOTAL MEM: {held['pageable']['optimizer_state'] / 1024:.1f}KiB" in _memory_viz.trace(snapshot)
    for segment in snapshot["segments"]:
        places = [(block["address"], block["size"]) for block in segment["blocks"]]
        assert places[0][0] == segment["address"]
        assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(places))
        assert sum(size for _, size in places) == segment["total_size"]


def test_a_run_in_another_process_is_seen_live_until_it_is_gone(tmp_path, capsys):
    words = tiny_run.words(tmp_path, *HOST, "train.train_iters=100000", "optimizer.lr_decay_iters=100000")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "forebay", "train", "tiny_llama_demo", *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        folder = tmp_path / "run"
        steps: list[int] = []
        deadline = time.monotonic() + 120
        while len(steps) < 2 and time.monotonic() < deadline:
            if (folder / memory.NAME).exists():
                found = memory.read(folder)
                assert found["state"] == "running"
                if found["step"] > (steps[-1] if steps else 0):
                    steps.append(found["step"])
            time.sleep(0.1)
        assert len(steps) == 2, "the file was not renewed while the run went on"
        assert found["tiers"]["pageable"]["optimizer_state"] > 0
    finally:
        process.kill()
        process.wait()
    assert memory.read(folder)["state"] == "gone"
    assert main(["memory", str(folder)]) == 0
    assert f"process {process.pid} is gone; this is its last word" in capsys.readouterr().out


def test_the_live_view_ends_with_the_run(tmp_path, capsys, monkeypatch):
    (tmp_path / memory.NAME).write_text("{}")
    states = iter(["running", "running", "ended"])
    found = {"step": 1, "total_steps": 2, "device": "cpu", "tiers": {"device": {"weights": 2**20}}}
    found |= {"written_s": 0.0, "pid": 1}
    found |= {"peak_bytes": {"device": 2**20, "pinned": 0, "pageable": 0}, "device_allocated_bytes": 3 * 2**30}
    found |= {"device_reserved_bytes": 2**32, "device_total_bytes": 2**36, "host_rss_bytes": 2**30}
    monkeypatch.setattr(memory, "read", lambda folder: {**found, "state": next(states)})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    slept = []
    monkeypatch.setattr(verb.time, "sleep", slept.append)
    assert main(["memory", str(tmp_path), "--interval", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert slept == [0.5, 0.5]
    assert printed.count("\x1b[H\x1b[J") == 3
    assert "all on the GPU: allocated 3.00 GiB, reserved 4.00 GiB of 64.00 GiB" in printed


def test_it_is_written_at_most_once_a_second(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(memory_file.time, "monotonic", lambda: now[0])
    file = memory_file.MemoryFile(tmp_path, get_engine("cpu"), 10)
    for step, passed_s in enumerate([0.0, 0.4, 0.4, 0.4, 0.1]):
        now[0] += passed_s
        file.update(step)
        assert json.loads((tmp_path / "memory.json").read_text())["step"] == (0 if step < 3 else 3)
    file.end(7)
    file.end(8)
    last = json.loads((tmp_path / "memory.json").read_text())
    assert (last["step"], last["ended"]) == (7, True)


def test_runs_are_found_by_the_name_of_their_recipe(trained, tmp_path, capsys, monkeypatch):
    folder, _ = trained
    monkeypatch.chdir(tmp_path)
    assert main(["memory", "demo"]) == 2
    assert "no run in demo or runs/demo: a run of forebay train writes memory.json to its folder" in (
        error := capsys.readouterr().err
    )
    assert error.rstrip().endswith("runs/ has none")
    (tmp_path / "runs").mkdir()
    folder.rename(tmp_path / "runs" / "demo")
    assert main(["memory", "demo", "--once"]) == 0
    assert main(["memory", "other"]) == 2
    assert "runs/ has demo" in capsys.readouterr().err
    assert main(["memory", "demo", "--interval", "0"]) == 2
    assert "--interval 0: must be above 0 seconds" in capsys.readouterr().err
