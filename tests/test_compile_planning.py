"""Compile modes and cache folders of compiled code: resolved, refused, or warned about; and the roofline's inputs."""

from __future__ import annotations

import dataclasses
import errno
import os

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import cpp_builder
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

from cbexp.config import CompileConfig
from cbexp.drivers import manager, sync
from cbexp.drivers.registry import DRIVERS
from cbexp.engine import EngineError, SyncCBDriver
from cbexp.engine.types import COMPILE_MODES, CBSyncConfig
from cbexp.errors import ConfigError, NotApplicableError
from cbexp.experiment import run_experiment
from cbexp.factory import build_driver
from cbexp.model.attention_choice import AttentionChoice
from cbexp.planning.compile_cache import (
    FOLDERS,
    compile_environment,
    describe_compile_cache,
    uses_compile_cache,
)
from cbexp.planning.compile_choice import choose_compile_mode
from cbexp.planning.plan import build_plan
from cbexp.planning.plan_warnings import find_idle_self_check
from cbexp.planning.roofline import measure_roofline
from tests.test_factory import experiment, load

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DECODE = {"fusion": "projections", "buckets": [4, 32], "max_burst": 9, "self_check": False}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)


def compiled(attention="auto", **settings):
    return experiment(num_prompts=20, attention=attention, compile=settings)


# Modes


@pytest.mark.parametrize("mode", COMPILE_MODES)
def test_the_synchronous_driver_runs_every_mode_on_a_gpu_and_without_graphs_on_a_cpu(mode):
    config, attention = compiled(mode=mode), AttentionChoice("cbexp")
    assert choose_compile_mode(config, attention, CUDA) == mode
    if COMPILE_MODES[mode].graphs is None:
        assert choose_compile_mode(config, attention, CPU) == mode
    else:
        with pytest.raises(NotApplicableError, match=rf"compile\.mode='{mode}' needs a CUDA device"):
            choose_compile_mode(config, attention, CPU)


def test_what_auto_has_become_what_a_driver_lacks_and_what_needs_a_gpu():
    assert build_plan(experiment(driver="manager")).compile_mode == "eager"
    assert build_plan(experiment(driver="manager", compile_mode="default")).compile_mode == "default"
    with pytest.raises(ConfigError, match=r"^compile.mode=default does not work with driver=generate"):
        build_plan(experiment(driver="generate", compile_mode="default"))
    # Whether the driver has the mode or not.
    with pytest.raises(NotApplicableError, match=r"compile\.mode='max_autotune' needs a CUDA device"):
        build_plan(experiment(driver="generate", compile_mode="max_autotune"))
    with pytest.raises(NotApplicableError, match=r"compile.fusion='layers' needs a CUDA device"):
        build_plan(compiled(fusion="layers"))


def test_a_cpu_without_compiler_is_told_before_anything_is_loaded():
    cpp_builder.cpp_compiler_search.cache_clear()
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(NotApplicableError, match=r"compiles C\+\+ .* CXX, or use 'eager'"):
            build_plan(compiled(mode="default"))
        assert build_plan(compiled(mode="eager")).compile_mode == "eager"
        assert build_plan(experiment(driver="vllm", compile_mode="default")).compile_mode == "default"
    cpp_builder.cpp_compiler_search.cache_clear()


# Decoding


def test_how_the_engine_decodes_is_in_the_plan_and_reaches_the_driver_where_it_has_an_effect(monkeypatch):
    seen = []
    monkeypatch.setattr(sync, "SyncCBDriver", lambda model, config, **_: seen.append(config))
    for config in (compiled(mode="default", **DECODE), compiled("sdpa", max_burst=9), compiled()):
        build_driver(*load(config), (3,), 0)
    own, foreign, default = seen
    assert {key: getattr(own, key) for key in DECODE} == DECODE
    assert (own.compile_mode, own.attn_implementation, own.batch_shape) == ("default", "cbexp", "buckets")
    assert (own.max_new_tokens, own.max_requests_per_batch, own.eos_token_id) == (8, 20, (3,))
    assert (foreign.attn_implementation, foreign.compile_mode, foreign.max_burst) == ("sdpa", "eager", 128)
    assert [config.recompile_limit for config in seen] == [256, None, None]
    assert default.num_blocks == 20
    written = build_plan(compiled(**DECODE)).to_dict()
    assert {key: written[key] for key in DECODE} == DECODE
    for config in (experiment(driver="manager"), experiment(driver="generate"), compiled("sdpa")):
        assert not DECODE.keys() & build_plan(config).to_dict().keys()


def test_the_manager_gets_the_longest_request(monkeypatch):
    seen = []
    monkeypatch.setattr(manager, "ManagerDriver", lambda model, config, **options: seen.append(options))
    plan, loaded, prompts = load(experiment(driver="manager"))
    build_driver(plan, loaded, prompts, (), 0)
    assert seen == [{"max_request_tokens": max(map(len, prompts.prompt_ids)) + 8}]


def test_buckets_bound_the_batch_and_idle_ones_are_named():
    assert build_plan(compiled(buckets=[1, 8])).max_requests_per_batch == 8
    assert build_plan(compiled(buckets=[1, 8], batch_shape="natural")).max_requests_per_batch == 20
    assert build_plan(compiled("sdpa", buckets=[1, 8])).max_requests_per_batch == 20
    assert build_plan(compiled(buckets=[8, 16, 32])).warnings == []
    batches = "and batches of at most 20 requests."
    for shape, buckets, idle in (("buckets", [8, 32, 64, 128], "64, 128"), ("full", [8, 32, 64], "8, 64")):
        (warning,) = build_plan(compiled(buckets=buckets, batch_shape=shape)).warnings
        assert warning == f"compile.buckets: {idle} have no effect with compile.batch_shape={shape} {batches}"


def test_a_self_check_that_has_nothing_to_check():
    def is_idle(mode, fusion, device, dtype=torch.bfloat16, is_on=False):
        settings = CBSyncConfig(compile_mode=mode, fusion=fusion, self_check=is_on)
        return find_idle_self_check(settings, device, dtype) != []

    assert is_idle("eager", "auto", CPU)
    assert is_idle("eager", "none", CUDA)
    assert is_idle("eager", "auto", CUDA, torch.float32)
    assert not is_idle("eager", "auto", CUDA)
    assert not is_idle("eager", "projections", CPU)
    assert not is_idle("cuda_graph", "none", CUDA)
    assert not is_idle("eager", "auto", CPU, is_on=True)
    (idle,) = build_plan(compiled(self_check=False)).idle
    assert str(idle).endswith("with compile.mode=eager and nothing fused: nothing is checked.")


# The compile cache


def test_cache_folders_and_recompile_limit_hold_for_the_body_of_a_mode_that_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    before = torch._dynamo.config.recompile_limit
    for mode, limit in (("default", before + 1), ("eager", before)):
        with compile_environment(CompileConfig(cache_dir="~/compiled", recompile_limit=before + 1), mode):
            folders = [str(tmp_path / "compiled" / part) for part in ("inductor", "triton")]
            assert [os.environ[name] for name in FOLDERS] == folders
            assert describe_compile_cache()["num_bytes"] == 0
            assert torch._dynamo.config.recompile_limit == limit
        assert not any(name in os.environ for name in FOLDERS)
        assert torch._dynamo.config.recompile_limit == before


def test_the_users_own_folder_goes_before_and_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/own")
    with compile_environment(CompileConfig(cache_dir=str(tmp_path)), "default"):
        assert [os.environ[name] for name in FOLDERS] == ["/own", str(tmp_path / "triton")]
    assert [os.environ.get(name) for name in FOLDERS] == ["/own", None]
    warnings = build_plan(compiled(mode="default", cache_dir="ours")).warnings
    assert warnings == ["compile.cache_dir=ours gives way to TORCHINDUCTOR_CACHE_DIR of the environment."]
    assert build_plan(compiled(mode="default")).warnings == []


def test_a_folder_that_pytorch_itself_has_named_is_not_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", triton_cache_dir(0))  # names the other one too
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == cache_dir()
    with compile_environment(CompileConfig(cache_dir=str(tmp_path)), "default"):
        assert [os.environ[name] for name in FOLDERS] == [f"{tmp_path}/inductor", f"{tmp_path}/triton"]
    assert build_plan(compiled(mode="default", cache_dir="ours")).warnings == []


def test_without_a_folder_pytorch_chooses_and_its_choice_is_not_kept():
    with compile_environment(CompileConfig(cache_dir=None), "default"):
        assert not any(name in os.environ for name in FOLDERS)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/somewhere"  # as PyTorch does
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_size_counts_every_file_once(tmp_path, monkeypatch):
    folders = [str(tmp_path), str(tmp_path / "triton")]
    for name, folder in zip(FOLDERS, folders, strict=True):
        monkeypatch.setenv(name, folder)
    (tmp_path / "triton" / "deep").mkdir(parents=True)
    (tmp_path / "triton" / "deep" / "kernel").write_bytes(b"x" * 100)
    (tmp_path / "code").write_bytes(b"x" * 10)
    assert describe_compile_cache() == {"folders": folders, "num_bytes": 110}


def test_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    config = CompileConfig(cache_dir=str(tmp_path / "file" / "inside"))
    message = rf"compile\.cache_dir={config.cache_dir} cannot be written \(Not a directory"
    with pytest.raises(ConfigError, match=message), compile_environment(config, "default"):
        pass


@pytest.mark.parametrize(
    ("mode", "cause", "status"),
    [
        ("default", OSError(errno.ENOSPC, "full"), "bad_config"),  # Triton's
        ("default", RuntimeError("ld: No space left on device"), "bad_config"),
        ("default", OSError(errno.EACCES, "no"), "failed"),
        ("eager", OSError(errno.ENOSPC, "full"), "failed"),
    ],
)
def test_a_run_names_its_full_compile_cache(tmp_path, monkeypatch, mode, cause, status):
    def warmup(driver):
        raise EngineError("cannot compile") from cause

    monkeypatch.setattr(SyncCBDriver, "warmup", warmup)
    outcome = run_experiment(compiled(mode=mode, cache_dir=str(tmp_path / "small")), tmp_path / "run", [])
    assert outcome.status == status
    folder = tmp_path / "small"
    said = f"compile.cache_dir={folder}: no space is left for compiled code in {folder}/inductor and "
    assert (said in outcome.message) == (status == "bad_config")


def test_what_uses_the_compile_cache():
    def uses(mode, driver, device):
        return uses_compile_cache(mode, DRIVERS[driver], device)

    assert uses("default", "sync", CPU) and uses("default", "manager", CPU) and uses("eager", "sync", CUDA)
    assert not uses("eager", "sync", CPU)
    assert not uses("cuda_graph", "manager", CUDA)
    assert not uses("default", "vllm", CPU)


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
