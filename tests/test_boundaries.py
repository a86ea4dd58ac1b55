"""Each rule about who may import what bites: a violation is reported, the code as it is passes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

# The contract's name in pyproject.toml, the module that breaks it, and what it may not import.
VIOLATIONS = [
    ("Imports point down only", "config.model", "experiment"),
    ("Imports point down only", "engine.driver", "errors"),
    ("Imports point down only", "engine.driver", "metrics"),
    ("Imports point down only", "planning.dry_run", "drivers.manager"),
    ("Imports point down only", "experiment", "cli"),
    ("Rooms of the engine import downwards only", "engine.forward.plain", "engine.upstream"),
    ("Only the command line and the schema know Hydra", "experiment", "omegaconf"),
    ("Only tracking talks to Weights & Biases", "artifacts", "wandb"),
    ("The registry of drivers imports the engine alone", "drivers.registry", "errors"),
    ("The trainer imports the engine alone", "trl.trainer", "errors"),
    ("Imports point down only", "trl.trainer", "metrics"),
]
CONTRACTS = {contract for contract, _, _ in VIOLATIONS}
BATCHING_INTERNALS = """
from transformers.generation.continuous_batching import cache
from transformers.generation.continuous_batching.cache import PagedAttentionCache
import transformers.generation.continuous_batching.scheduler
from transformers import ContinuousBatchingManager
from transformers.generation import ContinuousBatchingManager
"""


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
    assert check_contracts(ROOT) == dict.fromkeys(CONTRACTS, True)


def test_each_violation_is_named_and_breaks_its_contract(tmp_path):
    copy_tree_without_bodies(tmp_path)
    assert all(check_contracts(tmp_path).values())
    for _, importer, imported in VIOLATIONS:
        name = imported if imported in ("omegaconf", "wandb") else f"cbexp.{imported}"
        with (tmp_path / "cbexp" / f"{importer.replace('.', '/')}.py").open("a") as file:
            file.write(f"import {name}\n")
    assert check_contracts(tmp_path) == dict.fromkeys(CONTRACTS, False)
    report = re.sub(r"\s+", " ", run_lint_imports(tmp_path).partition("Broken contracts")[2])
    for contract, importer, imported in VIOLATIONS:
        own = report.partition(f" {contract} ---")[2]
        assert re.search(rf"cbexp\.{importer} -> (cbexp\.)?{imported} \(l\.\d+\)", own), (importer, imported)
    (tmp_path / "cbexp/newcomer.py").touch()
    assert "- cbexp.newcomer" in run_lint_imports(tmp_path)


def lint(statements, module):
    """The rules that ruff finds broken."""
    options = ["--no-cache", "--select=TID", "--output-format=concise", f"--stdin-filename={module}"]
    result = subprocess.run(
        [BIN / "ruff", "check", *options, "-"],
        input=f"{statements.strip()}\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 1), result.stderr
    return re.findall(r"TID\d+", result.stdout)


def test_batching_internals_have_one_importer_and_relative_imports_none():
    for module in ("cbexp/engine/driver.py", "cbexp/drivers/manager.py"):
        assert lint(BATCHING_INTERNALS, module) == ["TID251"] * 5
    assert lint(BATCHING_INTERNALS, "cbexp/engine/upstream/build.py") == []
    assert lint("from transformers import ContinuousBatchingConfig", "cbexp/drivers/manager.py") == []
    assert lint("from . import errors", "cbexp/config/model.py") == ["TID252"]
