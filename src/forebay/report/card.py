"""The card of a verification: what was measured, in YAML for tools and Markdown for people.

A claim is ``measured`` when this verification measured it, ``code_verified`` when tests of forebay show it but this
run did not; what is neither is not on the card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from forebay.report.verify import Verification, mib, saved_bytes

MEASURED, CODE_VERIFIED = "measured", "code_verified"


def card(verification: Verification, recipe: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the card as plain data.

    Args:
        verification: what was found.
        recipe: that was verified.
        words: the overrides.
    """
    a, b = verification.baseline.data, verification.offloaded.data
    about = b.get("about") or a.get("about") or {}
    status = "verified" if verification.passed else "failed"
    result: dict[str, Any] = {
        "title": f"Offloading in {recipe}" + (f" on {about['device']}" if about else ""),
        "summary": _summary(verification),
        "status": status,
        "config": {"recipe": recipe, "overrides": list(words)},
    }
    if about:
        result["hardware"] = {
            "device": about["device"],
            "device_total_gb": _gb(about["device_total_bytes"]),
            "num_devices": 1,
            "host_cores": about["host_cores"],
            "host_total_gb": _gb(about["host_total_bytes"]),
            "host_kernel": about["host_kernel"],
            "engine": about["engine"],
        }
        result["versions"] = {**about["versions"], "python": about["python"]}
    result["checks"] = [
        {"number": number, "name": check.name, "status": check.status, "figures": check.figures}
        for number, check in enumerate(verification.checks, 1)
    ]
    if a and b:
        result["effects"] = _effects(verification)
        saved = mib(saved_bytes(a, b))
        slowdown = b["median_step_ms"] / a["median_step_ms"]
        # Only what this run showed; on a CPU its time says nothing about a GPU.
        on_gpu = about["engine"] == "cuda"
        cost = f" and a step may take {slowdown:.2f} times as long" if on_gpu else ""
        if verification.passed and saved_bytes(a, b) > 0:
            result["enable_when"] = [f"up to {saved} of device memory is missing{cost}"]
            result["avoid_when"] = [f"the run fits without the {saved} that it frees"]
        else:
            result["avoid_when"] = ["until all checks pass"]
        result["measured_results"] = [_row("no offload", a, a, "reference"), _row(_config(b), a, b, status)]
    result["failure_modes"] = _failure_modes(verification)
    return result


def _summary(verification: Verification) -> str:
    checks = verification.checks
    failed = [str(number) for number, check in enumerate(checks, 1) if check.status == "fail"]
    passed = sum(check.status == "pass" for check in checks)
    text = f"{passed} of {len(checks)} checks passed"
    unmeasured = sum(check.status == "not measured" for check in checks)
    text += f", {unmeasured} not measured" if unmeasured else ""
    return text + (f"; failed: {', '.join(failed)}" if failed else "")


def _effects(verification: Verification) -> dict[str, dict[str, str]]:
    a, b = verification.baseline.data, verification.offloaded.data
    num_steps, num_timed = len(a["losses"]), len(b["step_ms"])
    slowdown = b["median_step_ms"] / a["median_step_ms"]
    on_gpu = b["about"]["engine"] == "cuda"
    spread = max(_spread(run["step_ms"]) for run in (a, b))
    equal = "bit for bit" if verification.bitwise else "within the tolerance"
    found = {check.name: check for check in verification.checks}
    loss = next(check for name, check in found.items() if name.startswith("loss equal"))
    return {
        "speed": _claim(
            f"step time {slowdown:.2f} times ({num_timed} steps, spread {spread:.0%})",
            # A few steps, or steps that differ much, say little; a CPU says nothing about a GPU.
            "high" if on_gpu and num_timed >= 20 and spread < 0.1 else "medium" if on_gpu and spread < 0.3 else "low",
        ),
        "memory": _claim(
            f"device memory {mib(saved_bytes(a, b))} lower between steps, its peak "
            f"{mib(a['device_peak_bytes'] - b['device_peak_bytes'])} lower",
            "high" if on_gpu else "medium",
        ),
        "scale": _claim("measured on one device", "low"),
        "convergence": _claim(
            f"loss equal {equal} for {num_steps} steps" if loss.status == "pass" else f"loss {loss.figures}",
            "high" if verification.bitwise or num_steps >= 20 else "medium",
        ),
        "stability": _claim(
            f"both runs ended, {num_steps + num_timed} steps and more",
            "medium" if num_steps + num_timed >= 100 else "low",
        ),
    }


def _claim(effect: str, confidence: str) -> dict[str, str]:
    return {"effect": effect, "confidence": confidence, "validation": MEASURED}


def _failure_modes(verification: Verification) -> list[dict[str, str]]:
    modes = [
        {"symptom": f"{check.name}: {check.figures}", "validation": MEASURED}
        for check in verification.checks
        if check.status == "fail"
    ]
    return [
        *modes,
        {
            "symptom": "the host share does not fit the host, or less may be pinned than is needed",
            "response": "refused before anything is allocated; the message says what is needed and which setting helps",
            "validation": CODE_VERIFIED,
        },
        {
            "symptom": "a host update fails",
            "response": "an error names the parameters; go on from the last checkpoint",
            "validation": CODE_VERIFIED,
        },
    ]


def _row(config: str, a: Mapping[str, Any], b: Mapping[str, Any], status: str) -> dict[str, Any]:
    in_use = sum(b["held"]["device"].values()) if b["allocated_bytes"] is None else b["allocated_bytes"]
    deltas = [abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True)]
    return {
        "config": config,
        "iter_ms": round(b["median_step_ms"], 1),
        "slowdown": round(b["median_step_ms"] / a["median_step_ms"], 2),
        "mem_allocated_gb": _gb(in_use),
        "mem_peak_gb": _gb(b["device_peak_bytes"]),
        "mem_saved_gb": _gb(saved_bytes(dict(a), dict(b))),
        "loss_match": "bitwise" if a["losses"] == b["losses"] else f"max delta {max(deltas):.3g}",
        "status": status,
    }


def _config(b: Mapping[str, Any]) -> str:
    fraction = b["about"]["offload_fraction"]
    return f"optimizer offload {fraction:.0%}" if fraction else "activation offload"


def _gb(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / 1e9, 4)


def _spread(step_ms: Sequence[float]) -> float:
    ordered = sorted(step_ms)
    # Between the quartiles, so that one disturbed step does not count.
    low, middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
    return (high - low) / middle


def write_card(folder: Path, data: Mapping[str, Any]) -> None:
    """Write ``card.yaml`` and ``card.md``."""
    (folder / "card.yaml").write_text(yaml.safe_dump(dict(data), sort_keys=False, width=120, allow_unicode=True))
    (folder / "card.md").write_text("\n".join(_markdown(data)) + "\n")


def _markdown(data: Mapping[str, Any]) -> list[str]:
    command = " ".join(["forebay verify", data["config"]["recipe"], *data["config"]["overrides"]])
    lines = [f"# {data['title']}", "", f"**{data['status']}**: {data['summary']}.", "", "```", command, "```", ""]
    for title in ("hardware", "versions"):
        if title in data:
            values = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in data[title].items() if value)
            lines += [f"{title.capitalize()}: {values}.", ""]
    lines += ["## Checks", "", "| | check | | figures |", "|---|---|---|---|"]
    lines += [f"| {c['number']} | {c['name']} | {c['status']} | {_cell(c['figures'])} |" for c in data["checks"]]
    if "effects" in data:
        lines += ["", "## Effects", "", "| | effect | confidence | validation |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {claim['effect']} | {claim['confidence']} | {claim['validation']} |"
            for name, claim in data["effects"].items()
        ]
        columns = list(data["measured_results"][0])
        lines += ["", "## Measured", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(str(row[column]) for column in columns)} |" for row in data["measured_results"]]
    for key, title in (("enable_when", "Enable when"), ("avoid_when", "Avoid when")):
        if key in data:
            lines += ["", f"## {title}", "", *(f"- {text}" for text in data[key])]
    lines += ["", "## Failure modes", ""]
    for mode in data["failure_modes"]:
        response = f": {mode['response']}" if "response" in mode else ""
        lines.append(f"- {_cell(mode['symptom'])}{response} ({mode['validation']})")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
