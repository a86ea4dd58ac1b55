"""Which TRL this package is made for. Its hook is a private method, which any minor version may change."""

from __future__ import annotations

import importlib.metadata
import re

from cbexp.engine import EngineError

# First supported and first unsupported minor version.
SUPPORTED_TRL = ((1, 16), (1, 17))


class UnsupportedTrlError(EngineError, ImportError):
    """TRL is missing, or its installed version is outside the supported range."""


def find_trl_version() -> str | None:
    """The installed version; None without TRL."""
    try:
        return importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_trl_version(found: str | None) -> None:
    """Raise `UnsupportedTrlError` (one line: found, range) unless version `found` is supported; None: there is none."""
    first, end = SUPPORTED_TRL
    supported = f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
    if found is None:
        raise UnsupportedTrlError(
            f"trl is not installed: pip install 'cbexp[trl]', which takes trl{supported}."
        )
    match = re.match(r"(\d+)\.(\d+)", found)
    minor = (int(match[1]), int(match[2])) if match else None
    if minor is None or not first <= minor < end:
        raise UnsupportedTrlError(f"trl {found} is not supported: install trl{supported}.")
