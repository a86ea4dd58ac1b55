"""Names of models and datasets, local or on the hub, and clear messages when they cannot be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path

import torch
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is that of the HTTP client in use
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError

from cbexp.errors import CbexpError

UNREACHABLE_ERRORS = (LocalEntryNotFoundError, ConnectionError, TimeoutError, HTTPError)
LOADING_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    SafetensorError,
    HTTPError,
)


@dataclass(frozen=True)
class Source:
    """Something to load. `kind` is what it is (model, adapter, dataset), `key` the setting that names it."""

    kind: str
    key: str
    name: str
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether the name is a path on this machine."""
        return Path(self.name).exists()

    def __str__(self) -> str:
        at = f" (revision {self.revision})" if self.revision and not self.is_local else ""
        return f"{self.kind} {self.name!r}{at}"


def looks_local(name: str) -> bool:
    """Whether `name` can only be a path: absolute, explicitly relative, or deeper than a hub id."""
    return Path(name).is_absolute() or name.startswith(("./", "../", "~", ".\\")) or name.count("/") > 1


def resolve_source(source: Source, error_class: type[CbexpError]) -> Source:
    """Expand `~`, and refuse a path that is no folder. A name that may be a hub id is not checked.

    Raises:
        error_class: the name is a file, a path without a folder, or a folder with a revision.
    """
    path = Path(source.name).expanduser()
    if path.is_file():
        raise error_class(f"{source.key}={source.name}: this is a file, and a folder or hub id is needed.")
    if looks_local(source.name) and not path.is_dir():
        raise error_class(
            f"{source.key}={source.name}: there is no such folder (looked in {path.absolute()})."
        )
    if path.is_dir() and source.revision is not None:
        raise error_class(
            f"{source.key}={source.name} is a folder here and has no revisions: remove revision={source.revision}."
        )
    return Source(source.kind, source.key, str(path) if path.is_dir() else source.name, source.revision)


@contextmanager
def explained_loading(
    source: Source, error_class: type[CbexpError], *more_errors: type[Exception]
) -> Iterator[None]:
    """Turn errors of transformers, PEFT, the hub and `more_errors` while loading `source` into `error_class`.

    Out-of-memory errors and cbexp's own errors pass unchanged.
    """
    explained: tuple[type[Exception], ...] = (*LOADING_ERRORS, *more_errors)
    try:
        yield
    except (CbexpError, torch.OutOfMemoryError):
        raise
    except explained as error:
        raise error_class(explain_loading_error(error, source)) from error


def explain_loading_error(error: BaseException, source: Source) -> str:
    """Return what went wrong and what to do, from `error` and the errors that led to it."""
    causes = list(_chain(error))
    if not source.is_local:
        for cause in causes:
            explanation = _explain_hub_error(cause, source)
            if explanation is not None:
                return explanation
        if any(isinstance(cause, UNREACHABLE_ERRORS) for cause in causes):
            return (
                f"{source} is not on this machine and the hub cannot be reached. Give a local folder in {source.key}, "
                "or download it first where there is a connection (hf download) and point HF_HOME at that cache."
            )
    if any(isinstance(cause, SafetensorError) for cause in causes):
        return f"{source} has a damaged safetensors file ({first_line(error)}). Download or copy it again."
    if any(isinstance(cause, JSONDecodeError) for cause in causes):
        return f"{source} has a damaged JSON file ({first_line(error)})."
    reason = first_line(error)
    if error.__cause__ is not None and first_line(error.__cause__) not in reason:
        reason += f" ({first_line(error.__cause__)})"
    return f"{source} cannot be loaded: {reason}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class when it has none."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    # A colon announces a list, whose items stand on the following lines.
    return " ".join(line.strip() for line in lines) if lines[0].endswith(":") else lines[0]


def _explain_hub_error(error: BaseException, source: Source) -> str | None:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError) or (
        status in (401, 403) and not isinstance(error, RepositoryNotFoundError)
    ):
        return (
            f"{source} is gated or private: accept its licence at https://huggingface.co/{source.name} with your "
            "account, then log in with `hf auth login` (formerly huggingface-cli login) or set HF_TOKEN."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{source}: the hub has no such revision. Give an existing branch, tag or commit, or leave it unset."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{source}: there is no such folder here and no such repository on the hub (or it is private and needs "
            f"`hf auth login`). Check {source.key}."
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return f"{source}: the repository lacks a file that is needed ({first_line(error)})."
    if isinstance(error, HFValidationError):
        return (
            f"{source}: there is no such folder here and the name is not a valid hub id. Check {source.key}."
        )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, then what caused it, to the end."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
