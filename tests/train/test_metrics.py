import io
import json
import math

import pytest
import torch

from forebay.engine import get_engine
from forebay.train.metrics import DeferredScalars, MetricsLog, StepMetrics
from forebay.train.progress import Progress, step_line


def _metrics(step=1, **changed):
    values = {
        "step": step,
        "loss": 2.5,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "tokens_per_s": 12345.6,
        "step_ms": 99.6,
        "device_allocated_gib": 1.5,
        "device_reserved_gib": 2.0,
        "device_peak_gib": 1.75,
        "device_total_gib": 8.0,
        "host_rss_gib": 3.0,
        "pinned_gib": 0.5,
    }
    return StepMetrics(**{**values, **changed})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_line():
    line = step_line(_metrics(down_gbps=50.0, up_gbps=48.0, host_update_ms=12.0, stall_ms=0.4), 20)
    assert line == (
        "step 1/20 | loss 2.5000 | norm 1.250 | lr 3.00e-04 | 12,346 tok/s | 100 ms | gpu 1.50/2.00 GiB 25% | "
        "host 3.00 GiB | pinned 0.50 GiB | down 50.0 up 48.0 GB/s | host update 12 ms | stall 0 ms"
    )
    assert "device tier 1.50 GiB | host" in step_line(_metrics(device_total_gib=None), 20)
    assert "loss nan" in step_line(_metrics(loss=math.nan), 20)


def test_a_file_gets_a_plain_line_a_step(tmp_path):
    stream = io.StringIO()
    progress = Progress(3, log_file=tmp_path / "train.log", stream=stream)
    progress.note("banner")
    for step in (1, 2, 3):
        progress.step(_metrics(step))
    progress.close()
    assert stream.getvalue() == (tmp_path / "train.log").read_text()
    assert [line[:8] for line in stream.getvalue().splitlines()] == ["banner", "step 1/3", "step 2/3", "step 3/3"]


def test_a_terminal_gets_one_line_that_is_redrawn(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    progress = Progress(100, log_file=tmp_path / "train.log", stream=stream)
    progress.step(_metrics(99, grad_norm=12345.678))
    progress.step(_metrics(100))
    progress.note("saved")
    progress.close()
    live, rest = stream.getvalue().split("\n", 1)
    first, second = live.split("\r")[1:]
    assert len(first) == len(second) == 39
    assert rest == "saved\n"
    assert len((tmp_path / "train.log").read_text().splitlines()) == 3


def test_log_interval_shows_the_last_step_too(tmp_path):
    stream = io.StringIO()
    progress = Progress(5, log_interval=2, stream=stream)
    for step in range(1, 6):
        progress.step(_metrics(step))
    assert [line[:8] for line in stream.getvalue().splitlines()] == ["step 2/5", "step 4/5", "step 5/5"]


def test_json_lines(tmp_path):
    log = MetricsLog(tmp_path, first_step=1, tensorboard=False)
    log.write(_metrics(1))
    log.write(_metrics(2, loss=math.nan, grad_norm=math.inf))
    log.write_eval(2, 2.25)
    log.close()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in log.file.read_text().splitlines()]
    assert lines[0]["step"] == 1
    assert lines[0]["loss"] == 2.5
    assert set(lines[0]) >= {
        "grad_norm", "lr", "tokens_per_s", "step_ms", "device_allocated_gib", "device_reserved_gib",
        "device_peak_gib", "host_rss_gib", "pinned_gib", "down_gbps", "up_gbps", "host_update_ms", "stall_ms",
    }  # fmt: skip
    assert lines[1]["loss"] is lines[1]["grad_norm"] is None
    assert lines[2] == {"step": 2, "eval_loss": 2.25}


def test_going_back_drops_the_steps_that_are_repeated(tmp_path):
    log = MetricsLog(tmp_path, first_step=1, tensorboard=False)
    for step in (1, 2, 3):
        log.write(_metrics(step))
    log.close()
    with log.file.open("a") as stream:
        stream.write('{"step": 4, "lo')  # killed while writing
    log = MetricsLog(tmp_path, first_step=3, tensorboard=False)
    log.write(_metrics(3, loss=9.0))
    log.close()
    lines = [json.loads(line) for line in log.file.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 2.5), (2, 2.5), (3, 9.0)]


def test_tensorboard_files(tmp_path):
    log = MetricsLog(tmp_path, first_step=1, tensorboard=True)
    log.write(_metrics(1))
    log.close()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_scalars_come_out_in_order():
    scalars = DeferredScalars(get_engine("cpu"))
    for step in range(3):
        scalars.push(step, torch.tensor(float(step)), torch.tensor([10.0 * step], dtype=torch.bfloat16))
    assert len(scalars) == 3
    popped = [scalars.pop() for _ in range(3)]
    assert [values[:3] for values in popped] == [(0, 0.0, 0.0), (1, 1.0, 10.0), (2, 2.0, 20.0)]
    times = [values[3] for values in popped]
    assert times == sorted(times)
