"""The run directory under good and bad conditions: killed processes, full disks, unwritable folders, used folders."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

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

    rounds, requests, steps, completions = (
        read_jsonl(path / f"{name}.jsonl")[0] for name in ("rounds", "requests", "steps", "completions")
    )
    assert [row["round_index"] for row in rounds] == [0, 1]
    assert [(row["round_index"], row["request_id"], row["verdict"]) for row in requests] == [
        (0, "req_0", True), (0, "req_1", False), (1, "req_0", True), (1, "req_1", False),
    ]  # fmt: skip
    assert [row["kind"] for row in steps] == ["decode", "decode"]
    assert [row["completion_ids"] for row in completions] == [[3, 4, 5]] * 4
    assert json.loads((path / "summary.json").read_text()) == {"decode_tps": 6.0}
    assert json.loads((tmp_path / "deep" / "stats.json").read_text()) == {"decode_tps": 6.0}
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
    directory = RunDirectory.create(tmp_path / "run", ArtifactsConfig(completions=choice))
    append_round(directory, 0)
    append_round(directory, 1)
    assert len(read_jsonl(tmp_path / "run" / "completions.jsonl")[0]) == 2 * kept
    assert len(read_jsonl(tmp_path / "run" / "requests.jsonl")[0]) == 4


def test_interrupted_round_leaves_its_requests_but_no_round(tmp_path):
    directory = RunDirectory.create(tmp_path, KEEP_ALL)
    append_round(directory, 0)
    requests = metrics.summarize_requests(1, {}, ["req_2"], [None], [4])
    directory.append_interrupted_round(requests, [{"round_index": 1, "text": "cut"}])
    assert len(read_jsonl(tmp_path / "rounds.jsonl")[0]) == 1
    assert read_jsonl(tmp_path / "requests.jsonl")[0][-1]["round_index"] == 1
    assert read_jsonl(tmp_path / "completions.jsonl")[0][-1]["text"] == "cut"


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


# How a job ends


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


@pytest.mark.parametrize("status", ["failed", "out_of_memory"])
def test_failure_leaves_class_message_and_traceback(tmp_path, status):
    directory = RunDirectory.create(tmp_path, KEEP_ALL)
    directory.mark(status, raised(ValueError("the reason")))
    ended = read_status(tmp_path)
    assert (ended["status"], ended["error_class"], ended["message"]) == (status, "ValueError", "the reason")
    assert "raise error\nValueError: the reason" in (tmp_path / ended["traceback_file"]).read_text()
    assert ended["pid"] == os.getpid()
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("status", ["not_applicable", "interrupted"])
def test_other_ends_leave_their_reason_without_a_traceback(tmp_path, status):
    directory = RunDirectory.create(tmp_path, KEEP_ALL)
    directory.mark(status, raised(RuntimeError("needs a GPU")))
    ended = read_status(tmp_path)
    assert (ended["status"], ended["message"]) == (status, "needs a GPU")
    assert "traceback_file" not in ended
    assert not (tmp_path / "traceback.txt").exists()


# Folders in use


def test_completed_run_is_never_overwritten(tmp_path):
    RunDirectory.create(tmp_path, KEEP_ALL).write_summary({"a": 1}, None)
    with pytest.raises(ResultsError, match="completed run"):
        RunDirectory.create(tmp_path, KEEP_ALL)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}


def test_live_run_is_left_alone(tmp_path):
    RunDirectory.create(tmp_path, KEEP_ALL)
    with pytest.raises(ResultsError, match=f"going on .process {os.getpid()} on"):
        RunDirectory.create(tmp_path, KEEP_ALL)


def test_run_of_another_host_may_live(tmp_path):
    RunDirectory.create(tmp_path, KEEP_ALL)
    status = read_status(tmp_path) | {"host": "elsewhere", "pid": 2**22 + 1}
    (tmp_path / "status.json").write_text(json.dumps(status))
    with pytest.raises(ResultsError, match=r"going on .* on elsewhere"):
        RunDirectory.create(tmp_path, KEEP_ALL)


@pytest.mark.parametrize("content", ["", "[]", "{}", None])
def test_dead_or_unknown_run_is_not_mixed_with_a_new_one(tmp_path, content):
    RunDirectory.create(tmp_path, KEEP_ALL)
    if content is None:
        content = json.dumps(read_status(tmp_path) | {"pid": 2**22 + 1})
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(ResultsError, match=r"did not complete .status.json"):
        RunDirectory.create(tmp_path, KEEP_ALL)


def test_folder_with_other_files_is_fine(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "cbexp.log").write_text("")
    assert RunDirectory.create(tmp_path, KEEP_ALL).path == tmp_path


# Places that cannot be written


def test_folder_below_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match=r"cannot write .*run: Not a directory.*hydra.run.dir"):
        RunDirectory.create(tmp_path / "file" / "run", KEEP_ALL)


def test_unwritable_folder_is_a_clear_error(tmp_path):
    folder = Path("/proc/self/cbexp") if os.geteuid() == 0 else tmp_path / "locked" / "run"
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ResultsError, match="cannot write"):
        RunDirectory.create(folder, KEEP_ALL)
    with pytest.raises(ResultsError, match="Give a path that can be written"):
        check_writable(folder / "stats.json")


def test_check_writable_makes_parents_and_leaves_nothing(tmp_path):
    check_writable(tmp_path / "a" / "b" / "stats.json")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("place", ["/dev/null", "folder"])
def test_check_writable_refuses_folders_and_devices(tmp_path, place):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ResultsError, match="no regular file"):
        check_writable(tmp_path / place)


# Full disks


def test_full_device_is_told_with_what_was_kept(tmp_path):
    directory = RunDirectory.create(tmp_path, KEEP_ALL)
    append_round(directory, 0)
    append_round(directory, 1)
    (tmp_path / "steps.jsonl").unlink()
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        ResultsError, match=r"steps.jsonl: No space left.*MiB free there.*Kept: 2 whole round"
    ):
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
    written = []

    def fill() -> None:
        for index in range(1000):
            append_round(directory, index, text="x" * 997)
            written.append(index)

    with pytest.raises(ResultsError, match="No space left") as caught:
        fill()
    num_whole = len(written)
    assert f"Kept: {num_whole} whole round(s)" in str(caught.value)
    assert num_whole > 2
    for name, per_round in {"rounds": 1, "steps": 1, "requests": 2, "completions": 2}.items():
        rows, num_torn = read_jsonl(path / f"{name}.jsonl")
        assert num_torn == 0
        assert len(rows) >= num_whole * per_round
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={small_disk / 'rest'}", "bs=512"], stderr=subprocess.PIPE, check=False
    )
    directory.mark("failed", caught.value)
    status = read_status(path)
    assert (status["status"], status["error_class"]) == ("failed", "ResultsError")
    assert status["traceback_file"] is None


def test_cut_off_write_is_taken_back(tmp_path):
    """A real partial write: the process may only write files of up to 5,000 bytes."""
    script = """
        import resource, sys
        from pathlib import Path
        from cbexp.files import append_bytes
        path = Path(sys.argv[1])
        append_bytes(path, b'{"a": 1}\\n')
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        try:
            append_bytes(path, b"x" * 9000)
        except OSError as error:
            print(error.strerror)
    """
    done = run_script(script, tmp_path / "rows.jsonl")
    assert done.stdout.strip() == "File too large"
    assert (tmp_path / "rows.jsonl").read_text() == '{"a": 1}\n'


# Crashes


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def test_killed_process_leaves_whole_rounds(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from cbexp.artifacts import RunDirectory
        from cbexp.config import ArtifactsConfig
        sys.path.insert(0, sys.argv[2])
        from tests.test_artifacts import append_round
        directory = RunDirectory.create(Path(sys.argv[1]), ArtifactsConfig(completions="all"))
        for index in range(100_000):
            append_round(directory, index)
            print(index, flush=True)
    """
    root = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "run", root],
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if int(line) >= 5:
            break
    time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    rounds, _ = read_jsonl(tmp_path / "run" / "rounds.jsonl")
    assert [row["round_index"] for row in rounds] == list(range(len(rounds)))
    assert len(rounds) >= 6
    requests, _ = read_jsonl(tmp_path / "run" / "requests.jsonl")
    assert len(requests) >= 2 * len(rounds)
    with pytest.raises(ResultsError, match="did not complete"):
        RunDirectory.create(tmp_path / "run", KEEP_ALL)


def test_torn_last_line_is_skipped_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3')
    assert read_jsonl(path) == ([{"a": 1}, {"a": 2}], 1)
    path.write_text("")
    assert read_jsonl(path) == ([], 0)


def test_damage_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a":\n{"a": 3}\n')
    with pytest.raises(ResultsError, match="line 2 is no JSON"):
        read_jsonl(path)
