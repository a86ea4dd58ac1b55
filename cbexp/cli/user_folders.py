"""The user's own folders of yamls: what in them could never be chosen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cbexp.errors import ConfigError


def refuse_hidden_choices(own_folder: Path, conf_dir: Path) -> None:
    """Raise `ConfigError` when a yaml in `own_folder` has the name of a shipped one, which Hydra finds first."""
    for shipped in sorted(conf_dir.rglob("*.yaml")):
        own = own_folder / shipped.relative_to(conf_dir)
        if own.exists() and not own.samefile(shipped):
            raise ConfigError(
                f"{own} has the name of a built-in choice, which would go before it: give it another name."
            )


def list_folders(search_path: Iterable[str]) -> list[Path]:
    """Return the folders of `hydra.searchpath`, which may have packages too."""
    paths = [path.removeprefix("file://") for path in search_path]
    return [Path(path) for path in paths if "://" not in path]
