"""Profiles decode steps of a random-weight model: the time of each kernel beside the memory floor of each part.

    PYTHONPATH=. python scripts/profile_step.py --model qwen3_4b --batch 32 --context 500 --output outputs/profile.json

Prints Markdown: the step with and without the profiler, kernels by their time, the kernels of one layer in order, and
what each part of the model would take at the measured bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from benchmark_setup import StepSetUp, opened_for_steps, write_json
from kernel_profile import KernelEvent, format_table, part_floors, summarize_kernels, summarize_layer
from torch.profiler import ProfilerActivity, profile

from cbexp.engine import EngineError
from cbexp.engine.roofline import weight_bytes_by_parameter
from cbexp.environment import collect_environment, quiet_libraries
from cbexp.errors import CbexpError


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3_4b", help="of conf/model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=500, help="tokens that a row attends to")
    parser.add_argument("--compile-mode", default="auto", help="of compile.mode")
    parser.add_argument("--num-steps", type=int, default=16, help="steps of a burst; two bursts are profiled")
    parser.add_argument("--output", type=Path, help="JSON file for the same figures, kernel names in full")
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="of python -m cbexp"
    )
    return parser.parse_args()


def profile_steps(
    set_up: StepSetUp, batch: int, context: int, num_steps: int
) -> tuple[list[KernelEvent], int]:
    """The kernels of some bursts, and the number of their steps. On a CPU they are operators without callees."""
    is_cuda = set_up.plan.device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        set_up.driver.time_decode_steps(batch, context, num_steps, num_bursts=1)
    events = [
        KernelEvent(event.name, event.time_range.start, _own_us(event, is_cuda))
        for event in profiler.events() or []
        if (event.device_type.name == "CUDA") == is_cuda and not event.is_user_annotation
    ]
    return events, 2 * num_steps  # with the warmup burst


def _own_us(event: Any, is_cuda: bool) -> float:
    return float(event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total)


def measure(set_up: StepSetUp, arguments: argparse.Namespace) -> dict[str, Any]:
    batch, context, num_steps = arguments.batch, arguments.context, arguments.num_steps
    set_up.driver.warmup()
    step_s = statistics.median(set_up.driver.time_decode_steps(batch, context, num_steps))
    events, num_profiled = profile_steps(set_up, batch, context, num_steps)
    num_layers = set_up.loaded.architecture.num_hidden_layers
    kernels = summarize_kernels(events, num_profiled, num_layers)
    params = dict(set_up.loaded.model.named_parameters())
    kv_bytes = set_up.count_bytes(batch, context).kv_bytes
    weights = weight_bytes_by_parameter(set_up.loaded.architecture, params, batch)
    floor_s = set_up.floor_s(batch, context)
    return {
        "model": arguments.model,
        "batch": batch,
        "context": context,
        "compile_mode": set_up.plan.compile_mode,
        "num_layers": num_layers,
        "step_us": 1e6 * step_s,
        "kernels_us": sum(row["us_per_step"] for row in kernels),
        "floor_us": None if floor_s is None else 1e6 * floor_s,
        "kernels": kernels,
        "layer": summarize_layer(events, num_profiled, num_layers),
        "parts": part_floors(weights, kv_bytes, set_up.bandwidth_bytes_per_s, num_layers),
    }


def describe(figures: dict[str, Any]) -> str:
    floor_us, step_us = figures["floor_us"], figures["step_us"]
    limit = "" if floor_us is None else f"; floor {floor_us:,.0f} us, {floor_us / step_us:.1%}"
    head = (
        f"{figures['model']}, batch {figures['batch']}, context {figures['context']}, {figures['compile_mode']}: "
        f"{step_us:,.0f} us a step, {figures['kernels_us']:,.0f} us of kernels in the profile{limit}\n"
    )
    tables = (
        format_table("Kernels of a step", figures["kernels"]),
        format_table("One layer, from its attention to the next one's", figures["layer"]),
        format_table("Floor of each part", figures["parts"]),
    )
    return "\n".join((head, *tables))


def main() -> None:
    arguments = parse_arguments()
    if arguments.output is not None and arguments.output.exists():
        sys.exit(f"{arguments.output} is there already: results are never overwritten")
    quiet_libraries()
    environment = collect_environment()
    shapes = [(arguments.batch, arguments.context)]
    try:
        with opened_for_steps(
            arguments.model, arguments.compile_mode, shapes, arguments.num_steps, arguments.override
        ) as set_up:
            figures = measure(set_up, arguments)
    except (CbexpError, EngineError, torch.OutOfMemoryError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if arguments.output is not None:
        write_json(arguments.output, figures | {"environment": environment})
    sys.stdout.write(describe(figures))


if __name__ == "__main__":
    main()
