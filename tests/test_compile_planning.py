"""Compile mode, region, fusion, batch shapes and cache folders: resolved, refused, or warned about."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.exc import InductorError

from cbexp import factory
from cbexp.config import COMPILE_MODES, CompileConfig, ExperimentConfig, ModelConfig
from cbexp.engine import EngineError, SyncCBDriver
from cbexp.errors import ConfigError, NotApplicableError
from cbexp.experiment import run_experiment
from cbexp.factory import build_plan, compile_environment, describe_compile_cache, explaining_full_cache
from cbexp.model.attention_choice import AttentionChoice
from cbexp.planning import compile_choice
from cbexp.planning.compile_cache import FOLDERS, list_overriding_variables, uses_compile_cache
from cbexp.planning.compile_choice import ENGINE_MODES, choose_compile_mode, plan_decode
from cbexp.planning.plan_warnings import find_idle_self_check
from cbexp.planning.roofline import measure_roofline
from tests.test_factory import experiment, load

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
IDLE_SELF_CHECK = (
    "compile.self_check=False has no effect with compile.mode=eager and nothing fused: nothing is checked."
)
OWN, SDPA = AttentionChoice("cbexp"), AttentionChoice("sdpa")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)


def compiled(attn_implementation: str = "auto", **settings: Any) -> ExperimentConfig:
    config = experiment(num_prompts=20)
    config.compile = CompileConfig(**settings)
    config.model = ModelConfig(**{**vars(config.model), "attn_implementation": attn_implementation})
    return config


# Modes


def test_every_mode_has_its_engine_settings():
    assert set(ENGINE_MODES) == set(COMPILE_MODES) - {"auto"}
    assert ENGINE_MODES["compiled_cuda_graph"] == ("default", True)
    assert [mode for mode, (_, is_captured) in ENGINE_MODES.items() if is_captured] == [
        "cuda_graph", "compiled_cuda_graph",
    ]  # fmt: skip


@pytest.mark.parametrize("mode", [mode for mode in COMPILE_MODES if mode != "auto"])
def test_the_synchronous_driver_runs_every_mode_on_a_gpu(mode):
    assert choose_compile_mode(mode, "sync", OWN, CUDA) == mode


def test_auto_is_eager_on_a_cpu_and_the_best_on_a_gpu():
    assert choose_compile_mode("auto", "sync", OWN, CPU) == "eager"
    assert choose_compile_mode("auto", "sync", OWN, CUDA) == compile_choice.BEST_MODE_ON_CUDA
    assert choose_compile_mode("auto", "sync", SDPA, CUDA) == "eager"
    assert choose_compile_mode("auto", "manager", AttentionChoice("flash_attention_3"), CUDA) == "cuda_graph"


@pytest.mark.parametrize("mode", [mode for mode in COMPILE_MODES if mode not in ("auto", "eager")])
def test_foreign_attention_runs_eagerly_alone(mode):
    with pytest.raises(ConfigError) as caught:
        choose_compile_mode(mode, "sync", SDPA, CUDA)
    for fragment in (f"compile.mode={mode}", "model.attn_implementation=sdpa", "compile.mode=eager", "cbexp"):
        assert fragment in str(caught.value)


def test_a_cpu_without_compiler_is_told_before_anything_is_loaded():
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    message = r"compile.mode=default compiles C\+\+ .* CXX, or use compile=eager"
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(NotApplicableError, match=message):
        build_plan(compiled(mode="default"))
    cpp_builder.cpp_compiler_search.cache_clear()
    message = r"C\+\+ for the CPU, and /bin/true is no C\+\+ compiler: install g\+\+"
    with config.patch({"cpp.cxx": ("/bin/true",)}), pytest.raises(NotApplicableError, match=message):
        build_plan(compiled(mode="default"))
    cpp_builder.cpp_compiler_search.cache_clear()
    assert build_plan(compiled(mode="eager")).compile_mode == "eager"


# Decoding


def test_decode_plan_is_what_was_asked_for_and_plain_json():
    plan = build_plan(
        compiled(fusion="projections", batch_shape="full", buckets=[4, 32], max_burst=9, self_check=False)
    )
    written = plan.to_dict()
    for key, value in {
        "fusion": "projections",
        "batch_shape": "full",
        "max_burst": 9,
        "self_check": False,
    }.items():
        assert written[key] == value
    assert written["buckets"] == [4, 32]
    assert written["compile_region"] == "model"


def test_only_the_engines_own_steps_have_a_decode_plan():
    for driver in ("manager", "generate"):
        plan = build_plan(experiment(driver=driver))
        assert plan.decode is None
        assert "batch_shape" not in plan.to_dict()
    assert build_plan(compiled("sdpa")).decode is None


@pytest.mark.parametrize("fusion", ["projections", "layers"])
def test_foreign_attention_fuses_nothing(fusion):
    with pytest.raises(ConfigError, match=f"compile.fusion={fusion} .* model.attn_implementation=sdpa"):
        plan_decode(CompileConfig(fusion=fusion), "eager", SDPA, CUDA)
    assert plan_decode(CompileConfig(fusion="none"), "eager", SDPA, CUDA) is None


def test_fused_layers_need_a_gpu():
    with pytest.raises(NotApplicableError, match=r"compile.fusion=layers needs a CUDA device"):
        build_plan(compiled(fusion="layers"))
    decode = plan_decode(CompileConfig(fusion="layers"), "cuda_graph", OWN, CUDA)
    assert decode is not None
    assert decode.fusion == "layers"


def test_region_is_checked_against_what_auto_resolves_to():
    with pytest.raises(ConfigError, match=r"compile.region=layer does not work with compile.mode=eager"):
        build_plan(compiled(region="layer"))
    decode = build_plan(compiled(mode="default", region="layer")).decode
    assert decode is not None
    assert decode.compile_region == "layer"


def test_buckets_bound_the_batch_and_idle_ones_are_named():
    assert build_plan(compiled(buckets=[1, 8])).max_requests_per_batch == 8
    assert build_plan(compiled(buckets=[1, 8], batch_shape="natural")).max_requests_per_batch == 20
    assert build_plan(compiled("sdpa", buckets=[1, 8])).max_requests_per_batch == 20
    assert build_plan(compiled(buckets=[8, 16, 32])).warnings == []
    (warning,) = build_plan(compiled(buckets=[8, 32, 64, 128])).warnings
    assert warning == (
        "compile.buckets: 64, 128 have no effect with compile.batch_shape=buckets and batches of at most 20 requests."
    )
    (warning,) = build_plan(compiled(buckets=[8, 32, 64], batch_shape="full")).warnings
    assert "8, 64 have no effect with compile.batch_shape=full" in warning
    (warning,) = build_plan(compiled(buckets=[8, 32], batch_shape="natural")).warnings
    assert "compile.buckets=[8, 32] has no effect with compile.batch_shape=natural" in warning


@pytest.mark.parametrize(
    ("mode", "fusion", "device", "dtype", "is_idle"),
    [
        ("eager", "auto", CPU, torch.float32, True),
        ("eager", "auto", CPU, torch.bfloat16, True),
        ("eager", "none", CPU, torch.float32, True),
        ("eager", "projections", CPU, torch.float32, False),
        ("default", "none", CPU, torch.float32, False),
        ("eager", "auto", CUDA, torch.float32, True),
        ("eager", "auto", CUDA, torch.bfloat16, False),
        ("eager", "none", CUDA, torch.bfloat16, True),
        ("cuda_graph", "none", CUDA, torch.bfloat16, False),
    ],
)
def test_a_self_check_that_has_nothing_to_check(mode, fusion, device, dtype, is_idle):
    settings = CompileConfig(mode=mode, fusion=fusion, self_check=False)
    lines = find_idle_self_check(plan_decode(settings, mode, OWN, device), mode, device, dtype)
    assert lines == ([IDLE_SELF_CHECK] if is_idle else [])
    settings.self_check = True
    assert find_idle_self_check(plan_decode(settings, mode, OWN, device), mode, device, dtype) == []


def test_an_idle_self_check_is_among_the_warnings_of_a_run():
    assert IDLE_SELF_CHECK in build_plan(compiled(self_check=False)).warnings
    (warning,) = build_plan(compiled("sdpa", self_check=False)).warnings
    assert "compile.self_check=False has no effect with model.attn_implementation=sdpa" in warning


@pytest.mark.parametrize("mode", ["eager", "default"])
def test_the_recompile_limit_goes_to_a_driver_that_compiles(monkeypatch, mode):
    seen = []
    monkeypatch.setattr(factory, "SyncCBDriver", lambda model, generation, config: seen.append(config))
    config = compiled(mode=mode)
    factory.build_driver(config, *load(config), (), 0)
    assert seen[0].recompile_limit == (256 if mode == "default" else None)


def test_settings_reach_the_driver(monkeypatch):
    seen = []
    monkeypatch.setattr(factory, "SyncCBDriver", lambda model, generation, config: seen.append(config))
    for config in (
        compiled(
            mode="default",
            region="layer",
            fusion="projections",
            buckets=[4, 32],
            max_burst=9,
            self_check=False,
        ),
        compiled("sdpa"),
    ):
        plan, loaded, prompts = load(config)
        factory.build_driver(config, plan, loaded, prompts, (), 0)
    own, foreign = seen
    assert (own.compile_mode, own.cuda_graph, own.compile_region) == ("default", False, "layer")
    assert (own.attn_implementation, own.fusion, own.batch_shape) == ("cbexp", "projections", "buckets")
    assert (own.buckets, own.max_burst, own.self_check, own.recompile_limit) == ((4, 32), 9, False, 256)
    assert (own.max_new_tokens, own.max_requests_per_batch) == (8, 20)
    assert (foreign.attn_implementation, foreign.compile_mode, foreign.buckets) == ("sdpa", None, None)


# The compile cache


def test_cache_folders_hold_for_the_body_alone(tmp_path):
    config = CompileConfig(cache_dir=str(tmp_path / "compiled"))
    with compile_environment(config, "default", "sync"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled" / "inductor")
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "compiled" / "triton")
        assert describe_compile_cache()["num_bytes"] == 0
    assert not any(name in os.environ for name in FOLDERS)


def test_the_users_own_folder_goes_before_and_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    with compile_environment(CompileConfig(cache_dir=str(tmp_path / "ours")), "default", "sync"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "ours" / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")
    warnings = build_plan(compiled(mode="default", cache_dir="ours")).warnings
    assert warnings == ["compile.cache_dir=ours gives way to TORCHINDUCTOR_CACHE_DIR of the environment."]
    assert build_plan(compiled(mode="default")).warnings == []


def test_a_folder_that_pytorch_itself_has_named_is_not_the_users(tmp_path, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    monkeypatch.setenv("TRITON_CACHE_DIR", triton_cache_dir(0))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == cache_dir()
    assert list_overriding_variables() == []
    with compile_environment(CompileConfig(cache_dir=str(tmp_path)), "default", "sync"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_without_a_folder_pytorch_chooses_and_its_choice_is_not_kept():
    with compile_environment(CompileConfig(cache_dir=None), "default", "sync"):
        assert not any(name in os.environ for name in FOLDERS)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/somewhere"  # as PyTorch does
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_size_counts_every_file_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    (tmp_path / "triton" / "deep").mkdir(parents=True)
    (tmp_path / "triton" / "deep" / "kernel").write_bytes(b"x" * 100)
    (tmp_path / "code").write_bytes(b"x" * 10)
    assert describe_compile_cache() == {
        "folders": [str(tmp_path), str(tmp_path / "triton")],
        "num_bytes": 110,
    }


def test_home_is_where_it_is_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with compile_environment(CompileConfig(), "default", "sync"):
        assert Path(os.environ["TRITON_CACHE_DIR"]) == tmp_path / ".cache" / "cbexp" / "compile" / "triton"


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("{}/file/inside", "Not a directory"),
        ("{}/file", "File exists"),
        ("/proc/none", "(No such file|Permission)"),
    ],
)
def test_folder_that_cannot_be_written_is_refused(tmp_path, folder, reason):
    (tmp_path / "file").write_text("")
    folder = folder.format(tmp_path)
    with (
        pytest.raises(ConfigError, match=rf"compile\.cache_dir={folder} cannot be written \({reason}"),
        compile_environment(CompileConfig(cache_dir=folder), "default", "sync"),
    ):
        pass


def out_of_space(kind: str) -> Exception:
    """As it comes from a compiler: Triton's, PyTorch's, and a C++ compiler's."""
    full = OSError(errno.ENOSPC, "No space left on device")
    if kind == "plain":
        return full
    told = InductorError(full, None) if kind == "inductor" else RuntimeError("ld: No space left on device")
    error = EngineError("cannot compile")
    error.__cause__ = told
    return error


@pytest.mark.parametrize("kind", ["plain", "inductor", "compiler"])
def test_a_full_compile_cache_is_named(tmp_path, kind):
    config = CompileConfig(cache_dir=str(tmp_path / "small"))
    message = rf"compile\.cache_dir={tmp_path}/small: no space is left .* in {tmp_path}/small/inductor and "
    with (
        pytest.raises(ConfigError, match=message),
        compile_environment(config, "default", "sync"),
        explaining_full_cache(config),
    ):
        raise out_of_space(kind)


def test_other_errors_of_a_compiler_are_left_alone():
    error = EngineError("cannot compile")
    error.__cause__ = OSError(errno.EACCES, "no")
    with pytest.raises(EngineError) as caught, explaining_full_cache(CompileConfig()):
        raise error
    assert caught.value is error


def test_a_run_names_its_full_compile_cache(tmp_path, monkeypatch):
    def warmup(driver):
        raise out_of_space("plain")

    monkeypatch.setattr(SyncCBDriver, "warmup", warmup)
    config = compiled(mode="default", cache_dir=str(tmp_path / "small"))
    outcome = run_experiment(config, tmp_path / "run", [])
    assert (outcome.status, "compile.cache_dir=" in outcome.message) == ("bad_config", True)
    outcome = run_experiment(compiled(mode="eager"), tmp_path / "other", [])
    assert (outcome.status, "compile.cache_dir=" in outcome.message) == ("failed", False)


def test_recompile_limit_of_a_peer_holds_for_the_body():
    before = torch._dynamo.config.recompile_limit
    config = CompileConfig(recompile_limit=before + 1)
    with compile_environment(config, "default", "manager"):
        assert torch._dynamo.config.recompile_limit == before + 1
    assert torch._dynamo.config.recompile_limit == before


@pytest.mark.parametrize(
    ("mode", "driver", "device", "expected"),
    [
        ("eager", "sync", CPU, False),
        ("default", "sync", CPU, True),
        ("eager", "sync", CUDA, True),
        ("cuda_graph", "sync", CUDA, True),
        ("cuda_graph", "manager", CUDA, False),
        ("default", "manager", CPU, True),
    ],
)
def test_what_uses_the_compile_cache(mode, driver, device, expected):
    assert uses_compile_cache(mode, driver, device) is expected


# The roofline


def test_roofline_reads_weights_once_and_every_rows_context(monkeypatch):
    monkeypatch.setattr("cbexp.planning.roofline.measure_read_bandwidth", lambda device: 4.3e12)
    plan, loaded, _ = load(experiment())
    inputs = measure_roofline(dataclasses.replace(plan, device=CUDA), loaded.model)
    assert inputs.bandwidth_bytes_per_s == 4.3e12
    assert inputs.step_bytes(3, 100) - inputs.step_bytes(3, 50) == 3 * 50 * plan.kv_bytes_per_token
    embedding_bytes = 300 * 32 * 4
    # Not tied to the head: of the embedding, the rows' tokens alone are read.
    assert inputs.step_bytes(2, 0) == plan.weights.num_bytes - embedding_bytes + 2 * 32 * 4
