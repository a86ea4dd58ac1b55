"""A sweep that is one W&B run: logged once, by the sweep, after its cells."""

import json
import sys
from pathlib import Path

import pytest

from cbexp import tracking
from cbexp.cli.command_line import main
from tests.sweep import fake_job


def test_sweep_without_a_run_per_cell_is_logged_as_one(tmp_path, monkeypatch, capsys):
    logged = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "calls.jsonl"))
    monkeypatch.setenv("FAKE_ENDS", json.dumps({2: "fail"}))
    monkeypatch.setitem(sys.modules, "cbexp.experiment", fake_job)
    monkeypatch.setattr(
        tracking, "log_sweep", lambda *arguments: logged.append(arguments) or ["W&B: it was slow"]
    )
    with pytest.raises(SystemExit, match="1"):
        main(["-m", "seed=1,2", "isolation=none", "tracking=offline", "tracking.per_cell=false"])
    ((config, name, folder, rows),) = logged
    assert (config.mode, name) == ("offline", f"default_{folder.name}")
    assert folder.parent == Path.cwd() / "outputs" / "default"
    assert sorted((row["label"], row["status"]) for row in rows) == [
        ("seed=1", "completed"),
        ("seed=2", "failed"),
    ]
    assert "warning: W&B: it was slow" in capsys.readouterr().out
