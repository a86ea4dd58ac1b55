"""What each driver can do, and which settings it therefore does not read."""

from __future__ import annotations

import importlib

import pytest
import torch

from cbexp.config import (
    CacheConfig,
    CompileConfig,
    DriverConfig,
    ExperimentConfig,
    SamplingConfig,
    find_idle_settings,
)
from cbexp.drivers.registry import DRIVERS
from cbexp.drivers.vllm.settings import COMPILE_ARGUMENTS
from cbexp.engine.types import COMPILE_MODES, CompileMode, EngineError

DECODE = {
    "fusion": "projections",
    "batch_shape": "full",
    "buckets": [1, 8],
    "max_burst": 9,
    "self_check": False,
}
WORKER = {"python": "p", "pythonpath": "d", "start_timeout_s": 9.0, "request_times": True}
CACHE = {"num_tokens": 4096, "page_size": 16, "scheduler": "prefill_first", "max_batch_tokens": 4096}


@pytest.mark.parametrize(
    ("name", "torch_mode", "graphs"),
    [
        ("eager", None, None),
        ("default", "default", None),
        ("reduce_overhead", "reduce-overhead", "torch"),
        ("max_autotune", "max-autotune", "torch"),
        ("max_autotune_no_cudagraphs", "max-autotune-no-cudagraphs", None),
        ("cuda_graph", None, "engine"),
        ("compiled_cuda_graph", "default", "engine"),
    ],
)
def test_what_a_compile_mode_compiles_and_who_records_its_graphs(name, torch_mode, graphs):
    assert COMPILE_MODES[name] == CompileMode(torch_mode, graphs)
    assert torch_mode is None or torch_mode == "default" or torch_mode in torch._inductor.list_mode_options()


def test_a_driver_has_a_module_modes_and_a_name_of_its_own():
    for name, kind in DRIVERS.items():
        assert kind.name == name
        assert callable(importlib.import_module(kind.module).build)
        assert set(kind.compile_modes) <= set(COMPILE_MODES)
        for device_type in ("cpu", "cuda"):
            for attention in ("cbexp", "sdpa", "flash_attention_3", "vllm"):
                assert kind.auto_mode(device_type, attention) in kind.compile_modes
    assert set(COMPILE_ARGUMENTS) == set(DRIVERS["vllm"].compile_modes)


@pytest.mark.parametrize(
    ("driver", "device_type", "attention", "expected"),
    [
        ("sync", "cpu", "cbexp", "eager"),
        ("sync", "cuda", "cbexp", "cuda_graph"),
        ("sync", "cuda", "flash_attention_2", "eager"),
        ("manager", "cuda", "flash_attention_3", "cuda_graph"),
        ("manager", "cuda", "sdpa", "eager"),
        ("manager", "cpu", "sdpa", "eager"),
        ("generate", "cuda", "sdpa", "eager"),
        ("vllm", "cuda", "vllm", "compiled_cuda_graph"),
        ("vllm", "cpu", "vllm", "default"),
    ],
)
def test_what_auto_means(driver, device_type, attention, expected):
    assert DRIVERS[driver].auto_mode(device_type, attention) == expected


def test_a_mode_that_a_driver_lacks_is_refused_with_what_has_it():
    with pytest.raises(EngineError) as caught:
        DRIVERS["generate"].check_compile_mode("default")
    assert str(caught.value) == (
        "compile.mode=default does not work with driver=generate: use auto or eager, or driver=sync."
    )


@pytest.mark.parametrize(
    ("driver", "reasons"),
    [
        ("sync", {"sampling": "which pads no prompt"}),
        ("manager", {"sampling": "which pads no prompt", "compile.recompile_limit": "where PyTorch's own"}),
        (
            "generate",
            {"cache": "which has no paged cache", "compile.recompile_limit": "which compiles nothing"},
        ),
        (
            "vllm",
            {
                "sampling": "which pads no prompt",
                "cache": "which decides itself",
                "compile.recompile_limit": "which compiles itself",
            },
        ),
    ],
)
def test_what_a_driver_does_not_read_has_no_effect(driver, reasons):
    config = ExperimentConfig(
        driver=DriverConfig(driver, **WORKER),
        cache=CacheConfig(**CACHE),
        compile=CompileConfig("auto" if driver == "generate" else "default", recompile_limit=8, **DECODE),
        sampling=SamplingConfig(pad_token_id=0),
    )
    idle = find_idle_settings(config)
    assert len(idle) == {"sync": 5, "manager": 11, "generate": 14, "vllm": 9}[driver]
    of_others = {"compile": "it is a setting of driver=sync", "driver": "it is a setting of driver=vllm"}
    reasons = of_others | reasons
    for setting in idle:
        reason = reasons.get(setting.setting) or reasons[setting.setting.split(".")[0]]
        assert setting.reason.startswith(f"driver={driver}")
        assert reason in setting.reason


@pytest.mark.parametrize(
    ("cache", "idle"),
    [
        ({"block_sharing": "on"}, ["cache.block_sharing"]),
        ({"block_sharing": "off"}, []),  # as it does anyway
        ({"max_memory_fraction": 0.5, "max_requests_per_batch": 4}, []),  # both bound its rows
        ({"max_memory_fraction": 0.5, "num_tokens": 512}, ["cache.num_tokens"]),
    ],
)
def test_what_a_driver_without_pages_reads_of_the_cache(cache, idle):
    config = ExperimentConfig(driver=DriverConfig("generate"), cache=CacheConfig(**cache))
    assert [setting.setting for setting in find_idle_settings(config)] == idle
