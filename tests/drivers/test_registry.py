"""What each driver can do, and which settings it therefore does not read."""

import importlib

import pytest

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
from cbexp.engine.types import COMPILE_MODES, EngineError

DECODE = {"fusion": "projections", "batch_shape": "full", "buckets": [1, 8], "max_burst": 9}
WORKER = {"python": "p", "pythonpath": "d", "start_timeout_s": 9.0, "request_times": True}
CACHE = {"num_tokens": 4096, "page_size": 16, "scheduler": "prefill_first", "max_batch_tokens": 4096}


def test_a_driver_has_a_module_modes_and_a_name_of_its_own():
    for name, kind in DRIVERS.items():
        assert kind.name == name
        assert callable(importlib.import_module(kind.module).build)
        assert set(kind.compile_modes) <= set(COMPILE_MODES)
        for device_type in ("cpu", "cuda"):
            for attention in ("cbexp", "sdpa", "flash_attention_3", "vllm"):
                assert kind.auto_mode(device_type, attention) in kind.compile_modes
    assert set(COMPILE_ARGUMENTS) == set(DRIVERS["vllm"].compile_modes)


def test_what_a_compile_mode_compiles_and_who_records_its_graphs():
    assert {name: (mode.torch_mode, mode.graphs) for name, mode in COMPILE_MODES.items()} == {
        "eager": (None, None),
        "default": ("default", None),
        "reduce_overhead": ("reduce-overhead", "torch"),
        "max_autotune": ("max-autotune", "torch"),
        "max_autotune_no_cudagraphs": ("max-autotune-no-cudagraphs", None),
        "cuda_graph": (None, "engine"),
        "compiled_cuda_graph": ("default", "engine"),
    }


def test_a_mode_that_a_driver_lacks_is_refused_with_what_has_it():
    with pytest.raises(EngineError, match="use auto or eager, or driver=sync"):
        DRIVERS["generate"].check_compile_mode("default")


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


@pytest.mark.parametrize(
    ("driver", "count", "mode", "reasons"),
    [
        ("sync", 5, "default", ("which pads no prompt",)),
        ("manager", 11, "default", ("which pads no prompt", "where PyTorch's own limit")),
        ("generate", 14, "auto", ("which has no paged cache", "which compiles nothing")),
        ("vllm", 9, "default", ("which pads no prompt", "which decides itself", "which compiles itself")),
    ],
)
def test_what_a_driver_does_not_read_has_no_effect(driver, count, mode, reasons):
    config = ExperimentConfig(
        driver=DriverConfig(driver, **WORKER),
        cache=CacheConfig(**CACHE),
        compile=CompileConfig(mode, recompile_limit=8, self_check=False, **DECODE),
        sampling=SamplingConfig(pad_token_id=0),
    )
    idle = find_idle_settings(config)
    assert len(idle) == count
    told = {"compile": "it is a setting of driver=sync", "driver": "it is a setting of driver=vllm"}
    for setting in idle:
        assert setting.reason.startswith(f"driver={driver}")
        group = told.get(setting.setting.split(".")[0])
        assert (group and group in setting.reason) or any(reason in setting.reason for reason in reasons)
    assert all(any(reason in setting.reason for setting in idle) for reason in reasons)


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
