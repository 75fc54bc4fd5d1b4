"""Plots what benchmarks/optimizer.py measured: milliseconds a step against GPU peak, one line a system.

    python benchmarks/optimizer_plot.py benchmarks/results/optimizer.csv

Needs matplotlib: pip install 'forebay[report]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harness import read_csv

FRACTIONS = ("offload_fraction", "fraction")


def series(row: dict[str, Any]) -> tuple[str, float]:
    """Return the line that a row belongs to, and the share of the state it offloads: 1 where there is no choice."""
    options = json.loads(row["options"])
    fraction = next((options.pop(key) for key in FRACTIONS if key in options), 0.0 if row["system"] == "none" else 1.0)
    if options.get("placement") == "auto":
        del options["placement"]
    words = [row["system"], *(f"{key.removesuffix('_gib')} {value}" for key, value in options.items())]
    return ", ".join(words), float(fraction)


def lines(rows: list[dict[str, Any]], tokens: str) -> dict[str, list[tuple[float, float, float]]]:
    """Return of each line its points (peak GiB, milliseconds a step, fraction), by fraction."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        if row["status"] == "ok" and str(row["tokens"]) == tokens:
            name, fraction = series(row)
            found.setdefault(name, []).append((float(row["peak_gib"]), float(row["step_ms"]), fraction))
    # Nothing is staged, and no state is rounded, where nothing is offloaded: all lines of ours begin there.
    for name, points in found.items():
        if name.startswith("forebay, staging") and "forebay" in found:
            points += [point for point in found["forebay"] if point[2] == 0.0]
        points.sort(key=lambda point: point[2])
    return found


def plot(rows: list[dict[str, Any]], output: Path) -> list[Path]:
    """Write ``output`` with the suffixes .png and .svg, a panel for each number of tokens; return the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    tokens = sorted({str(row["tokens"]) for row in rows}, key=int)
    figure, panels = pyplot.subplots(1, len(tokens), figsize=(7.5 * len(tokens), 6), squeeze=False)
    found = {count: lines(rows, count) for count in tokens}
    names = list(dict.fromkeys(name for own in found.values() for name in own))
    colors = {name: pyplot.get_cmap("tab20")(index % 20) for index, name in enumerate(names)}
    for panel, count in zip(panels[0], tokens, strict=True):
        for name, points in found[count].items():
            peaks, times, fractions = zip(*points, strict=True)
            style = "-o" if name.startswith("forebay") else "--s"
            panel.plot(peaks, times, style, label=name, color=colors[name], markersize=5)
            if len(points) > 1:
                for peak, ms, fraction in zip(peaks, times, fractions, strict=True):
                    panel.annotate(f"{fraction:g}", (peak, ms), textcoords="offset points", xytext=(4, 4), fontsize=7)
        panel.set_yscale("log")
        for axis in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            axis(ScalarFormatter())
        panel.set_title(f"{int(count):,} tokens a step")
        panel.set_xlabel("GPU peak (GiB)")
        panel.set_ylabel("milliseconds a step")
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize=7)
    gpus = ", ".join(dict.fromkeys(row.get("gpu", "") for row in rows))
    figure.suptitle(f"AdamW with its state offloaded, 1.1 B parameters, {gpus}; labels: share offloaded")
    figure.tight_layout()
    paths = [output.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    arguments = parser.parse_args()
    for path in plot(read_csv(arguments.csv), arguments.csv):
        print(path)


if __name__ == "__main__":
    main()
