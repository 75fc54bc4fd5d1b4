import functools
import json

from forebay.cli.main import main
from forebay.plan import calibrate as module
from forebay.plan.profile import load


def test_measures_stores_and_prints(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "calibrate", functools.partial(module.calibrate, scale=0.001))
    path = tmp_path / "new" / "mine.yaml"
    assert main(["calibrate", "--device", "cpu", "--output", str(path)]) == 0
    captured = capsys.readouterr()
    assert "host_update_gbps" in captured.out
    assert f"stored in {path}" in captured.out
    assert "measuring copies" in captured.err
    assert load(str(path)).is_measured
    monkeypatch.setenv("FOREBAY_PROFILE", str(path))
    assert main(["calibrate", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(path)
