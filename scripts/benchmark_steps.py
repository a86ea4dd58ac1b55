"""Times decode steps of random-weight models beside the memory limit: a row for each model, batch and context.

    PYTHONPATH=. python scripts/benchmark_steps.py --output outputs/steps.json                   # all rows
    PYTHONPATH=. python scripts/benchmark_steps.py --output outputs/a.json --only 'qwen3_4b/32/*' --num-bursts 3
    PYTHONPATH=. python scripts/benchmark_steps.py --output outputs/b.json --models qwen3_0_6b --batches 1 8

Rows go to the JSON file and to a CSV file beside it as they are measured. `scripts/plot_steps.py` draws them.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmark_setup import StepSetUp, is_asked_for, opened_for_steps, write_json

from cbexp.engine import EngineError
from cbexp.environment import collect_environment, quiet_libraries
from cbexp.errors import CbexpError

MODELS = ("qwen3_0_6b", "qwen3_4b", "qwen3_8b")
BATCHES = (1, 32, 256)
CONTEXT = 500
LONG_MODEL, LONG_CONTEXTS, LONG_BATCHES = "qwen3_4b", (2000, 16000), (1, 32)
EXPECTED_ERRORS = (CbexpError, EngineError, torch.OutOfMemoryError)


class Cell(NamedTuple):
    """What a row measures."""

    model: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.batch}/{self.context}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON file to write; the CSV lies beside it"
    )
    parser.add_argument("--models", nargs="+", help=f"of conf/model; by default {' '.join(MODELS)}")
    parser.add_argument("--batches", nargs="+", type=int, help="by default 1 32 256")
    parser.add_argument(
        "--contexts", nargs="+", type=int, help="tokens that a row attends to; by default 500"
    )
    parser.add_argument("--compile-mode", nargs="+", default=["auto"], help="one or several of compile.mode")
    parser.add_argument("--num-steps", type=int, default=32, help="steps of a burst")
    parser.add_argument("--num-bursts", type=int, default=7, help="timed bursts of a row")
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="rows MODEL/BATCH/CONTEXT, as in 'qwen3_4b/*'"
    )
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="of python -m cbexp"
    )
    return parser.parse_args()


def choose_cells(arguments: argparse.Namespace) -> list[Cell]:
    """Every combination of what is given; when nothing is, the reference rows with long contexts among them."""
    models, batches, contexts = arguments.models, arguments.batches, arguments.contexts
    cells = [
        Cell(*values) for values in product(models or MODELS, batches or BATCHES, contexts or (CONTEXT,))
    ]
    if not (models or batches or contexts):
        cells += [Cell(LONG_MODEL, *values) for values in product(LONG_BATCHES, LONG_CONTEXTS)]
    return [cell for cell in cells if is_asked_for(cell.name, arguments.only)]


def measure_model(
    model: str, cells: list[Cell], compile_mode: str, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model in one compile mode; a row that fails says why in `error`."""
    shapes = [(cell.batch, cell.context) for cell in cells]
    try:
        with opened_for_steps(model, compile_mode, shapes, arguments.num_steps, arguments.override) as set_up:
            start_s = time.perf_counter()
            set_up.driver.warmup()
            ready_s = time.perf_counter() - start_s
            for cell in cells:
                yield measure_cell(set_up, cell, arguments) | {"warmup_s": ready_s}
    except EXPECTED_ERRORS as error:
        yield {"model": model, "compile_mode": compile_mode, "error": f"{type(error).__name__}: {error}"}


def measure_cell(set_up: StepSetUp, cell: Cell, arguments: argparse.Namespace) -> dict[str, Any]:
    seconds = set_up.driver.time_decode_steps(
        cell.batch, cell.context, arguments.num_steps, num_bursts=arguments.num_bursts
    )
    median_s = statistics.median(seconds)
    step_bytes, floor_s = set_up.count_bytes(*cell[1:]), set_up.floor_s(*cell[1:])
    return {
        **cell._asdict(),
        "compile_mode": set_up.plan.compile_mode,
        "dtype": str(set_up.plan.dtype).removeprefix("torch."),
        "device": str(set_up.plan.device),
        "num_steps": arguments.num_steps,
        "num_bursts": len(seconds),
        "step_ms": 1000 * median_s,
        "min_step_ms": 1000 * min(seconds),
        "max_step_ms": 1000 * max(seconds),
        "output_tokens_per_s": cell.batch / median_s,
        "weight_bytes": step_bytes.weight_bytes,
        "kv_bytes": step_bytes.kv_bytes,
        "bandwidth_bytes_per_s": set_up.bandwidth_bytes_per_s,
        "floor_ms": None if floor_s is None else 1000 * floor_s,
        "roofline_fraction": None if floor_s is None else floor_s / median_s,
    }


def write_rows(path: Path, rows: list[dict[str, Any]], environment: dict[str, Any]) -> None:
    write_json(path, {"environment": environment, "rows": rows})
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def describe_row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['model']} {row['compile_mode']}: FAILED: {row['error']}"
    share = row["roofline_fraction"]
    limit = "" if share is None else f", {share:.1%} of the memory limit ({row['floor_ms']:.2f} ms)"
    return (
        f"{row['model']} {row['compile_mode']}, batch {row['batch']}, context {row['context']}: "
        f"{row['step_ms']:.3f} ms ({row['min_step_ms']:.3f} to {row['max_step_ms']:.3f}), "
        f"{row['output_tokens_per_s']:,.0f} tokens/s{limit}"
    )


def main() -> None:
    arguments = parse_arguments()
    cells = choose_cells(arguments)
    if not cells:
        sys.exit(f"no row matches --only {' '.join(arguments.only)}: rows are named MODEL/BATCH/CONTEXT")
    if arguments.output.exists():
        sys.exit(f"{arguments.output} is there already: results are never overwritten")
    quiet_libraries()
    environment, rows = collect_environment(), []
    for compile_mode in arguments.compile_mode:
        for model, group in groupby(sorted(cells), key=lambda cell: cell.model):
            for row in measure_model(model, list(group), compile_mode, arguments):
                rows.append(row)
                print(describe_row(row), flush=True)
                write_rows(arguments.output, rows, environment)
    if any("error" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
