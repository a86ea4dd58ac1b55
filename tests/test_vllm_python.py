"""What names vLLM's interpreter and packages is checked before anything runs, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cbexp.cli.command_line import conf_dir
from cbexp.cli.composer import parse_arguments, register_job_folder
from cbexp.cli.preflight import check_command
from cbexp.config import DriverConfig, register_schema
from cbexp.errors import ConfigError
from cbexp.planning.vllm_python import check_interpreter, find_python


def check(*arguments):
    register_schema()
    register_job_folder()
    return check_command(parse_arguments(list(arguments)), conf_dir())


def test_a_command_line_without_its_interpreter_is_refused():
    with pytest.raises(ConfigError, match=r"^driver.python=/nowhere/python is no program: give the path"):
        check("experiment=smoke", "driver=vllm", "driver.python=/nowhere/python")


def test_a_sweep_is_refused_for_the_cell_that_lacks_its_packages(tmp_path):
    with pytest.raises(
        ConfigError, match=r"job 1 of 2 .*driver.pythonpath=/nowhere: there is no /nowhere\.$"
    ):
        check("-m", "experiment=smoke", "driver=vllm", f"driver.pythonpath={tmp_path},/nowhere")


def test_an_interpreter_of_another_driver_is_not_looked_for():
    check_interpreter(DriverConfig(name="sync", python="/nowhere/python"))


def test_a_folder_is_no_interpreter_and_a_link_is_not_followed(tmp_path):
    with pytest.raises(ConfigError, match="is no program"):
        check_interpreter(DriverConfig(name="vllm", python=str(tmp_path)))
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert find_python(DriverConfig(name="vllm", python=str(link))) == str(link)


def test_the_check_needs_no_torch():
    code = "import sys, cbexp.planning.vllm_python; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
