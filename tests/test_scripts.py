"""scripts/setup and scripts/run, with a stand-in for Python and pip that only writes down what it is asked."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# As Python it makes a .venv that holds itself; as pip it logs its arguments, and stops halfway where a file says so.
STAND_IN = f"""#!/usr/bin/env bash
here=$(dirname "$0"); log=@ROOT@/pip.log
case "$*" in
  "-m venv --clear "*)
    rm -rf "$4"; mkdir -p "$4/bin" "$4/lib/python3/site-packages/pip.dist-info"
    touch "$4/lib/python3/site-packages/pip.dist-info/RECORD"; cp "$0" "$4/bin/python"; echo venv >> "$log" ;;
  "-m pip --version") ;;
  "-m pip install"*)
    echo "pip ${{*:3}}" >> "$log"
    while [ -e @ROOT@/hold_pip ]; do sleep 0.05; done
    if [ -e @ROOT@/kill_pip ]; then mkdir "$here/../lib/python3/site-packages/torn.dist-info"; kill -9 $$; fi
    if [ -e @ROOT@/fail_pip ]; then echo "no such release" >&2; exit 1; fi ;;
  "-P -c import cbexp") [ ! -e @ROOT@/unimportable ] ;;
  "-P -m cbexp"*) pwd; printf '%s\\n' "${{@:4}}"; exit 7 ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
NUM_PIP_CALLS = 2


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the scripts alone, in a folder whose name has a space."""
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    write_stand_in(root)
    return root


def write_stand_in(root):
    stand_in = root.parent / "python3"
    stand_in.write_text(STAND_IN.replace("@ROOT@", f"'{root}'"))
    stand_in.chmod(0o755)


def start(checkout, script="setup", *args, cwd="/", python=None):
    return subprocess.Popen(
        [checkout / "scripts" / script, *args],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "CBEXP_PYTHON": str(python or checkout.parent / "python3")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(checkout, script="setup", *args, **options):
    process = start(checkout, script, *args, **options)
    stdout, stderr = process.communicate(timeout=600)
    return process.returncode, stdout, stderr


def read_log(checkout):
    """What was asked since the last time."""
    log = checkout / "pip.log"
    calls = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return calls


def test_setup_installs_the_pinned_set_once_and_again_when_something_has_changed(checkout):
    code, stdout, stderr = run(checkout)
    assert (code, stdout) == (0, "")
    assert "making" in stderr
    assert "installing the pinned packages" in stderr
    venv, build_tools, everything = read_log(checkout)
    assert venv == "venv"
    assert "hatchling" in build_tools
    assert f"-e {checkout}[dev]" in everything
    assert all(f"-c {checkout}/scripts/constraints.txt" in call for call in (build_tools, everything))

    assert run(checkout) == (0, "", "")
    assert read_log(checkout) == []

    for requirement in ("pyproject.toml", "scripts/constraints.txt"):
        with (checkout / requirement).open("a") as file:
            file.write("# changed\n")
        run(checkout)
        assert len(read_log(checkout)) == NUM_PIP_CALLS

    moved = checkout.rename(checkout.with_name("moved"))
    write_stand_in(moved)
    run(moved)
    assert read_log(moved)[0] == "venv"


def test_a_broken_environment_is_mended(checkout):
    (checkout / "fail_pip").touch()
    code, _, stderr = run(checkout)
    assert code == 1
    assert "no such release" in stderr
    assert "ready" not in stderr
    (checkout / "fail_pip").unlink()
    read_log(checkout)
    assert run(checkout)[0] == 0
    assert len(read_log(checkout)) == NUM_PIP_CALLS

    (checkout / "unimportable").touch()
    run(checkout)
    assert len(read_log(checkout)) == NUM_PIP_CALLS

    (checkout / "kill_pip").touch()
    assert run(checkout)[0] != 0
    read_log(checkout)
    (checkout / "kill_pip").unlink()
    (checkout / "unimportable").unlink()
    assert run(checkout)[0] == 0
    assert read_log(checkout)[0] == "venv"


def test_concurrent_setups_install_once(checkout):
    (checkout / "hold_pip").touch()
    first = start(checkout)
    while "installing" not in first.stderr.readline():
        assert first.poll() is None
    others = [start(checkout) for _ in range(2)]
    assert all("waiting for another setup" in process.stderr.readline() for process in others)
    (checkout / "hold_pip").unlink()
    for process in (first, *others):
        process.communicate(timeout=600)
        assert process.returncode == 0
    assert len(read_log(checkout)) == 1 + NUM_PIP_CALLS


def test_without_a_suitable_python_the_error_says_what_to_do(checkout, tmp_path):
    too_old = tmp_path / "python3.9"
    too_old.write_text("#!/bin/sh\nexit 1\n")
    too_old.chmod(0o755)
    code, _, stderr = run(checkout, python=too_old)
    assert code == 1
    assert f"needs Python 3.11 or newer with the modules venv and ensurepip; looked for: {too_old}" in stderr
    assert "CBEXP_PYTHON=" in stderr
    assert not (checkout / ".venv").exists()


def test_run_passes_arguments_folder_and_exit_code(checkout, tmp_path):
    code, stdout, _ = run(checkout, "run", "name=two words", "-m", "seed=1,2", cwd=tmp_path)
    assert code == 7
    assert stdout.splitlines() == [str(tmp_path), "name=two words", "-m", "seed=1,2"]
