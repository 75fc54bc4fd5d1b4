"""Sweeps: every point apart, resumed when interrupted, points out of memory shown, a report that needs nothing else."""

from __future__ import annotations

import base64
import html.parser
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import tiny_run

from forebay.cli.main import main
from forebay.report import points, worker
from forebay.report import sweep as sweeps

FRACTIONS = ["--fractions", "0,0.5,1", "--steps", "3", "--timed-steps", "2"]
PLACES = ("down_gbps", "up_gbps", "update_gparams")


@pytest.fixture
def ceilings(monkeypatch):
    """Measuring them takes seconds; one test does."""
    values = {"down_gbps": 50.0, "up_gbps": 50.0, "update_gparams": 4.0}
    monkeypatch.setattr(sweeps, "_ceilings", lambda about, folder: values)


def words_of(tmp_path, *more):
    fraction = "optimizer.optimizer_offload_fraction="  # which a sweep sets itself
    return [word for word in tiny_run.words(tmp_path) if not word.startswith(fraction)] + list(more)


def run_sweep(tmp_path, capsys, *arguments):
    argv = ["sweep", "tiny_llama_demo", "--json", "--output", str(tmp_path / "out"), *arguments]
    code = main([*argv, *words_of(tmp_path, "optimizer.optimizer_offload_placement=host")])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else captured.err


class _Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.sources, self.rows, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.sources += [value for key, value in attrs if key in ("src", "href", "data")]
        if tag == "tr":
            self.rows.append((attributes.get("class"), []))
        if tag == "figure":
            self.ids.append(attributes["id"])

    def handle_data(self, data):
        if self.rows and data.strip():
            self.rows[-1][1].append(data)


@pytest.mark.usefixtures("in_process", "ceilings")
def test_a_sweep_and_its_report(tmp_path, capsys):
    code, result = run_sweep(tmp_path, capsys, *FRACTIONS)
    assert code == 0
    assert [point["fraction"] for point in result["points"]] == [0.0, 0.5, 1.0]
    assert [point["loss_match"] for point in result["points"]] == ["bitwise"] * 3
    first, half, full = result["points"]
    assert (first["slowdown"], first["saved_bytes"], first["host_bytes"]) == (1.0, 0, 0)
    assert all(first[place] is None for place in PLACES)
    assert all(full[place] > 0 for place in PLACES)
    assert 0 < half["saved_bytes"] < full["saved_bytes"]
    assert 0 < full["stall_share"] < 1
    folder = tmp_path / "out"
    for name in ("frontier", "memory", "loss", "stalls", "roofline"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ElementTree.fromstring((folder / f"{name}.svg").read_bytes()).tag.endswith("svg")
    page = _Page((folder / "report.html").read_text())
    assert page.ids == ["frontier", "memory", "loss", "stalls", "roofline"]
    # Nothing is loaded from anywhere: the report works offline.
    assert len(page.sources) == 5
    for source in page.sources:
        kind, _, data = source.partition(";base64,")
        assert kind == "data:image/svg+xml"
        assert b"<svg" in base64.b64decode(data)
    assert [cells[0] for _, cells in page.rows] == ["fraction", "0", "0.5", "1"]
    # A trace for each point.
    assert len(list(folder.glob("fraction_*/step.json"))) == 3


@pytest.mark.usefixtures("in_process", "ceilings")
def test_a_point_out_of_memory_is_shown_as_such(tmp_path, capsys, monkeypatch):
    measure = worker.measure

    def limited(point, folder):
        if sweeps.NO_OFFLOAD[-1] in point.words:
            raise worker.DoesNotFitError("this run does not fit: 31 GiB <needed>")
        return measure(point, folder)

    monkeypatch.setattr(worker, "measure", limited)
    code, result = run_sweep(tmp_path, capsys, *FRACTIONS)
    assert code == 0  # it is a finding, not a failure
    assert [point["status"] for point in result["points"]] == ["out_of_memory", "ok", "ok"]
    assert result["errors"] == {"0%": "this run does not fit: 31 GiB <needed>"}
    # What there is no reference for is compared with the first point that ran.
    assert result["points"][1]["slowdown"] == 1.0
    assert result["points"][0]["iter_ms"] is None
    text = (tmp_path / "out" / "report.html").read_text()
    page = _Page(text)
    assert page.rows[1] == ("lost", ["0", "out of memory", *["-"] * 11])
    assert "31 GiB &lt;needed&gt;" in text


@pytest.mark.usefixtures("in_process", "ceilings")
def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    measure, measured = worker.measure, []

    def interrupted(point, folder):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(folder.name)
        return measure(point, folder)

    monkeypatch.setattr(worker, "measure", interrupted)
    assert run_sweep(tmp_path, capsys, *FRACTIONS)[0] == 130
    assert measured == ["fraction_0", "fraction_0.5"]
    monkeypatch.setattr(worker, "measure", lambda point, folder: measured.append(folder.name) or measure(point, folder))
    code, result = run_sweep(tmp_path, capsys, *FRACTIONS)
    assert code == 0
    assert measured == ["fraction_0", "fraction_0.5", "fraction_1"]
    assert [point["status"] for point in result["points"]] == ["ok"] * 3
    # Another setting is another point.
    run_sweep(tmp_path, capsys, *FRACTIONS, "optimizer.lr=1e-4")
    assert len(measured) == 6


@pytest.mark.usefixtures("in_process", "ceilings")
def test_a_point_that_fails_is_told_by_the_exit_code_and_tried_again(tmp_path, capsys, monkeypatch):
    measure = worker.measure

    def failing(point, folder):
        raise RuntimeError("a bug")

    monkeypatch.setattr(worker, "measure", failing)
    code, result = run_sweep(tmp_path, capsys, "--fractions", "1", "--steps", "2", "--timed-steps", "1")
    assert code == 1
    assert result["points"][0]["status"] == "failed"
    assert result["errors"] == {"100%": "RuntimeError: a bug"}
    assert "No point was measured." in (tmp_path / "out" / "report.html").read_text()
    monkeypatch.setattr(worker, "measure", measure)
    assert run_sweep(tmp_path, capsys, "--fractions", "1", "--steps", "2", "--timed-steps", "1")[0] == 0


def test_points_in_processes_of_their_own_one_of_them_killed(tmp_path, capsys, monkeypatch):
    code = (
        "import os, sys\nfrom forebay.report import worker\nmeasure = worker.measure\n"
        "def limited(point, folder):\n"
        "    if 'optimizer.optimizer_offload_fraction=1.0' in point.words:\n        os.kill(os.getpid(), 9)\n"
        "    return measure(point, folder)\n"
        "worker.measure = limited\nsys.exit(worker.main(sys.argv[1:]))"
    )
    monkeypatch.setattr(points, "WORKER", [sys.executable, "-c", code])
    code, result = run_sweep(tmp_path, capsys, "--fractions", "0.5,1", "--steps", "2", "--timed-steps", "1")
    assert code == 1
    assert [point["status"] for point in result["points"]] == ["ok", "killed"]
    assert "the host ran out of memory" in result["errors"]["100%"]
    # The ceilings were measured for once, and all of them.
    assert result["ceilings"].keys() == set(PLACES)
    assert all(value > 0 for value in result["ceilings"].values())


@pytest.mark.usefixtures("in_process", "ceilings")
def test_the_table(tmp_path, capsys):
    argv = ["sweep", "tiny_llama_demo", *FRACTIONS, "--output", str(tmp_path / "out"), *words_of(tmp_path)]
    assert main([*argv, "optimizer.optimizer_offload_placement=streamed"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert re.split("  +", lines[0].strip())[:3] == ["fraction", "status", "ms/step"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "0.5", "1"]
    assert lines[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    assert "fraction 0.5: " in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fractions", "0,2"], "error: --fractions 0,2: '2' is no number from 0 to 1; write for example 0,0.25"),
        (["--fractions", "a"], "error: --fractions a: 'a' is no number from 0 to 1"),
        (["--steps", "0"], "error: --steps 0: must be at least 1"),
        (
            ["optimizer.optimizer_offload_fraction=0.5"],
            "error: override 'optimizer.optimizer_offload_fraction=0.5': a sweep sets this itself; say which fractions",
        ),
    ],
)
def test_mistakes(tmp_path, capsys, arguments, message):
    code, error = run_sweep(tmp_path, capsys, *arguments)
    assert code == 2
    assert error.startswith(message)
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_nothing_is_run(tmp_path, capsys, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, error = run_sweep(tmp_path, capsys)
    assert code == 2
    assert "install it with: pip install 'forebay[report]'" in error


def test_fractions_are_sorted_and_each_measured_once():
    assert sweeps.parse_fractions("1,0.5,0,0.50") == [0.0, 0.5, 1.0]


def _chromium():
    names = ("chromium", "chromium-browser", "google-chrome", "headless_shell")
    return next((path for path in map(shutil.which, names) if path), None)


@pytest.mark.skipif(_chromium() is None, reason="no Chromium here")
@pytest.mark.usefixtures("in_process", "ceilings")
def test_the_report_opens_in_a_browser(tmp_path, capsys):
    from matplotlib.image import imread

    run_sweep(tmp_path, capsys, *FRACTIONS)
    report = tmp_path / "out" / "report.html"

    def browse(*options):
        command = [
            _chromium(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        # Without a network, as for whoever opens it offline.
        command += ["--proxy-server=127.0.0.1:9", "--window-size=1200,1700", *options, report.as_uri()]
        return _popen(command)

    screenshot = tmp_path / "report.png"
    browse(f"--screenshot={screenshot}")
    image = imread(screenshot)[..., :3]
    assert image.shape[1] == 1200
    # The figures were drawn: colours of the palette are there, beside white and the text's greys.
    blue = (abs(image - [0x00 / 255, 0x72 / 255, 0xB2 / 255]) < 0.02).all(axis=-1)
    orange = (abs(image - [0xE6 / 255, 0x9F / 255, 0x00 / 255]) < 0.02).all(axis=-1)
    assert blue.sum() > 500
    assert orange.sum() > 500


# Bound before a fixture replaces it.
def _popen(command, run=subprocess.Popen):
    process = run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
