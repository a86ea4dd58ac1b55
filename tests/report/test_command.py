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

COMMAND = [sys.executable, "-m", "cbexp.report"]


@pytest.fixture
def sweep(make_run, tmp_path):
    make_run("sweep/0", ["model=tiny", "compile=eager"], walls_s=(2.0, 2.0, 2.0), accuracy=0.5)
    make_run("sweep/1", ["model=tiny", "compile=default"], walls_s=(1.0, 1.25, 1.0))
    overrides = ["model=tiny", "compile=cuda_graph"]
    make_run("sweep/2", overrides, status="out_of_memory", message="2 GiB\ntoo much")
    return tmp_path / "sweep"


def test_table_is_sorted_by_throughput_with_all_columns(sweep):
    lines = format_table(load_runs([sweep])).splitlines()
    first = " ".join(lines[2].split())
    assert first == "1 compile=default completed 100 ±10.0% 2.00x 1.50 GiB 50.0% -"
    assert lines[3].split()[1:3] + lines[3].split()[-1:] == ["compile=eager", "completed", "50.0%"]
    assert lines[4].split()[1:3] == ["compile=cuda_graph", "out_of_memory"]
    assert lines[-1] == "ratio to #2, compile=eager (the slowest)"


def test_failures_have_their_reason_and_folder(sweep):
    text = format_report(load_runs([sweep]))
    assert "out_of_memory: compile=cuda_graph\n  2 GiB\n  too much\n" in text
    assert str(sweep / "2") in text


@pytest.mark.parametrize(
    ("peaks", "shown"),
    [
        ({"peak_allocated_gib": None, "roofline_fraction": None}, "0.50 GiB host"),
        # vLLM's allocator is in another process: what is known is what it took in all.
        ({"peak_allocated_gib": None, "peak_reserved_gib": 112.5}, "112.50 GiB reserved"),
    ],
)
def test_memory_is_named_by_its_kind(make_run, peaks, shown):
    assert shown in format_table(load_runs([make_run("one", **peaks)]))


def test_text_that_looks_like_the_terminals_markup_stays_text(make_run):
    text = format_table(load_runs([make_run("1", ["name2=[red]x[/red]"]), make_run("2", ["seed=\x1b"])]))
    assert "name2=[red]x[/red]" in text
    assert "\x1b" not in text


def test_csv_and_json_have_every_figure(sweep, tmp_path, capsys):
    assert main([str(sweep), "--csv", str(tmp_path / "a.csv"), "--json", str(tmp_path / "new/a.json")]) == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    objects = json.loads((tmp_path / "new/a.json").read_text())
    assert [row["label"] for row in rows] == [row["label"] for row in objects]
    assert float(rows[0]["output_tokens_per_s"]) == objects[0]["output_tokens_per_s"] == 100.0
    assert rows[2]["output_tokens_per_s"] == "" and objects[2]["output_tokens_per_s"] is None
    assert objects[0]["ratio_low"] <= objects[0]["ratio"] <= objects[0]["ratio_high"]
    assert objects[0]["command"] == "python -m cbexp model=tiny compile=default"
    capsys.readouterr()
    assert main([str(sweep), "--csv", "-"]) == 0
    assert list(csv.DictReader(io.StringIO(capsys.readouterr().out))) == rows  # and nothing else


def test_markdown_escapes_what_would_be_markup(make_run, capsys):
    folder = make_run("1", ["seed=a|b*c"])
    assert main([str(folder), str(make_run("2", ["seed=2"])), "--markdown", "-"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].count("|") == lines[0].count("|")
    assert any(r"seed=a\|b\*c" in line for line in lines)


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
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out
    assert not list(empty.iterdir())


def test_page_without_plotly_says_how_to_get_it(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main([str(sweep), "--html", str(tmp_path / "a.html")]) == 2
    assert "pip install 'cbexp[report]'" in capsys.readouterr().err


# In a process of its own


def test_reader_that_leaves_is_no_error(sweep):
    with subprocess.Popen([*COMMAND, sweep], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=600) == 0


def test_names_that_are_no_text_are_shown_and_written(make_run, tmp_path):
    """Names of folders are bytes, JSON may hold half of a pair, and a terminal may know ASCII alone."""
    make_run(os.fsdecode(b"night\xff"), ["model=tiny"])
    make_run("other", ["model=\ud800"])
    files = {name: tmp_path / name for name in ("html", "csv", "json", "markdown")}
    command = [*COMMAND, tmp_path, *(f"--{name}={path}" for name, path in files.items())]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"model=tiny" in done.stdout
    assert all("model=tiny" in path.read_text(encoding="utf-8") for path in files.values())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [[], ["--csv", "-"]])
def test_output_that_finds_no_room_is_one_message(sweep, arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, sweep, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("cbexp.report: the output cannot be written: ")
    assert len(done.stderr.splitlines()) == 1
