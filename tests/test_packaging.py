"""The package as a user gets it: declared and pinned dependencies, and a wheel that works from another folder."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cbexp"
CONSTRAINTS = ROOT / "scripts/constraints.txt"

# Needed though nothing in cbexp imports them: transformers' chat templates; transformers' loading onto a device.
USED_BY_OTHERS = {"jinja2", "accelerate"}
# Comes with torch's builds for GPUs, and is imported nowhere else.
BROUGHT_BY_TORCH = {"triton"}
# Imported by cbexp.trl alone, which comes with an extra.
OF_AN_EXTRA = {"trl"}
# Imported by the worker of driver=vllm alone, which another interpreter runs.
OF_ANOTHER_INTERPRETER = {"vllm"}


def read_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(map(Requirement, project["dependencies"]))


def read_pins():
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def list_third_party_packages(folder):
    """Return the top names of what modules under `folder` import, without the standard library and ourselves."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"cbexp"}


def list_requirements(distribution, extras=()):
    """Return the requirements of an installed distribution that apply here."""
    requirements = map(Requirement, importlib.metadata.requires(distribution) or [])
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments)
    ]


def test_every_import_is_a_declared_dependency_and_nothing_idle_is_declared():
    declared = {canonicalize_name(requirement.name) for requirement in read_dependencies()}
    distributions = importlib.metadata.packages_distributions()
    imported = {
        canonicalize_name(distributions[package][0])
        for package in list_third_party_packages(PACKAGE) - OF_ANOTHER_INTERPRETER
    }
    assert (imported - BROUGHT_BY_TORCH - OF_AN_EXTRA) | USED_BY_OTHERS == declared


def test_the_engine_needs_few_packages():
    # numpy comes with transformers.
    assert list_third_party_packages(PACKAGE / "engine") <= {
        "numpy",
        "psutil",
        "torch",
        "transformers",
        "triton",
    }


def test_the_pinned_set_is_complete_and_within_the_ranges():
    """Walks from cbexp[dev] to everything that it needs.

    What a requirement itself pins (torch does so with the CUDA libraries of its build) needs no line, and neither does
    what only such a package asks for.
    """
    pins, seen = read_pins(), set()
    queue = list_requirements("cbexp", extras=("dev",))
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name not in {*pins, "cbexp"}:  # cbexp: another extra of ours
            assert re.fullmatch(r"==[^*]+", str(requirement.specifier)), f"{requirement} is not pinned"
            continue
        assert name == "cbexp" or pins[name] in requirement.specifier, f"{requirement}, pinned {pins[name]}"
        if (name, *requirement.extras) not in seen:
            seen.add((name, *requirement.extras))
            queue += list_requirements(name, extras=requirement.extras)
    build_tools = {"editables", "setuptools"}
    assert set(pins) - {name for name, *_ in seen} <= build_tools


def run_python(*arguments, folder, **environment):
    """What this Python prints in `folder`, without the coverage of the tests: the modules are not the checkout's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(source, target):
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    run_python("-m", "pip", "wheel", *options, target, source, folder=target)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def list_files(folder, prefix):
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {f"{prefix}/{path.relative_to(folder).as_posix()}" for path in paths}


@pytest.mark.slow
def test_the_wheel_carries_the_package_its_choices_and_its_model_also_by_the_source_archive(wheel, tmp_path):
    names = zipfile.ZipFile(wheel).namelist()
    expected = list_files(PACKAGE, "cbexp") | list_files(ROOT / "conf", "cbexp/conf")
    assert {name for name in names if name.startswith("cbexp/")} == expected
    assert {"cbexp/conf/config.yaml", "cbexp/py.typed", "cbexp/assets/tiny/model.safetensors"} <= expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names} == {"cbexp", "cbexp-0.1.0.dist-info"}
    run_python("-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, folder=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert zipfile.ZipFile(build(archive, tmp_path)).namelist() == names


@pytest.mark.slow
def test_the_installed_wheel_is_what_runs_and_takes_a_users_own_choices(wheel, tmp_path):
    installed, folder = tmp_path / "installed", tmp_path / "launch"
    folder.mkdir()
    options = ("--quiet", "--no-deps", "--target", installed)
    run_python("-m", "pip", "install", *options, wheel, folder=folder)

    def run_installed(*arguments):
        return run_python(*arguments, folder=folder, PYTHONPATH=str(installed))

    found = run_installed("-c", "import cbexp; print(cbexp.__file__)")
    assert found.strip() == str(installed / "cbexp/__init__.py")
    assert "weights" in run_installed(installed / "bin/cbexp", "dry_run=true").lower()
    (folder / "mine/sampling").mkdir(parents=True)
    (folder / "mine/sampling/short.yaml").write_text("defaults: [greedy]\nmax_new_tokens: 3\n")
    composed = run_installed("-m", "cbexp", "--config-dir", "mine", "sampling=short", "--cfg", "job")
    assert "max_new_tokens: 3" in composed
    run_installed("-m", "cbexp", "experiment=smoke", "tracking=disabled", "stats_path=stats.json")
    assert json.loads((folder / "stats.json").read_text())["n_decoded_tokens"] > 0
