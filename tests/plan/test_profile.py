import copy

import pytest

from forebay.plan import profile as module
from forebay.plan.profile import FIELDS, choose, from_data, load, shipped, stored_path

EXPECTED = [
    "a100-40",
    "a100-80",
    "gb200",
    "gh200",
    "h100-sxm",
    "h200",
    "l40s",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
]


@pytest.fixture(autouse=True)
def _no_stored_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_PROFILE", str(tmp_path / "none.yaml"))


def test_shipped():
    assert shipped() == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_each_number_says_where_it_comes_from_and_only_the_h200_is_measured(name):
    profile = load(name)
    assert {"gpu_link_gbps", "network_gbps"} <= set(profile.numbers)
    assert profile.description
    assert profile.gpu_names
    for key, number in profile.numbers.items():
        assert len(number.source) > 5, key
        assert number.kind == "datasheet" or name == "h200"
    assert profile.is_measured is (name == "h200")
    assert load("h200").rates()["host_update_gbps"] == 69


def test_a_datasheet_counts_with_a_share():
    h100 = load("h100-sxm")
    assert h100.rate("matmul_tflops") == pytest.approx(0.75 * 989.4)
    assert h100.rate("gpu_memory_gib") == 80
    # The shares are the H200's own: measured over datasheet.
    assert h100.rate("matmul_tflops") == pytest.approx(load("h200").rate("matmul_tflops"), rel=0.01)
    assert h100.rate("down_gbps") == pytest.approx(load("h200").rate("down_gbps"), rel=0.01)
    assert h100.rate("up_both_gbps") == pytest.approx(load("h200").rate("up_both_gbps"), rel=0.01)


def _data():
    return copy.deepcopy(load("h200").to_data())


def test_round_trip():
    assert from_data(_data(), "h200", "here").numbers == load("h200").numbers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["numbers"].pop("up_gbps"), "here: up_gbps is missing"),
        (lambda d: d["numbers"]["up_gbps"].update(value=0), "up_gbps.value must be a number above 0 (pinned copies up"),
        (lambda d: d["numbers"]["up_gbps"].update(value=True), "must be a number above 0"),
        (lambda d: d["numbers"]["up_gbps"].update(kind="guess"), "up_gbps needs kind: measured or datasheet, and a"),
        (lambda d: d["numbers"]["up_gbps"].pop("source"), "and a source"),
        (lambda d: d["numbers"].update(x={}), "unknown number x; there are gpu_memory_gib, "),
        (lambda d: d.pop("numbers"), "not a profile; it needs numbers:"),
    ],
)
def test_what_is_no_profile(change, message):
    data = _data()
    change(data)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        from_data(data, "x", "here")
    assert message in str(caught.value)


def test_names():
    with pytest.raises(ValueError, match="unknown profile 'h300'; the shipped ones are a100-40, "):
        load("h300")
    with pytest.raises(FileNotFoundError, match=r"profile gone\.yaml: no such file; `forebay calibrate --output"):
        load("gone.yaml")
    data = _data()
    del data["numbers"]["network_gbps"]
    with pytest.raises(ValueError, match="has no network_gbps"):
        from_data(data, "x", "here").needs("network_gbps")


def test_which_profile_is_chosen(tmp_path, monkeypatch):
    assert choose("l40s", gpu_memory_gib=24)[0].name == "l40s"
    assert choose(None, gpu_memory_gib=40.0)[0].name == "a100-40"
    assert choose(None, gpu_memory_gib=140.0)[0].name == "h200"
    assert choose(None, gpu_memory_gib=None)[0].name == "h200"
    chosen, why = choose(None, gpu_memory_gib=20, gpu_name="NVIDIA L40S")
    assert chosen.name == "l40s"
    assert "shipped, for the NVIDIA L40S of this machine" in why
    file = tmp_path / "mine.yaml"
    file.write_text((module._FOLDER / "l40s.yaml").read_text())
    monkeypatch.setenv("FOREBAY_PROFILE", str(file))
    chosen, why = choose(None, gpu_memory_gib=140.0)
    assert chosen.name == "mine"
    assert why.startswith("measured on this machine")
    file.write_text(file.read_text().replace("gpu_names: ['NVIDIA L40S']", "gpu_names: []"))
    assert choose(None, gpu_memory_gib=140.0)[0].name == "h200"


def test_where_a_profile_is_stored(monkeypatch):
    monkeypatch.setattr(module.socket, "gethostname", lambda: "node 1/x")
    assert str(stored_path({"XDG_CACHE_HOME": "/c"})) == "/c/forebay/profiles/node_1_x.yaml"
    assert str(stored_path({"FOREBAY_PROFILE": "/p.yaml"})) == "/p.yaml"


def test_fields_have_units():
    assert all(name.endswith(("_gbps", "_gib", "_tflops", "_cores")) for name in FIELDS)
