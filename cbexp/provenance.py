"""Which code runs: the versions of packages and the commit of the source; found without loading any of them."""

from __future__ import annotations

import hashlib
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

SUBPROCESS_TIMEOUT_S = 10
PACKAGES = ("cbexp", "torch", "transformers", "peft", "datasets", "hydra-core", "triton", "wandb", "numpy")


def version_of(package: str) -> str | None:
    """Return the installed version of `package`, None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_source(root: Path) -> dict[str, Any]:
    """Commit of the source tree at `root`, and whether the tree differs from it; None without a checkout or git."""
    if not (root / ".git").exists():  # an installed package may lie inside somebody else's checkout
        return {"commit": None, "is_dirty": None}
    commit = output_of("git", "-C", str(root), "rev-parse", "HEAD")
    changes = output_of("git", "-C", str(root), "status", "--porcelain")
    return {"commit": commit, "is_dirty": None if changes is None else bool(changes)}


def hash_changes(root: Path) -> str | None:
    """Hash of what differs from the commit in code and choices; empty when nothing does, None without a checkout."""
    if not (root / ".git").exists():
        return None
    changes = output_of("git", "-C", str(root), "diff", "HEAD", "--", "cbexp", "conf")
    if changes is None:
        return None
    return hashlib.sha256(changes.encode()).hexdigest()[:16] if changes else ""


def output_of(*command: str) -> str | None:
    """What a program prints; None when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SUBPROCESS_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
