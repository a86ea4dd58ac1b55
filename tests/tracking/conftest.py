"""For every test of W&B: no credentials, no settings, folders of its own, and nothing of wandb left running."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb

from tests.tracking.wandb_fixtures import KEY, FakeServer, clean_machine


@pytest.fixture(autouse=True)
def machine_without_credentials(tmp_path):
    with clean_machine(tmp_path):
        yield


@pytest.fixture
def run_dir(tmp_path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def server(monkeypatch):
    server = FakeServer()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    wandb.teardown()
    yield server
    server.stop()
