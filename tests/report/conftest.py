"""Run folders as a job leaves them."""

from __future__ import annotations

import pytest

from tests.report.report_fixtures import round_record, summary_of, write_json, write_lines


@pytest.fixture
def make_run(tmp_path):
    """Writes a completed run and returns its folder; `status` and `message` make it one that ended otherwise."""

    def make(
        folder_name,
        overrides=("model=tiny",),
        walls_s=(1.0, 1.1, 1.2, 1.3, 1.4),
        status="completed",
        digest="d",
        environment=None,
        **values,
    ):
        folder = tmp_path / folder_name
        command = f"python -m cbexp {' '.join(overrides)}"
        write_json(folder / "cell.json", {"overrides": list(overrides), "command": command})
        ended = {"status": status, "message": values.pop("message", None), "pid": 1, "host": "elsewhere"}
        write_json(folder / "status.json", ended | {"error_class": values.pop("error_class", None)})
        write_json(folder / "environment.json", environment or {"versions": {"torch": "2.11.0"}})
        rounds = [round_record(index, wall_s, digest) for index, wall_s in enumerate(walls_s, start=1)]
        write_lines(folder / "rounds.jsonl", [round_record(0, 2.0) | {"is_warmup": True}, *rounds])
        if status == "completed":
            write_json(folder / "summary.json", summary_of(walls_s, **values))
        return folder

    return make
