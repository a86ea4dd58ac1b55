"""The user's own folders of yaml files: none of them may shadow a shipped one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cbexp.errors import ConfigError


def refuse_shadowing(user_folder: Path, conf_dir: Path) -> None:
    """Raise `ConfigError` when a yaml in `user_folder` has the name of one in `conf_dir`; Hydra would see only one."""
    for shipped in sorted(conf_dir.rglob("*.yaml")):
        own = user_folder / shipped.relative_to(conf_dir)
        if own.exists() and not own.samefile(shipped):
            raise ConfigError(
                f"{own} has the name of a built-in choice, which would go before it: give it another name."
            )


def list_folders(search_path: Iterable[str]) -> list[Path]:
    """Return the folders among the entries of `hydra.searchpath`; packages are left out."""
    paths = [path.removeprefix("file://") for path in search_path]
    return [Path(path) for path in paths if "://" not in path]
