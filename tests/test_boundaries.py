"""Each rule about who may import what, and about warnings, bites: a violation is reported, the code as it is passes."""

import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

# One violation a contract: the contract's name in pyproject.toml, the module that breaks it, the import that does.
VIOLATIONS = [
    ("Imports point down only", "cbexp/config/model.py", "import cbexp.experiment"),
    (
        "Rooms of the engine import downwards only",
        "cbexp/engine/forward/plain.py",
        "import cbexp.engine.upstream",
    ),
    ("Only the command line and the schema know Hydra", "cbexp/experiment.py", "import omegaconf"),
    ("Only tracking talks to Weights & Biases", "cbexp/artifacts.py", "import wandb"),
    (
        "The registry of drivers imports the engine alone",
        "cbexp/drivers/registry.py",
        "import cbexp.errors",
    ),
]
BATCHING_INTERNALS = [
    "from transformers.generation.continuous_batching import cache",
    "from transformers.generation.continuous_batching.cache import PagedAttentionCache",
    "import transformers.generation.continuous_batching.scheduler",
    "from transformers import ContinuousBatchingManager",
    "from transformers.generation import ContinuousBatchingManager",
]


def copy_tree_without_bodies(target):
    """Copy the package's modules as empty files, but for the imports that the contracts name."""
    for module in (ROOT / "cbexp").rglob("*.py"):
        copy = target / module.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (target / "cbexp/config/model.py").write_text("import hydra, omegaconf\n")
    (target / "cbexp/tracking/__init__.py").write_text("import wandb\n")
    for module in ("config/engine.py", "model/architecture.py", "planning/plan.py"):
        with (target / "cbexp" / module).open("a") as file:
            file.write("import cbexp.drivers.registry\n")
    shutil.copy(ROOT / "pyproject.toml", target)


def run_lint_imports(tree):
    result = subprocess.run(
        [BIN / "lint-imports", "--no-logo", "--no-cache"],
        cwd=tree,
        env={"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    return result.stdout + result.stderr


def check_contracts(tree):
    """Return {contract name: kept} as lint-imports says it of the package in `tree`."""
    report = run_lint_imports(tree)
    verdicts = re.findall(r"^(.+) (KEPT|BROKEN)\b", report, re.MULTILINE)
    assert verdicts, report
    return {name: verdict == "KEPT" for name, verdict in verdicts}


def test_the_code_keeps_every_contract():
    verdicts = check_contracts(ROOT)
    assert all(verdicts.values()), verdicts
    assert set(verdicts) == {name for name, _, _ in VIOLATIONS}, "a contract without a violation below"


def test_modules_without_imports_keep_every_contract(tmp_path):
    copy_tree_without_bodies(tmp_path)
    assert all(check_contracts(tmp_path).values())


@pytest.mark.parametrize(("contract", "module", "statement"), VIOLATIONS)
def test_a_violation_breaks_its_contract_alone(tmp_path, contract, module, statement):
    copy_tree_without_bodies(tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"{statement}\n")
    assert [name for name, kept in check_contracts(tmp_path).items() if not kept] == [contract]


def test_imports_that_point_up_are_named(tmp_path):
    copy_tree_without_bodies(tmp_path)
    imports = {
        "engine.driver": ("errors", "metrics"),
        "metrics.rounds": ("artifacts",),
        "errors": ("checks",),
        "planning.dry_run": ("drivers.manager",),
        "config.workload": ("drivers.inputs",),
        "factory": ("experiment",),
        "experiment": ("cli",),
    }
    for importer, imported in imports.items():
        module = tmp_path / "cbexp" / f"{importer.replace('.', '/')}.py"
        module.write_text("".join(f"import cbexp.{name}\n" for name in imported))
    report = run_lint_imports(tmp_path)
    for importer, imported in imports.items():
        for line, name in enumerate(imported, start=1):
            assert f"cbexp.{importer} -> cbexp.{name} (l.{line})" in report


def test_a_module_without_a_place_is_named(tmp_path):
    copy_tree_without_bodies(tmp_path)
    (tmp_path / "cbexp/newcomer.py").touch()
    assert "- cbexp.newcomer" in run_lint_imports(tmp_path)


def lint(statement, module):
    result = subprocess.run(
        [
            BIN / "ruff",
            "check",
            "--no-cache",
            "--select=TID",
            "--output-format=concise",
            f"--stdin-filename={module}",
            "-",
        ],
        input=f"{statement}\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 1), result.stderr
    return result.stdout


@pytest.mark.parametrize("statement", BATCHING_INTERNALS)
@pytest.mark.parametrize("module", ["cbexp/engine/driver.py", "cbexp/drivers/manager.py"])
def test_batching_internals_have_one_importer(statement, module):
    assert "TID251" in lint(statement, module)
    assert "TID251" not in lint(statement, "cbexp/engine/upstream/build.py")


def test_the_public_batching_config_is_free_for_all():
    assert "TID" not in lint("from transformers import ContinuousBatchingConfig", "cbexp/drivers/manager.py")


def test_relative_imports_are_reported():
    assert "TID252" in lint("from . import errors", "cbexp/config/model.py")


@pytest.mark.parametrize(
    "module", ["cbexp", "cbexp.engine.driver", "tests.test_boundaries", "tests.drivers.conftest"]
)
@pytest.mark.parametrize("category", [DeprecationWarning, ResourceWarning, UserWarning])
def test_our_own_warnings_are_errors(module, category):
    with pytest.raises(category):
        warnings.warn_explicit("ours", category, "file.py", 1, module=module)


def test_this_module_warns_under_a_name_that_the_filter_knows():
    with pytest.raises(UserWarning):
        warnings.warn("ours", stacklevel=1)


@pytest.mark.filterwarnings("ignore:a third party's")
@pytest.mark.parametrize("module", ["torch._inductor", "cbexp_like", "mytests"])
def test_third_parties_warnings_are_none(module):
    warnings.warn_explicit("a third party's", UserWarning, "file.py", 1, module=module)
