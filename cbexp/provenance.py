"""Which code runs: the versions of packages and the commit of the source; found without loading any of them."""

from __future__ import annotations

import hashlib
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

SUBPROCESS_TIMEOUT_S = 10
PACKAGES = ("cbexp", "torch", "transformers", "peft", "datasets", "hydra-core", "triton", "wandb", "numpy")
CODE_AND_CHOICES = ("cbexp", "conf")  # what decides what runs; notes and results elsewhere do not


def version_of(package: str) -> str | None:
    """Return the installed version of `package`, None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_source(root: Path) -> dict[str, Any]:
    """Commit of the source tree at `root`, and whether what runs differs from it as `hash_changes` has it.

    None without a checkout or git.
    """
    changes = hash_changes(root)
    return {
        "commit": _git(root, "rev-parse", "HEAD"),
        "is_dirty": None if changes is None else changes != "",
    }


def hash_changes(root: Path) -> str | None:
    """Hash of what differs from the commit in `CODE_AND_CHOICES`: changes to tracked files, and untracked files.

    Empty when nothing does, None without a checkout or git, or when a file cannot be read.
    """
    changes = _git(root, "diff", "--no-ext-diff", "--binary", "HEAD", "--", *CODE_AND_CHOICES)
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *CODE_AND_CHOICES)
    if changes is None or untracked is None:
        return None
    names = [name for name in untracked.split("\0") if name]
    if not changes and not names:
        return ""
    digest = hashlib.sha256(os.fsencode(changes))
    try:
        for name in names:
            digest.update(b"\0" + os.fsencode(name) + b"\0" + _content(root / name))
    except OSError:
        return None
    return digest.hexdigest()[:16]


def _git(root: Path, *arguments: str) -> str | None:
    if not (root / ".git").exists():  # an installed package may lie inside somebody else's checkout
        return None
    return output_of("git", "-C", str(root), *arguments)


def _content(path: Path) -> bytes:
    """Digest of a file, or of where a link leads: as git sees them."""
    content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
    return hashlib.sha256(content).digest()


def output_of(*command: str) -> str | None:
    """What a program prints; None when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # a diff, or a file's name, need not be Unicode
            timeout=SUBPROCESS_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
