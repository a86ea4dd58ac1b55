"""Each rule about who may import what, and about warnings, bites: a violation is reported, the code as it is passes."""

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
    ("Only the command line and the schema know Hydra", "cbexp/experiment.py", "import omegaconf"),
    ("Only tracking talks to Weights & Biases", "cbexp/artifacts.py", "import wandb"),
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
    verdicts = [line.rsplit(" ", 1) for line in report.splitlines() if line.endswith((" KEPT", " BROKEN"))]
    assert verdicts, report
    return {name: verdict == "KEPT" for name, verdict in verdicts}


def test_the_code_keeps_every_contract():
    verdicts = check_contracts(ROOT)
    assert all(verdicts.values()), verdicts
    assert set(verdicts) == {name for name, _, _ in VIOLATIONS}, "a contract without a violation below"


@pytest.mark.parametrize(("contract", "module", "statement"), VIOLATIONS)
def test_a_violation_breaks_its_contract_alone(tmp_path, contract, module, statement):
    copy_tree_without_bodies(tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"{statement}\n")
    assert [name for name, kept in check_contracts(tmp_path).items() if not kept] == [contract]


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("engine.driver", "errors"),
        ("engine.driver", "metrics"),
        ("metrics.rounds", "engine.types"),
        ("errors", "checks"),
        ("peers.manager", "config"),
        ("factory", "experiment"),
        ("experiment", "cli"),
    ],
)
def test_an_import_that_points_up_is_named(tmp_path, importer, imported):
    copy_tree_without_bodies(tmp_path)
    """Nor has a module no place."""
    module = tmp_path / "cbexp" / f"{importer.replace('.', '/')}.py"
    module.write_text(f"import cbexp.{imported}\n")
    (tmp_path / "cbexp/newcomer.py").touch()
    report = run_lint_imports(tmp_path)
    assert f"cbexp.{importer} -> cbexp.{imported} (l.1)" in report
    assert "- cbexp.newcomer" in report


def lint(statement, module):
    options = ["--no-cache", "--select=TID", "--output-format=concise", f"--stdin-filename={module}", "-"]
    result = subprocess.run(
        [BIN / "ruff", "check", *options], input=f"{statement}\n", cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode in (0, 1), result.stderr
    return result.stdout


@pytest.mark.parametrize("statement", BATCHING_INTERNALS)
@pytest.mark.parametrize("module", ["cbexp/engine/driver.py", "cbexp/peers/manager.py"])
def test_batching_internals_have_one_importer(statement, module):
    assert "TID251" in lint(statement, module)
    assert "TID251" not in lint(statement, "cbexp/engine/cb_internals.py")


def test_the_public_batching_config_is_free_for_all_and_relative_imports_for_none():
    assert "TID" not in lint("from transformers import ContinuousBatchingConfig", "cbexp/config/model.py")
    assert "TID252" in lint("from . import errors", "cbexp/config/model.py")


@pytest.mark.parametrize(
    "module", ["cbexp", "cbexp.engine.driver", "tests.test_boundaries", "tests.peers.conftest"]
)
@pytest.mark.parametrize("category", [DeprecationWarning, ResourceWarning, UserWarning])
def test_our_own_warnings_are_errors(module, category):
    with pytest.raises(category):
        warnings.warn_explicit("ours", category, "file.py", 1, module=module)
    with pytest.raises(category):
        warnings.warn("of this module", category, stacklevel=1)


@pytest.mark.filterwarnings("ignore:a third party's")
@pytest.mark.parametrize("module", ["torch._inductor", "cbexp_like", "mytests"])
def test_third_parties_warnings_are_none(module):
    warnings.warn_explicit("a third party's", UserWarning, "file.py", 1, module=module)
