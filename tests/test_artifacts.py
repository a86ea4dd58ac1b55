"""The run directory under good and bad conditions: killed processes, full disks, unwritable folders, used folders."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cbexp import metrics
from cbexp.artifacts import RunDirectory, check_writable, read_jsonl
from cbexp.config import ArtifactsConfig
from cbexp.engine import Completion
from cbexp.engine.types import RequestTimings, StepInfo
from cbexp.errors import ResultsError
from cbexp.run_status import read_json_object

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
    assert (running["status"], running["pid"]) == ("running", os.getpid())
    assert running["host"]
    assert running["started_at"].endswith("+00:00")

    directory.write_environment({"versions": {"torch": "2"}})
    directory.write_engine({"page_size": 256})
    append_round(directory, 0)
    append_round(directory, 1)
    assert not (path / "summary.json").exists()
    directory.write_summary({"decode_tps": 6.0}, stats_path=tmp_path / "deep" / "stats.json")

    assert [row["round_index"] for row in rows_of(path, "rounds")] == [0, 1]
    requests = [(row["round_index"], row["request_id"], row["verdict"]) for row in rows_of(path, "requests")]
    assert requests == [(0, "req_0", True), (0, "req_1", False), (1, "req_0", True), (1, "req_1", False)]
    assert [row["kind"] for row in rows_of(path, "steps")] == ["decode", "decode"]
    assert [row["completion_ids"] for row in rows_of(path, "completions")] == [[3, 4, 5]] * 4
    for file in (path / "summary.json", tmp_path / "deep" / "stats.json"):
        assert json.loads(file.read_text()) == {"decode_tps": 6.0}
    assert json.loads((path / "engine.json").read_text()) == {"page_size": 256}
    assert read_status(path)["status"] == "completed"
    assert not [file for file in path.iterdir() if file.suffix == ".tmp"]


def test_summary_is_the_last_file_written(tmp_path, monkeypatch):
    directory = RunDirectory.create(tmp_path / "run", KEEP_ALL)
    written = []
    for module in ("artifacts", "run_status"):
        monkeypatch.setattr(f"cbexp.{module}.replace_text", lambda path, _text: written.append(path.name))
    directory.write_summary({}, stats_path=tmp_path / "stats.json")
    assert written == ["stats.json", "status.json", "summary.json"]


@pytest.mark.parametrize(("choice", "kept"), [("all", 2), ("1", 1), ("none", 0), ("0", 0), ("9", 2)])
def test_completions_are_kept_as_configured(tmp_path, choice, kept):
    directory = RunDirectory.create(tmp_path, ArtifactsConfig(completions=choice))
    append_round(directory, 0)
    append_round(directory, 1)
    assert len(rows_of(tmp_path, "completions")) == 2 * kept
    assert len(rows_of(tmp_path, "requests")) == 4


def test_interrupted_round_leaves_its_requests_but_no_round(tmp_path):
    directory = RunDirectory.create(tmp_path, KEEP_ALL)
    append_round(directory, 0)
    requests = metrics.summarize_requests(1, {}, ["req_2"], [None], [4])
    directory.append_interrupted_round(requests, [{"round_index": 1, "text": "cut"}])
    assert len(rows_of(tmp_path, "rounds")) == 1
    assert rows_of(tmp_path, "requests")[-1]["round_index"] == 1
    assert rows_of(tmp_path, "completions")[-1]["text"] == "cut"


def test_any_text_survives_as_one_line(tmp_path):
    text = 'line\nbreak\u2028\u2029"quote" \ud83d\ude00 \udcff naïve'
    append_round(RunDirectory.create(tmp_path, KEEP_ALL), 0, text)
    rows, num_torn = read_jsonl(tmp_path / "completions.jsonl")
    assert (len(rows), num_torn) == (2, 0)
    assert rows[0]["text"] == json.loads(json.dumps(text))


def test_size_counts_every_file(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", KEEP_ALL)
    before = directory.size_bytes()
    (tmp_path / "run" / "wandb").mkdir()
    (tmp_path / "run" / "wandb" / "data").write_bytes(b"x" * 1000)
    assert directory.size_bytes() == before + 1000


@pytest.mark.parametrize("status", ["failed", "out_of_memory", "not_applicable", "interrupted"])
def test_other_ends_leave_their_reason_and_failures_a_traceback(tmp_path, status):
    directory = RunDirectory.create(tmp_path, KEEP_ALL)
    with pytest.raises(ValueError, match="the reason") as caught:
        raise ValueError("the reason")
    directory.mark(status, caught.value)
    ended = read_status(tmp_path)
    assert (ended["status"], ended["error_class"], ended["message"]) == (status, "ValueError", "the reason")
    assert ended["pid"] == os.getpid()
    assert not (tmp_path / "summary.json").exists()
    is_failure = status in ("failed", "out_of_memory")
    assert ("traceback_file" in ended) == (tmp_path / "traceback.txt").exists() == is_failure
    if is_failure:
        assert 'ValueError("the reason")\nValueError' in (tmp_path / ended["traceback_file"]).read_text()


# Folders in use


def test_completed_run_is_never_overwritten(tmp_path):
    RunDirectory.create(tmp_path, KEEP_ALL).write_summary({"a": 1}, None)
    with pytest.raises(ResultsError, match="completed run"):
        RunDirectory.create(tmp_path, KEEP_ALL)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"going on .process PID on"),
        ({"host": "elsewhere", "pid": 2**22 + 1}, r"going on .* on elsewhere"),
        ({"pid": 2**22 + 1}, r"did not complete .status.json"),
        ("", r"did not complete .status.json"),
        ("[]", r"did not complete .status.json"),
        ("{}", r"did not complete .status.json"),
    ],
)
def test_other_run_is_left_alone_and_not_mixed_with_a_new_one(tmp_path, changes, message):
    RunDirectory.create(tmp_path, KEEP_ALL)
    content = changes if isinstance(changes, str) else json.dumps(read_status(tmp_path) | changes)
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(ResultsError, match=message.replace("PID", str(os.getpid()))):
        RunDirectory.create(tmp_path, KEEP_ALL)


def test_folder_with_other_files_is_fine(tmp_path):
    (tmp_path / ".hydra").mkdir()
    assert RunDirectory.create(tmp_path, KEEP_ALL).path == tmp_path


# Places that cannot be written


def test_unwritable_folder_is_a_clear_error(tmp_path):
    """Below a file, which not even root can write."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    with pytest.raises(ResultsError, match=r"cannot write .*run: .*hydra.run.dir"):
        RunDirectory.create(folder, KEEP_ALL)
    with pytest.raises(ResultsError, match="Give a path that can be written"):
        check_writable(folder / "stats.json")


def test_check_writable_makes_parents_and_leaves_nothing(tmp_path):
    check_writable(tmp_path / "a" / "b" / "stats.json")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    for place in ("/dev/null", tmp_path / "a"):
        with pytest.raises(ResultsError, match="no regular file"):
            check_writable(Path(place))


# Full disks


def test_full_device_is_named_with_what_was_kept(tmp_path):
    directory = RunDirectory.create(tmp_path, KEEP_ALL)
    append_round(directory, 0)
    append_round(directory, 1)
    (tmp_path / "steps.jsonl").unlink()
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    with pytest.raises(ResultsError, match=r"steps.jsonl: .*MiB free there.*Kept: 2 whole round"):
        append_round(directory, 2)
    rounds, num_torn = read_jsonl(tmp_path / "rounds.jsonl")
    assert ([row["round_index"] for row in rounds], num_torn) == ([0, 1], 0)


@pytest.fixture
def small_disk(tmp_path):
    libc = ctypes.CDLL(None, use_errno=True)
    path = tmp_path / "disk"
    path.mkdir()
    if libc.mount(b"none", str(path).encode(), b"tmpfs", 0, b"size=64k") != 0:
        pytest.skip("mounting a small file system needs privileges")
    yield path
    libc.umount2(str(path).encode(), 2)


def test_disk_that_fills_up_loses_nothing_written_before(small_disk):
    path = small_disk / "run"
    directory = RunDirectory.create(path, KEEP_ALL)
    num_whole = 0
    with pytest.raises(ResultsError) as caught:
        while True:
            append_round(directory, num_whole, text="x" * 997)
            num_whole += 1
    assert f"Kept: {num_whole} whole round(s)" in str(caught.value)
    assert num_whole > 2
    for name, per_round in {"rounds": 1, "steps": 1, "requests": 2, "completions": 2}.items():
        rows, num_torn = read_jsonl(path / f"{name}.jsonl")
        assert num_torn == 0
        assert len(rows) >= num_whole * per_round
    with pytest.raises(OSError, match="Errno 28"), (small_disk / "rest").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    directory.mark("failed", caught.value)
    status = read_status(path)
    assert (status["status"], status["error_class"]) == ("failed", "ResultsError")
    assert status["traceback_file"] is None


def run_script(script: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])


def test_cut_off_write_is_taken_back(tmp_path):
    """A real partial write: the process may only write files of up to 5,000 bytes."""
    script = """
        import errno, resource, sys
        from pathlib import Path
        from cbexp.files import append_bytes
        path = Path(sys.argv[1])
        append_bytes(path, b'{"a": 1}\\n')
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        try:
            append_bytes(path, b"x" * 9000)
        except OSError as error:
            print(errno.errorcode[error.errno])
    """
    assert run_script(script, tmp_path / "rows.jsonl").communicate()[0].strip() == "EFBIG"
    assert (tmp_path / "rows.jsonl").read_text() == '{"a": 1}\n'


def test_killed_process_leaves_whole_rounds(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from cbexp.artifacts import RunDirectory
        from tests.test_artifacts import KEEP_ALL, append_round
        directory = RunDirectory.create(Path(sys.argv[1]), KEEP_ALL)
        for index in range(100_000):
            append_round(directory, index)
            print(index, flush=True)
    """
    path = tmp_path / "run"
    process = run_script(script, path)
    while int(process.stdout.readline()) < 5:
        pass
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    rounds = rows_of(path, "rounds")
    assert [row["round_index"] for row in rounds] == list(range(len(rounds)))
    assert len(rounds) >= 6
    assert len(rows_of(path, "requests")) >= 2 * len(rounds)
    with pytest.raises(ResultsError, match="did not complete"):
        RunDirectory.create(path, KEEP_ALL)


# Reading records


def test_torn_last_line_is_skipped_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3')
    assert read_jsonl(path) == ([{"a": 1}, {"a": 2}], 1)
    path.write_text("")
    assert read_jsonl(path) == ([], 0)
    path.write_text('{"a": 1}\n{"a":\n{"a": 3}\n')
    with pytest.raises(ResultsError, match="line 2 is no JSON"):
        read_jsonl(path)


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"status": "comp', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_record_that_is_no_json_object_is_none(tmp_path, content):
    (tmp_path / "status.json").write_bytes(content)
    assert read_json_object(tmp_path / "status.json") is None
    assert read_json_object(tmp_path) is read_json_object(tmp_path / "none") is None
    (tmp_path / "status.json").write_text('{"status": "running"}')
    assert read_json_object(tmp_path / "status.json") == {"status": "running"}
