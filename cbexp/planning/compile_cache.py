"""Where compiled code is kept between runs, for the time of a job, and how much it takes."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cbexp.config import CompileConfig
from cbexp.drivers.registry import DriverKind
from cbexp.engine.types import COMPILE_MODES
from cbexp.errors import ConfigError

# Environment variable -> its part of compile.cache_dir.
FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
# The start of the folder in the temporary one that PyTorch names in these variables itself, on import even.
PYTORCHS_OWN = "torchinductor_"

OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)


def uses_compile_cache(mode: str, kind: DriverKind, device: torch.device) -> bool:
    """Whether this process compiles anything: a job's forward, or the driver's own kernels on a GPU."""
    has_kernels = kind.has_kernels and device.type == "cuda"
    return not kind.own_process and (COMPILE_MODES[mode].torch_mode is not None or has_kernels)


@contextmanager
def compile_environment(config: CompileConfig, mode: str) -> Iterator[None]:
    """Point PyTorch and Triton to `config.cache_dir` for the body, but where the user's environment names a folder.

    The recompile limit holds for the body too, where `mode` compiles.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    before = {name: os.environ.get(name) for name in FOLDERS}
    previous_limit = torch._dynamo.config.recompile_limit
    if config.cache_dir is not None:
        _set_folders(config.cache_dir)
    if COMPILE_MODES[mode].torch_mode is not None:
        torch._dynamo.config.recompile_limit = config.recompile_limit
    try:
        yield
    finally:
        torch._dynamo.config.recompile_limit = previous_limit
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def explaining_full_cache(config: CompileConfig) -> Iterator[None]:
    """Turn the error of a body without space for compiled code into a `ConfigError` that names setting and folders."""
    try:
        yield
    except Exception as error:
        if not _is_for_want_of_space(error):
            raise
        folders = " and ".join(describe_compile_cache()["folders"])
        raise ConfigError(
            f"compile.cache_dir={config.cache_dir}: no space is left for compiled code in {folders or 'it'}. Make "
            "room, or give another folder (null for PyTorch's own)."
        ) from error


def describe_compile_cache() -> dict[str, Any]:
    """Return the folders in use now, one a variable, and the bytes of all files in them, as plain JSON values."""
    folders = sorted({Path(os.environ[name]).absolute() for name in FOLDERS if os.environ.get(name)})
    outer = [folder for folder in folders if not any(other in folder.parents for other in folders)]
    return {
        "folders": [str(folder) for folder in folders],
        "num_bytes": sum(_measure_folder(folder) for folder in outer),
    }


def list_overriding_variables() -> list[str]:
    """Return the user's own environment variables that go before `compile.cache_dir`."""
    return [name for name in FOLDERS if _is_users_own(os.environ.get(name))]


def _is_users_own(folder: str | None) -> bool:
    return bool(folder) and not str(folder).startswith(os.path.join(tempfile.gettempdir(), PYTORCHS_OWN))


def _is_for_want_of_space(error: BaseException | None) -> bool:
    while error is not None:
        # PyTorch's errors and those of compilers say it in words alone.
        if getattr(error, "errno", None) in OUT_OF_SPACE or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__
    return False


def _set_folders(cache_dir: str) -> None:
    folder = Path(cache_dir).expanduser().absolute()
    names = [name for name in FOLDERS if not _is_users_own(os.environ.get(name))]
    if names:
        _make_writable(folder)
    for name in names:
        os.environ[name] = str(folder / FOLDERS[name])


def _make_writable(folder: Path) -> None:
    """Make the folder now: whether it can be made, nothing else tells for sure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK) else "it is read-only"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ConfigError(
            f"compile.cache_dir={folder} cannot be written ({reason}): give another one, or null for PyTorch's own."
        )


def _measure_folder(folder: Path) -> int:
    return sum(_measure_file(Path(parent, name)) for parent, _, names in os.walk(folder) for name in names)


def _measure_file(path: Path) -> int:
    """0 for a file that another process has just replaced."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
