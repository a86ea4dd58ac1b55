"""Whether W&B has credentials on this machine, and where."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit


def find_credentials(base_url: str, settings_key: str | None) -> str | None:
    """Where wandb will find its credentials for the server at `base_url`; None when there are none.

    The places and their order are wandb's own: environment, netrc file, wandb's settings.
    """
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if os.environ.get(variable):
            return variable
    netrc_path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        if netrc.netrc(netrc_path).authenticators(urlsplit(base_url).netloc):
            return str(netrc_path)
    except (OSError, netrc.NetrcParseError):
        pass  # no such file, or none that wandb can read either
    return "wandb's settings" if settings_key else None
