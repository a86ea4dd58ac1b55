"""Draws the step times of `scripts/benchmark_steps.py`: against the batch, and against the context.

    python scripts/plot_steps.py outputs/steps.json --output outputs/steps.png

Solid lines are measured, dashed ones the memory limit. Needs matplotlib, which cbexp itself does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", type=Path, nargs="+", help="JSON files of benchmark_steps.py")
    parser.add_argument("--output", type=Path, required=True, help="picture to write: .png, .svg, .pdf")
    return parser.parse_args()


def load_rows(paths: list[Path]) -> list[Row]:
    """The measured rows of all files; rows that failed have nothing to draw."""
    rows = [row for path in paths for row in json.loads(path.read_text())["rows"]]
    measured = [row for row in rows if "error" not in row]
    if not measured:
        sys.exit(f"no measured row in {', '.join(map(str, paths))}")
    return measured


def group_lines(rows: list[Row], along: str, other: str) -> dict[str, list[Row]]:
    """Lines along one axis: rows that share everything else, in order. Single points are left out."""
    lines: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        lines[row["model"], row["compile_mode"], row[other]].append(row)
    return {
        f"{model} {compile_mode}, {other} {value}": sorted(line, key=lambda row: int(row[along]))
        for (model, compile_mode, value), line in sorted(lines.items())
        if len({row[along] for row in line}) > 1
    }


def draw(rows: list[Row], output: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        sys.exit("drawing needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6), layout="constrained")
    for axis, along, other in zip(axes, ("batch", "context"), ("context", "batch"), strict=True):
        lines = group_lines(rows, along, other)
        for label, line in lines.items():
            draw_line(axis, along, label, line)
        axis.set(xlabel=along, ylabel="milliseconds a step", xscale="log", yscale="log")
        places = sorted({row[along] for line in lines.values() for row in line})
        axis.set_xticks(places, labels=[f"{place:,}" for place in places])
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(visible=True, which="both", alpha=0.3)
        if lines:
            axis.plot([], [], linestyle="--", color="gray", label="floor: bytes / bandwidth")
            axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


def draw_line(axis: Any, along: str, label: str, line: list[Row]) -> None:
    places = [row[along] for row in line]
    (drawn,) = axis.plot(places, [row["step_ms"] for row in line], marker="o", label=label)
    floors = [row["floor_ms"] for row in line]
    if None not in floors:
        axis.plot(places, floors, linestyle="--", color=drawn.get_color())


def main() -> None:
    arguments = parse_arguments()
    draw(load_rows(arguments.steps), arguments.output)


if __name__ == "__main__":
    main()
