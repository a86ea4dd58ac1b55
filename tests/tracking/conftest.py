"""For every test of W&B: no credentials, no settings, folders of its own, and nothing of wandb left running."""

from __future__ import annotations

import os
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import wandb

from tests.tracking.wandb_fixtures import KEY, FakeServer


@pytest.fixture(autouse=True)
def machine_without_credentials(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    yield
    wandb.teardown()


@pytest.fixture
def run_dir(tmp_path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def server(monkeypatch):
    """A server on this machine, with credentials for it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    wandb.teardown()
    yield server
    server.shutdown()
    server.server_close()
