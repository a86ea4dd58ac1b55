"""Makes the team's saved view of a W&B project of cbexp's runs.

    python scripts/wandb_dashboard.py --entity TEAM [--project cbexp]

Needs the extra `dashboard` (pip install '.[dashboard]'), a network, and credentials (wandb login or WANDB_API_KEY).
Each call makes one more view; those that are there stay as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import wandb

from cbexp.config import TrackingConfig
from cbexp.tracking import OBJECTIVE

try:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws
except ImportError:
    sys.exit("wandb_dashboard.py needs the wandb-workspaces package: pip install '.[dashboard]'")

THROUGHPUT = "decode_tps"
COMPILE_MODE = "resolved.compile_mode"
DRIVER = "driver.name"
STEP_PERCENTILES = ("p50", "p90", "p99")
# What a run chose, from each configuration group; as resolved, where the group says `auto`.
CHOICES = (
    "model.name",
    "adapter.kind",
    "dataset.name",
    "sampling.max_new_tokens",
    "sampling.temperature",
    "cache.name",
    "resolved.cache_tokens",
    "cache.scheduler",
    COMPILE_MODE,
    "compile.batch_shape",
    DRIVER,
)


def build_workspace(entity: str, project: str, name: str) -> ws.Workspace:
    """Return the view, one section a question; it is saved nowhere yet."""
    sections = {
        "Throughput": _throughput_panels(),
        "Roofline": _roofline_panels(),
        "Step times": _step_time_panels(),
        "Memory": _memory_panels(),
        "Correctness": _correctness_panels(),
        "Which settings matter": _settings_panels(),
    }
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[ws.Section(name=title, panels=panels, is_open=True) for title, panels in sections.items()],
        settings=ws.WorkspaceSettings(x_axis="round", max_runs=100),
        runset_settings=ws.RunsetSettings(order=[ws.Ordering(ws.Summary(THROUGHPUT), ascending=False)]),
    )


def _throughput_panels() -> list[Any]:
    return [
        _bars("Output tokens/s by compile mode", [THROUGHPUT], COMPILE_MODE),
        _bars("Output tokens/s by driver", [THROUGHPUT], DRIVER),
        _lines("Output tokens/s of each round", ["output_tokens_per_s"]),
        _scatter("Throughput against batch", "mean_batch", THROUGHPUT),
    ]


def _roofline_panels() -> list[Any]:
    return [
        _bars("Fraction of the memory roofline by compile mode", ["roofline_fraction"], COMPILE_MODE),
        _scatter("Roofline fraction against batch", "mean_batch", "roofline_fraction"),
        _bars("Device idle share by compile mode", ["device_idle_share"], COMPILE_MODE),
    ]


def _step_time_panels() -> list[Any]:
    return [
        *(
            _bars(f"Decode step {p} (s) by compile mode", [f"decode_step_s.{p}"], COMPILE_MODE)
            for p in STEP_PERCENTILES
        ),
        *(
            _lines(f"Decode step {p} of each round (s)", [f"steps/decode_step_s/{p}"])
            for p in STEP_PERCENTILES
        ),
        wr.MediaBrowser(title="Distribution of decode steps", media_keys=["histograms/decode_step_s"]),
    ]


def _memory_panels() -> list[Any]:
    return [
        _bars("Peak reserved memory (GiB)", ["peak_reserved_gib"], COMPILE_MODE),
        _bars("Peak allocated memory (GiB)", ["peak_allocated_gib"], COMPILE_MODE),
        _bars("Peak host memory (GiB)", ["peak_host_gib"], COMPILE_MODE),
        _scatter("Throughput against memory", "peak_reserved_gib", THROUGHPUT),
    ]


def _correctness_panels() -> list[Any]:
    return [
        _bars("Accuracy by compile mode", ["accuracy"], COMPILE_MODE),
        _lines("Accuracy of each round", ["accuracy"]),
        _bars("One of a group right (pass@k) by temperature", ["groups.pass_at_k"], "sampling.temperature"),
        _bars("Mean drift of log-probabilities from eager", ["mean_logprob_error"], COMPILE_MODE),
        _bars("Largest drift of log-probabilities from eager", ["max_logprob_error"], COMPILE_MODE),
        _bars("Mean drift of the steps' best logits from eager", ["mean_logit_error"], COMPILE_MODE),
        _bars("Largest drift of the steps' best logits from eager", ["max_logit_error"], COMPILE_MODE),
    ]


def _settings_panels() -> list[Any]:
    columns = [wr.ParallelCoordinatesPlotColumn(metric=wr.Config(choice)) for choice in CHOICES]
    results = [wr.ParallelCoordinatesPlotColumn(metric=wr.SummaryMetric(THROUGHPUT))]
    return [
        wr.ParallelCoordinatesPlot(
            title="Settings and throughput", columns=[*columns, *results], layout=wr.Layout(w=24, h=12)
        ),
        wr.ParameterImportancePlot(with_respect_to=OBJECTIVE),
    ]


def _bars(title: str, metrics: list[str], groupby: str) -> wr.BarPlot:
    """The mean of a group's runs, with their range."""
    return wr.BarPlot(
        title=title,
        metrics=list(metrics),
        groupby=wr.Config(groupby),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
    )


def _lines(title: str, metrics: list[str]) -> wr.LinePlot:
    return wr.LinePlot(title=title, x="round", y=list(metrics))


def _scatter(title: str, x: str, y: str) -> wr.ScatterPlot:
    return wr.ScatterPlot(title=title, x=wr.SummaryMetric(x), y=wr.SummaryMetric(y))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entity", required=True, type=_name, help="the team (or user) whose project it is")
    parser.add_argument(
        "--project", default=TrackingConfig().project, type=_name, help="where runs are (%(default)s)"
    )
    parser.add_argument("--name", default="cbexp", type=_name, help="what the view is called (%(default)s)")
    return parser.parse_args(argv)


def _name(value: str) -> str:
    if not value.strip():
        raise argparse.ArgumentTypeError("a name is needed")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    workspace = build_workspace(arguments.entity, arguments.project, arguments.name)
    try:
        workspace.save()
    except (wandb.Error, OSError) as error:
        sys.exit(
            f"the view could not be saved to {arguments.entity}/{arguments.project}: {error}\n"
            "Is there a network, are you logged in (wandb login), and is the name of the team right?"
        )


if __name__ == "__main__":
    main()
