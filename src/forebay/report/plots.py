"""The figures of a sweep, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forebay.report.sweep import Sweep, SweepPoint, rates

# Okabe and Ito's palette, which people with any colour vision can tell apart.
_BLACK, _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
_PURPOSES = {
    "weights": _BLUE,
    "gradients": _SKY,
    "optimizer_state": _ORANGE,
    "staging": _RED,
    "activations": _GREEN,
    "master_weights": _PURPLE,
    "other": "#999999",
    "at the peak": "#C8C8C8",
}
_TIERS = {"device": "", "pinned": "//", "pageable": ".."}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "svg.hashsalt": "forebay",  # the same data give the same file
    "figure.constrained_layout.use": True,
}


def _unit(found: Sweep) -> tuple[str, int]:
    """Return the unit in which the memory of a sweep is readable, and its bytes."""
    most = max(point.result.data["device_peak_bytes"] for point in found.points if point.ok)
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)


def draw(found: Sweep) -> dict[str, dict[str, bytes]]:
    """Return the figures by name, each as ``"png"`` and ``"svg"``; none when no point was measured.

    Args:
        found: what to show. A point that ran out of memory is shown as such.
    """
    if found.reference is None:
        return {}
    return {name: _rendered(plot, found) for name, plot in _PLOTS.items()}


def _rendered(plot: Callable[[Axes, Sweep], None], found: Sweep) -> dict[str, bytes]:
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 4.0), dpi=120)
        plot(figure.subplots(), found)
        files = {}
        for kind in ("png", "svg"):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
            files[kind] = buffer.getvalue()
    return files


def _frontier(axes: Axes, found: Sweep) -> None:
    points = [p for p in found.points if p.ok]
    unit, scale = _unit(found)
    memory = [p.result.data["device_peak_bytes"] / scale for p in points]
    times = [p.result.data["median_step_ms"] for p in points]
    axes.plot(memory, times, marker="o", color=_BLUE)
    for point, x, y in zip(points, memory, times, strict=True):
        axes.annotate(point.label, (x, y), xytext=(5, 5), textcoords="offset points")
    lost = [p.label for p in found.points if not p.ok]
    if lost:
        axes.text(0.98, 0.02, "out of memory or failed: " + ", ".join(lost), color=_RED, ha="right", va="bottom",
                  transform=axes.transAxes)  # fmt: skip
    axes.set(xlabel=f"peak device memory, {unit}", ylabel="ms a step")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12)


def _memory(axes: Axes, found: Sweep) -> None:
    shown: dict[str, Any] = {}
    unit, scale = _unit(found)
    width = 0.26
    for position, point in enumerate(found.points):
        if not point.ok:
            _mark_lost(axes, position, point)
            continue
        data = point.result.data
        for offset, (tier, hatch) in enumerate(_TIERS.items()):
            purposes = dict(data["held"][tier])
            if tier == "device" and data["allocated_bytes"] is not None:
                # The peak is in forward and backward: what is more then is activations and the like.
                purposes["at the peak"] = max(0, data["device_peak_bytes"] - sum(purposes.values()))
            bottom = 0.0
            for purpose in sorted(purposes, key=lambda name: list(_PURPOSES).index(name) if name in _PURPOSES else 99):
                height = purposes[purpose] / scale
                bars = axes.bar(position + (offset - 1) * width, height, 0.9 * width, bottom=bottom, hatch=hatch,
                                color=_PURPOSES.get(purpose, "#999999"), edgecolor="white", linewidth=0.5)  # fmt: skip
                if not hatch:
                    shown.setdefault(purpose.replace("_", " "), bars)
                elif purpose.replace("_", " ") not in shown:
                    shown[purpose.replace("_", " ")] = bars
                bottom += height
    _label_fractions(axes, found.points)
    axes.set(ylabel=f"{unit}: device (plain), pinned (//), pageable (..)")
    axes.legend(shown.values(), shown.keys(), fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.grid(visible=False, axis="x")


def _loss(axes: Axes, found: Sweep) -> None:
    colours = (_BLACK, _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PURPLE)
    points = [p for p in found.points if p.ok]
    for number, point in enumerate(points):
        losses = point.result.data["losses"]
        # Curves that agree lie on each other: the widths let all of them be seen.
        axes.plot(range(1, len(losses) + 1), losses, color=colours[number % len(colours)], label=point.label,
                  linewidth=1.0 + 2.0 * (len(points) - 1 - number))  # fmt: skip
    axes.set(xlabel="step", ylabel="loss, nats")
    axes.legend(title="fraction", fontsize=8, frameon=False)


def _stalls(axes: Axes, found: Sweep) -> None:
    for position, point in enumerate(found.points):
        if not point.ok:
            _mark_lost(axes, position, point)
            continue
        share = 100 * point.result.data["stall_share"]
        axes.bar(position, share, 0.6, color=_RED)
        axes.annotate(f"{share:.1f}%", (position, share), ha="center", va="bottom")
    _label_fractions(axes, found.points)
    axes.set(ylabel="share of the step stalled, %")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.grid(visible=False, axis="x")


def _roofline(axes: Axes, found: Sweep) -> None:
    names = {"down_gbps": "copies down", "up_gbps": "copies up", "update_gparams": "host update"}
    colours = (_BLUE, _SKY, _ORANGE)
    for number, (key, name) in enumerate(names.items()):
        ceiling = found.ceilings[key]
        unit = "G params/s" if key == "update_gparams" else "GB/s"
        reached = [(i, rates(p)[key]) for i, p in enumerate(found.points) if p.ok]
        heights = [(i, 100 * rate / ceiling) for i, rate in reached if rate is not None]
        axes.bar([i + (number - 1) * 0.27 for i, _ in heights], [h for _, h in heights], 0.24, color=colours[number],
                 label=f"{name}, 100% = {ceiling:.1f} {unit}")  # fmt: skip
    for position, point in enumerate(found.points):
        if not point.ok:
            _mark_lost(axes, position, point)
    axes.axhline(100, color=_BLACK, linewidth=1, linestyle="--")
    _label_fractions(axes, found.points)
    axes.set(ylabel="rate while busy, % of the machine's")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0.0, -0.14))
    axes.grid(visible=False, axis="x")


def _label_fractions(axes: Axes, points: Iterable[SweepPoint]) -> None:
    labels = [point.label for point in points]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_xlabel("share of the optimizer state on the host")


def _mark_lost(axes: Axes, position: int, point: SweepPoint) -> None:
    text = point.result.status.replace("_", " ")
    axes.text(
        position, 0.03, text, color=_RED, rotation=90, ha="center", va="bottom", transform=axes.get_xaxis_transform()
    )


_PLOTS: dict[str, Callable[[Axes, Sweep], None]] = {
    "frontier": _frontier,
    "memory": _memory,
    "loss": _loss,
    "stalls": _stalls,
    "roofline": _roofline,
}
