"""The report as one HTML page that needs no network and follows the reader's light or dark mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from cbexp.report import bootstrap
from cbexp.report.doubts import find_doubts
from cbexp.report.environments import find_differences, shared_facts
from cbexp.report.errors import ReportError
from cbexp.report.failures import describe_reason, without_figures
from cbexp.report.json_files import Reader
from cbexp.report.labels import shorten
from cbexp.report.page_charts import LONE, charted_workloads, charts_of_all, throughput_charts
from cbexp.report.page_table import columns_for
from cbexp.report.peak_memory import find_peak_memory
from cbexp.report.rows import Row, format_row_numbers, run_rows
from cbexp.report.run import Run
from cbexp.report.table import name_by_number, require_runs
from cbexp.report.table_notes import describe_baselines
from cbexp.report.workload_order import describe_reference
from cbexp.report.workloads import find_workloads, letters_of

MAX_LOG_LINES = 25
MAX_NAMES = 3  # in the title


def build_page(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The page as text.

    Raises:
        ReportError: there is no run, `baseline` fits none or several, or plotly is not installed.
    """
    require_runs(runs)
    plotly = _load_plotly()
    rows = run_rows(runs, baseline)
    values = {**_results(runs, rows, baseline), **_circumstances(runs, rows), "plotly": plotly}
    return _environment().get_template("page.html").render(values)


def _results(runs: Sequence[Run], rows: Sequence[Row], baseline: str | None) -> dict[str, Any]:
    workloads = find_workloads(rows, runs)
    number_of = {row["folder"]: number for number, row in enumerate(rows, start=1)}
    throughput, others = throughput_charts(workloads, rows), charts_of_all(runs, rows, workloads)
    return {
        "title": _title(runs),
        "made_at": datetime.now(UTC),
        "rows": rows,
        "columns": columns_for(rows),
        "number_of": number_of,
        "numbers": lambda some: format_row_numbers([number_of[row["folder"]] for row in some]),
        "short": shorten({row["folder"]: row["label_in_work"] for row in rows}),
        "run_of": {str(run.folder): run for run in runs},
        "workloads": workloads,
        "charted_workloads": charted_workloads(workloads),
        "num_winners": sum(workload.has_winner for workload in workloads),
        "letter_of": letters_of(workloads),
        "throughput": throughput,
        "lone": throughput.get(LONE),
        "charts": others,
        "figures": {chart.chart_id: chart.figure for chart in [*throughput.values(), *others]},
        "find_peak_memory": find_peak_memory,
        "baselines": describe_baselines(rows, baseline),
        "rule": bootstrap.RULE,
        "reference": describe_reference([Path(row["folder"]) for row in rows]),
    }


def _title(runs: Sequence[Run]) -> str:
    """The names of the completed runs' experiments (all runs' if none completed), or how many there are."""
    names = [run.name for run in runs if run.is_completed] or [run.name for run in runs]
    different = dict.fromkeys(names)
    return " + ".join(different) if len(different) <= MAX_NAMES else f"{len(different)} experiments"


def _circumstances(runs: Sequence[Run], rows: Sequence[Row]) -> dict[str, Any]:
    name = name_by_number(rows)
    differences = find_differences(runs)
    return {
        "without_figures": [_ending(run, name([run])) for run in without_figures(runs)],
        "num_failures": sum(run.is_failure for run in runs),
        "doubts": [(doubt, name(concerned)) for doubt, concerned in find_doubts(runs).items()],
        "differences": [
            (difference.fact, [(value, name(having)) for value, having in difference.values.items()])
            for difference in differences
        ],
        "shared": shared_facts(runs),
    }


def _ending(run: Run, number: str) -> Mapping[str, Any]:
    reader = Reader(run.folder)
    log = reader.read_tail("log.txt", MAX_LOG_LINES) or reader.read_tail("traceback.txt", MAX_LOG_LINES)
    return {"run": run, "number": number, "reason": describe_reason(run), "log": log}


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("cbexp.report", "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _load_plotly() -> str:
    try:
        return resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ReportError(
            "--html draws its charts with plotly, which is not installed here: pip install 'cbexp[report]'. "
            "The table, --csv, --json and --markdown work without it."
        ) from error
