"""FlashAttention by name: each version is planned where its package is, and refused by that name where it is not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import import_utils

from cbexp.config import ExperimentConfig
from cbexp.errors import ConfigError, ModelError
from cbexp.planning.dry_run import summarize_dry_run
from cbexp.planning.plan import build_plan
from tests.model_fixtures import GPT_OSS
from tests.test_factory import QWEN3
from tests.test_factory import experiment as any_experiment

# Distribution and the module that it brings: two versions share one.
PACKAGES = {
    "flash_attention_2": ("flash-attn", "flash_attn"),
    "flash_attention_3": ("flash-attn-3", "flash_attn_interface"),
    "flash_attention_4": ("flash-attn-4", "flash_attn"),
}

Install = Callable[[Collection[str]], None]


def forget_what_is_installed() -> None:
    """Transformers asks once a process."""
    for version in (2, 3, 4):
        getattr(import_utils, f"is_flash_attn_{version}_available").cache_clear()
    import_utils.is_torch_cuda_available.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Makes the packages of the named versions all that transformers finds, on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**34, 2**35))
    monkeypatch.syspath_prepend(tmp_path)

    def put(names: Collection[str]) -> None:
        distributions: dict[str, list[str]] = {}
        for distribution, module in (PACKAGES[name] for name in names):
            distributions.setdefault(module, []).append(distribution)
            (tmp_path / module).mkdir(exist_ok=True)
            (tmp_path / module / "__init__.py").touch()
            records = tmp_path / f"{distribution.replace('-', '_')}-2.8.3.dist-info"
            records.mkdir()
            (records / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.8.3\n"
            )
        monkeypatch.setattr(import_utils, "_package_distribution_mapping", lambda: distributions)
        forget_what_is_installed()

    yield put
    monkeypatch.undo()
    forget_what_is_installed()


def experiment(name: str, architecture: dict[str, Any] = QWEN3, driver: str = "sync") -> ExperimentConfig:
    return any_experiment(architecture, driver, device="cuda", attention=name)


@pytest.mark.parametrize("driver", ["sync", "manager", "generate"])
@pytest.mark.parametrize("name", PACKAGES)
def test_a_version_is_planned_where_its_package_is(install, name, driver):
    install([name])
    config = experiment(name, driver=driver)
    plan, report = build_plan(config), summarize_dry_run(config)
    assert (str(plan.device), plan.dtype) == ("cuda:0", torch.bfloat16)
    assert plan.to_dict()["attn_implementation"] == report.attn_implementation == name


@pytest.mark.parametrize("name", PACKAGES)
def test_a_version_is_refused_where_the_other_versions_are_and_in_float32(install, name):
    install(PACKAGES.keys() - {name})
    config = experiment(name)
    with pytest.raises(ModelError) as caught:
        build_plan(config)
    package = f"needs the package {PACKAGES[name][0]}, which is not installed"
    assert str(caught.value) == f"model.attn_implementation={name} {package}. Use sdpa or auto."
    config.model.dtype = "float32"
    with pytest.raises(ConfigError, match=f"{name} runs in bfloat16 or float16 only"):
        build_plan(config)


def test_another_name_is_answered_with_all_versions_and_a_model_may_have_one_alone(install):
    install(PACKAGES)
    with pytest.raises(ConfigError, match="flash_attention_5") as caught:
        build_plan(experiment("flash_attention_5"))
    assert all(name in str(caught.value) for name in PACKAGES)
    assert (
        build_plan(experiment("flash_attention_4", GPT_OSS)).attention.implementation == "flash_attention_4"
    )
    with pytest.raises(ModelError, match=r"GptOssForCausalLM does not work with it. Use .*flash_attention_4"):
        build_plan(experiment("flash_attention_3", GPT_OSS))
