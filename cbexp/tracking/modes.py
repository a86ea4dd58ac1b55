"""The mode of a run: online, offline or disabled, and why. Turns wandb's complaints into errors for users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cbexp.config import TrackingConfig
from cbexp.errors import ConfigError

if TYPE_CHECKING:
    import wandb

Mode = Literal["online", "offline", "disabled"]

# wandb's own modes (from WANDB_MODE or its settings files) other than online.
OWN_MODES: dict[str, Mode] = {"offline": "offline", "dryrun": "offline", "disabled": "disabled"}


@dataclass(frozen=True)
class Choice:
    """The mode of a run, and why."""

    mode: Mode
    reason: str


def choose_mode(config: TrackingConfig) -> Choice:
    """Return wandb's own mode (WANDB_MODE) where `config` leaves it open, else online with credentials, else offline.

    Raises:
        ConfigError: `online` without credentials, or against wandb's own mode.
    """
    settings = _own_settings()
    if config.mode == "offline":
        return Choice("offline", "as configured")
    own_mode = OWN_MODES.get(settings.mode)
    if own_mode is not None and config.mode == "online":
        raise ConfigError(f"tracking=online, but wandb's own mode is {settings.mode} (WANDB_MODE): unset it.")
    if own_mode is not None:
        return Choice(own_mode, f"wandb's own mode is {settings.mode}")
    problem = _find_login_problem(settings)
    if problem is None:
        return Choice("online", "as configured" if config.mode == "online" else "credentials found")
    if config.mode == "online":
        raise ConfigError(
            f"tracking=online, but {problem}: run `wandb login`, set WANDB_API_KEY, or use tracking=offline."
        )
    return Choice("offline", problem)


@contextmanager
def refusing_bad_settings() -> Iterator[None]:
    """Turn wandb's errors about bad settings into `ConfigError`."""
    import wandb
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"tracking: W&B does not accept {reasons}.") from error
    except wandb.Error as error:
        raise ConfigError(f"tracking: W&B does not accept its settings: {error}") from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class when it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _own_settings() -> wandb.Settings:
    """Wandb's settings from its environment variables and files. From here on wandb prints nothing."""
    import wandb

    with refusing_bad_settings():
        return wandb.setup(wandb.Settings(silent=True)).settings


def _find_login_problem(settings: wandb.Settings) -> str | None:
    """Why wandb cannot log in; None if it has credentials. Asks neither the user nor the server."""
    import wandb

    try:
        has_credentials = wandb.login(verify=False, prompt=False)
    except wandb.Error as error:
        return f"the credentials cannot be used ({first_line(error)})"
    return None if has_credentials else f"there are no credentials for {settings.base_url}"
