"""Where vLLM's interpreter and packages are, as settings name them; needs no torch, so that a command line can ask."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from cbexp.config import DriverConfig
from cbexp.drivers.registry import DRIVERS
from cbexp.errors import ConfigError


def check_interpreter(driver: DriverConfig) -> None:
    """Raise `ConfigError` where the driver has an interpreter of its own, and that or a folder of its is not there."""
    if "driver.python" in DRIVERS[driver.name].reads:
        find_python(driver)
        find_pythonpath(driver)


def find_python(driver: DriverConfig) -> str:
    """Return the absolute path of vLLM's interpreter, which is ours where none is named.

    Raises:
        ConfigError: what is named is no program.
    """
    if driver.python is None:
        return sys.executable
    found = shutil.which(Path(driver.python).expanduser())
    if found is None:
        raise ConfigError(f"driver.python={driver.python} is no program: give the path of an interpreter.")
    return os.path.abspath(found)  # a virtual environment's is a link that must not be followed


def find_pythonpath(driver: DriverConfig) -> str | None:
    """Return the PYTHONPATH of vLLM's interpreter with absolute folders; None where none is named.

    Raises:
        ConfigError: a folder is not there.
    """
    if driver.pythonpath is None:
        return None
    folders = [
        Path(folder).expanduser().absolute() for folder in driver.pythonpath.split(os.pathsep) if folder
    ]
    for folder in folders:
        if not folder.exists():
            raise ConfigError(f"driver.pythonpath={driver.pythonpath}: there is no {folder}.")
    return os.pathsep.join(map(str, folders))
