"""One self-contained HTML file of a sweep: it loads nothing, so it works offline and can be mailed."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping

from forebay.report.sweep import TABLE_COLUMNS, Sweep, cells, row

_TITLES = {
    "frontier": ("Memory against step time", "Left and low is better. Each point is a fraction."),
    "memory": ("Memory by purpose and tier", "Between two steps. On a GPU, what the peak adds is on top."),
    "loss": ("Loss", "Curves that agree lie on each other; the widest is the first fraction."),
    "stalls": ("Share of the step stalled", "Time in which the compute lane waited for copies or host updates."),
    "roofline": (
        "Copies and host updates against this machine's ceilings",
        "Rates while a lane was busy, in one step.",
    ),
}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 0 0 .2rem; } p.note { color: #555; margin: 0 0 .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
tr.lost td { color: #b3400a; } code { background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr));
  gap: 2rem; margin-top: 2rem; } figure { margin: 0; } img { width: 100%; height: auto; }
"""


def render(found: Sweep, figures: Mapping[str, Mapping[str, bytes]]) -> str:
    """Return the report as HTML.

    Args:
        found: the sweep.
        figures: from :func:`forebay.report.plots.draw`.
    """
    command = " ".join(["forebay sweep", found.recipe, *found.words])
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>forebay sweep: {html.escape(found.recipe)}</title>',
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>',
        f"<h1>Optimizer state on the host: {html.escape(found.recipe)}</h1>",
        f"<p><code>{html.escape(command)}</code></p>",
        *_about(found),
        *_table(found),
    ]
    parts.append('<div class="figures">')
    for name, files in figures.items():
        title, note = _TITLES[name]
        # As an image each figure keeps its own ids; inlined, those of several would clash.
        data = base64.b64encode(files["svg"]).decode()
        parts.append(
            f'<figure id="{name}"><h2>{title}</h2><p class="note">{note}</p>'
            f'<img alt="{title}" src="data:image/svg+xml;base64,{data}"></figure>'
        )
    parts.append("</div></body></html>")
    return "\n".join(parts) + "\n"


def _about(found: Sweep) -> list[str]:
    if found.reference is None:
        return ["<p>No point was measured.</p>"]
    about = found.reference.result.data["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    text = (
        f"{about['model']}, {about['num_parameters']:,} parameters, {about['dtype']}, "
        f"{about['tokens_per_step']:,} tokens a step; {about['device']}, "
        f"{about['host_cores']} host cores, host kernel {about['host_kernel']}; {versions}."
    )
    lines = [f"<p>{html.escape(text)}</p>"]
    if about["engine"] == "sim":
        lines.append(
            "<p><strong>Measured on a CPU.</strong> Memory is what the device tier would hold, lanes take turns and "
            "nothing overlaps: times, stalls and rates say nothing about a GPU.</p>"
        )
    return lines


def _table(found: Sweep) -> list[str]:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading, _, _ in TABLE_COLUMNS.values())
    lines = [f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>']
    for point in found.points:
        body = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row(point, found.reference)))
        lines.append(f"<tr{'' if point.ok else ' class=lost'}>{body}</tr>")
    lines.append("</tbody></table></div>")
    for point in found.points:
        if point.result.error:
            lines.append(f"<p>{point.label}: <code>{html.escape(point.result.error)}</code></p>")
    return lines
