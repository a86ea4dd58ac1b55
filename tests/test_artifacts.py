"""The run directory under good and bad conditions: full disks, unwritable folders, used folders."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from socket import gethostname

import pytest

from cbexp import metrics
from cbexp.artifacts import RunDirectory, check_writable, read_jsonl
from cbexp.config import ArtifactsConfig
from cbexp.engine.types import Completion, RequestTimings, StepInfo
from cbexp.errors import ResultsError

KEEP_ALL = ArtifactsConfig(completions="all")


def append_round(directory: RunDirectory, index: int, text: str = "six") -> None:
    ids = ["req_0", "req_1"]
    timings = RequestTimings(0.0, 0.1, 0.2, 0.9)
    completions = {i: Completion(i, (1, 2), (3, 4, 5), "eos", timings) for i in ids}
    requests = metrics.summarize_requests(index, completions, ids, [True, False], [4, 4])
    steps = [StepInfo("decode", 1, 2, 2, 0, None, 0.0, 0.5, 0, 2, 0.1)]
    record = metrics.summarize_round(index, False, 0.0, 1.0, requests, steps, None)
    rows = metrics.summarize_completions(index, completions, ids, [text, text], [True, False])
    directory.append_round(record, requests, metrics.step_rows(index, 0.0, steps), rows)


def read_status(path: Path) -> dict:
    return json.loads((path / "status.json").read_text())


def rows_of(path: Path, name: str) -> list[dict]:
    return read_jsonl(path / f"{name}.jsonl")[0]


# A good run


def test_run_directory_is_complete(tmp_path):
    path = tmp_path / "outputs" / "default" / "2026"
    directory = RunDirectory.create(path, KEEP_ALL)
    running = read_status(path)
    assert (running["status"], running["pid"], running["host"]) == ("running", os.getpid(), gethostname())
    assert running["started_at"].endswith("+00:00")

    directory.write_environment({"versions": {"torch": "2"}})
    directory.write_engine({"page_size": 256})
    text = 'line\nbreak\u2028\u2029"quote" \ud83d\ude00 \udcff naïve'  # is one line
    append_round(directory, 0, text)
    append_round(directory, 1)
    requests = metrics.summarize_requests(2, {}, ["req_2"], [None], [4])
    directory.append_interrupted_round(requests, [{"round_index": 2, "text": "cut"}])
    assert not (path / "summary.json").exists()
    directory.write_summary({"decode_tps": 6.0}, stats_path=tmp_path / "deep" / "stats.json")

    assert [row["round_index"] for row in rows_of(path, "rounds")] == [0, 1]
    found = [(row["round_index"], row["request_id"], row["verdict"]) for row in rows_of(path, "requests")]
    judged = [(index, name, name == "req_0") for index in (0, 1) for name in ("req_0", "req_1")]
    assert found == [*judged, (2, "req_2", None)]
    assert [row["kind"] for row in rows_of(path, "steps")] == ["decode", "decode"]
    texts = [json.loads(json.dumps(text))] * 2 + ["six"] * 2 + ["cut"]
    assert [row["text"] for row in rows_of(path, "completions")] == texts
    records = {name: json.loads((path / f"{name}.json").read_text()) for name in ("environment", "engine")}
    assert records == {"environment": {"versions": {"torch": "2"}}, "engine": {"page_size": 256}}
    for file in (path / "summary.json", tmp_path / "deep" / "stats.json"):
        assert json.loads(file.read_text()) == {"decode_tps": 6.0}
    assert read_status(path)["status"] == "completed"
    assert not [file for file in path.iterdir() if file.suffix == ".tmp"]
    before = directory.size_bytes()
    (path / "wandb").mkdir()
    (path / "wandb" / "data").write_bytes(b"x" * 1000)
    assert directory.size_bytes() == before + 1000
    with pytest.raises(ResultsError, match="completed run"):
        RunDirectory.create(path, KEEP_ALL)
    assert rows_of(path, "rounds")


def test_summary_is_the_last_file_written(tmp_path, monkeypatch):
    directory = RunDirectory.create(tmp_path / "run", KEEP_ALL)
    written = []
    for module in ("artifacts", "run_status"):
        monkeypatch.setattr(f"cbexp.{module}.replace_text", lambda path, _text: written.append(path.name))
    directory.write_summary({}, stats_path=tmp_path / "stats.json")
    assert written == ["stats.json", "status.json", "summary.json"]


@pytest.mark.parametrize(("choice", "kept"), [("all", 2), ("1", 1), ("none", 0)])
def test_completions_are_kept_as_configured(tmp_path, choice, kept):
    directory = RunDirectory.create(tmp_path, ArtifactsConfig(completions=choice))
    append_round(directory, 0)
    append_round(directory, 1)
    assert len(rows_of(tmp_path, "completions")) == 2 * kept
    assert len(rows_of(tmp_path, "requests")) == 4


def test_folder_of_another_run_is_left_alone_and_not_mixed_with_a_new_one(tmp_path):
    RunDirectory.create(tmp_path, KEEP_ALL)
    with pytest.raises(ResultsError, match=f"going on .process {os.getpid()} on"):
        RunDirectory.create(tmp_path, KEEP_ALL)
    (tmp_path / "status.json").write_text(json.dumps(read_status(tmp_path) | {"pid": 2**22 + 1}))
    with pytest.raises(ResultsError, match=r"did not complete .status.json"):
        RunDirectory.create(tmp_path, KEEP_ALL)


# Places that cannot be written


def test_unwritable_folder_is_a_clear_error_and_a_check_leaves_nothing(tmp_path):
    """Below a file, which not even root can write."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    with pytest.raises(ResultsError, match=r"cannot write .*run: .*hydra.run.dir"):
        RunDirectory.create(folder, KEEP_ALL)
    with pytest.raises(ResultsError, match="Give a path that can be written"):
        check_writable(folder / "stats.json")
    check_writable(tmp_path / "a" / "b" / "stats.json")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    with pytest.raises(ResultsError, match="no regular file"):
        check_writable(tmp_path / "a")


def test_on_a_full_disk_a_write_is_taken_back_and_the_status_written_in_place(tmp_path, monkeypatch):
    """The disk takes 5 bytes of a write, and no more."""

    def write(descriptor: int, data: bytes, write=os.write) -> int:
        if taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken.append(write(descriptor, data[:5]))
        return taken[0]

    taken: list[int] = []
    directory = RunDirectory.create(tmp_path, KEEP_ALL)
    append_round(directory, 0)
    monkeypatch.setattr("cbexp.files.os.write", write)
    with pytest.raises(ResultsError, match=r"steps.jsonl: .*MiB free there.*Kept: 1 whole round"):
        append_round(directory, 1)
    assert taken == [5]
    rows, num_torn = read_jsonl(tmp_path / "steps.jsonl")
    assert (len(rows), num_torn) == (1, 0)
    directory.mark("failed", ValueError("the reason"))
    status = read_status(tmp_path)
    assert (status["status"], status["message"], status["traceback_file"]) == ("failed", "the reason", None)


# Reading records


def test_torn_last_line_is_skipped_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert read_jsonl(path) == ([{"a": 1}], 1)
    path.write_text('{"a": 1}\n{"a":\n{"a": 3}\n')
    with pytest.raises(ResultsError, match="line 2 is no JSON"):
        read_jsonl(path)
