"""What the command prints and writes: the table, the files, and errors that say what would be right."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbexp.report import format_report, format_table, load_runs
from cbexp.report.command_line import main
from cbexp.report.numbers_of_rows import format_numbers


@pytest.fixture
def sweep(make_run, tmp_path):
    make_run("sweep/0", ["model=tiny", "compile=eager"], walls_s=(2.0, 2.0, 2.0), accuracy=0.5)
    make_run("sweep/1", ["model=tiny", "compile=default"], walls_s=(1.0, 1.25, 1.0))
    make_run(
        "sweep/2", ["model=tiny", "compile=cuda_graph"], status="out_of_memory", message="2 GiB\ntoo much"
    )
    return tmp_path / "sweep"


def test_table_is_sorted_by_throughput_with_all_columns(sweep):
    lines = format_table(load_runs([sweep])).splitlines()
    assert [line.split()[1] for line in lines[2:5]] == [
        "compile=default",
        "compile=eager",
        "compile=cuda_graph",
    ]
    fields = lines[2].split()
    assert fields == [
        "1",
        "compile=default",
        "completed",
        "100",
        "±10.0%",
        "2.00x",
        "1.50",
        "GiB",
        "50.0%",
        "-",
    ]
    assert "50.0%" in lines[3].split()[-1]
    assert lines[4].split()[2] == "out_of_memory"
    assert lines[-1] == "ratio to #2, compile=eager (the slowest)"


def test_report_tells_failures_with_reason_and_folder(sweep):
    text = format_report(load_runs([sweep]))
    assert "out_of_memory: compile=cuda_graph\n  2 GiB\n  too much\n" in text
    assert str(sweep / "2") in text


def test_other_work_is_marked_in_place_of_a_ratio(sweep, make_run):
    other = make_run("other", ["seed=9"], workload_hash="b" * 64)
    text = format_table(load_runs([sweep, other]), "compile=eager")
    assert "other work" in next(line for line in text.splitlines() if "seed=9" in line)
    assert "2 different works" in text


def test_host_memory_is_told_from_device_memory(make_run):
    text = format_table(load_runs([make_run("cpu", peak_allocated_gib=None, roofline_fraction=None)]))
    assert "0.50 GiB host" in text


def test_what_a_peer_took_of_the_device_is_its_memory(make_run):
    """vLLM's allocator is in another process: what is known is what it took in all."""
    run = make_run("vllm", peak_allocated_gib=None, peak_reserved_gib=112.5)
    assert "112.50 GiB reserved" in format_table(load_runs([run]))


def test_text_that_looks_like_the_terminals_markup_stays_text(make_run):
    text = format_table(load_runs([make_run("1", ["name2=[red]x[/red]"]), make_run("2", ["seed=\x1b"])]))
    assert "name2=[red]x[/red]" in text
    assert "\x1b" not in text


def test_csv_and_json_have_every_figure(sweep, tmp_path):
    assert main([str(sweep), "--csv", str(tmp_path / "a.csv"), "--json", str(tmp_path / "new/a.json")]) == 0
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    objects = json.loads((tmp_path / "new/a.json").read_text())
    assert [row["label"] for row in rows] == [row["label"] for row in objects]
    assert float(rows[0]["output_tokens_per_s"]) == objects[0]["output_tokens_per_s"] == 100.0
    assert rows[2]["output_tokens_per_s"] == "" and objects[2]["output_tokens_per_s"] is None
    assert objects[0]["ratio_low"] <= objects[0]["ratio"] <= objects[0]["ratio_high"]
    assert objects[0]["command"] == "python -m cbexp model=tiny compile=default"


def test_markdown_escapes_what_would_be_markup(make_run, capsys):
    folder = make_run("1", ["seed=a|b*c"])
    assert main([str(folder), str(make_run("2", ["seed=2"])), "--markdown", "-"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].count("|") == lines[0].count("|")
    assert any(r"seed=a\|b\*c" in line for line in lines)


def test_stdout_holds_the_file_alone(sweep, capsys):
    assert main([str(sweep), "--csv", "-"]) == 0
    assert len(list(csv.reader(io.StringIO(capsys.readouterr().out)))) == 4


def test_row_numbers_are_told_shortly():
    assert format_numbers([3, 1, 2, 7]) == "#1-3, #7"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{sweep}/none"], "is not there"),
        (["{empty}"], "no runs"),
        (["{sweep}", "--baseline", "compile=x"], "fits no completed run"),
        (["{sweep}", "--csv", "{empty}"], "cannot write"),
        (["{sweep}", "--csv", "{sweep}/0/cell.json/a.csv"], "cannot write"),
        (["{sweep}", "--html="], "cannot write"),
        (["{sweep}", "--html", "/"], "cannot write"),
        (["{sweep}", "--json", "/dev/null"], "no regular file"),
        (["{sweep}", "--csv", "-", "--json", "-"], "--csv and --json both go to -"),
        (["{sweep}", "--html", "{empty}/a", "--markdown", "{empty}/a"], "--html and --markdown both go to"),
    ],
)
def test_what_cannot_be_done_says_why(sweep, tmp_path, capsys, arguments, message):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main([word.format(sweep=sweep, empty=empty) for word in arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert not said.out
    assert not list(empty.iterdir())


def test_page_without_plotly_says_how_to_get_it(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main([str(sweep), "--html", str(tmp_path / "a.html")]) == 2
    assert "pip install 'cbexp[report]'" in capsys.readouterr().err


def test_command_runs_as_a_module_and_survives_a_reader_that_leaves(sweep):
    command = [sys.executable, "-m", "cbexp.report", str(sweep)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "compile=default" in done.stdout
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_names_that_are_no_text_are_shown_and_written(make_run, tmp_path):
    """Names of folders are bytes, JSON may hold half of a pair, and a terminal may know ASCII alone."""
    run = make_run(os.fsdecode(b"night\xff"), ["model=tiny"])
    make_run("other", ["model=\ud800"])
    files = [f"--{name}={tmp_path / name}" for name in ("html", "csv", "json", "markdown")]
    command = [sys.executable, "-m", "cbexp.report", str(tmp_path), *files]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"model=tiny" in done.stdout
    for name in ("html", "csv", "json", "markdown"):
        assert "model=tiny" in (tmp_path / name).read_text(encoding="utf-8")
    assert run.is_dir()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [[], ["--csv", "-"]])
def test_output_that_finds_no_room_is_one_message(sweep, arguments):
    command = [sys.executable, "-m", "cbexp.report", str(sweep), *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "cbexp.report: the output cannot be written: No space left on device.\n"
