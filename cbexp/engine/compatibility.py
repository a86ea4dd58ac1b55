"""The transformers versions whose continuous-batching internals the engine knows."""

from __future__ import annotations

import re

from cbexp.engine.types import UnsupportedTransformersError

# First supported and first unsupported minor version: the internals change between minor versions.
SUPPORTED_TRANSFORMERS = ((5, 24), (5, 25))


def check_transformers_version(found: str) -> None:
    """Raise `UnsupportedTransformersError` (one line: found, range) unless version `found` is supported."""
    match = re.match(r"(\d+)\.(\d+)", found)
    minor = (int(match[1]), int(match[2])) if match else None
    first, end = SUPPORTED_TRANSFORMERS
    if minor is None or not first <= minor < end:
        raise UnsupportedTransformersError(
            f"transformers {found} is not supported: install >={first[0]}.{first[1]},<{end[0]}.{end[1]}."
        )
