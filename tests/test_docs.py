"""README.md and docs/: commands and snippets run, links and names are real, figures are those of the records.

A fenced block is run, unless its info string says what it needs that a test does not have, as in ```bash gpu. Commands
of such a block are composed and checked, and no more. A block of yaml is the file that its comment names.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, get_type_hints

import pytest

from cbexp.cli.command_line import conf_dir, main
from cbexp.cli.composer import parse_arguments, register_job_folder, register_no_experiment
from cbexp.cli.preflight import check_command
from cbexp.config import ExperimentConfig, register_schema
from cbexp.engine import CBSyncConfig, Sampling
from cbexp.planning.dry_run import summarize_dry_run
from cbexp.report.command_line import main as report_main

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = {"gpu", "vllm", "slurm", "account", "network"}
REPORT = ["python", "-m", "cbexp.report"]
# These only show something.
SHOWING = {"--help", "--cfg", "--version"}
# What stands for a place of the reader's.
PLACES = {"/path/to/vllm/bin/python": sys.executable, "/path/to/vllm": str(TESTS / "fake_vllm")}
# The scripts are tested by tests/test_scripts.py and need a checkout of their own.
STAND_INS = {
    "scripts/run": 'exec python -P -m cbexp "$@"',
    "scripts/test": f'cd {shlex.quote(str(ROOT))} && exec python -m pytest --collect-only --quiet "$@" > /dev/null',
    ".venv/bin/activate": "",
}


class Block(NamedTuple):
    """A fenced block; `line` is that of its first fence."""

    document: Path
    line: int
    language: str
    needs: frozenset[str]
    text: str

    @property
    def place(self) -> str:
        return f"{self.document.name}:{self.line}"


def read_blocks(document: Path) -> list[Block]:
    text, blocks = document.read_text(), []
    for fence in re.finditer(r"^```(.*)\n((?s:.*?))^```$", text, re.MULTILINE):
        language, *needs = fence[1].split() or [""]
        line = text[: fence.start()].count("\n") + 1
        blocks.append(Block(document, line, language, frozenset(needs), fence[2]))
    return blocks


def read_prose(document: Path) -> str:
    """The document without its fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", document.read_text())


def read_commands(block: Block) -> list[list[str]]:
    """The words of each command, the places of the reader filled in."""
    text = block.text.replace("\\\n", " ")
    for place, path in PLACES.items():
        text = text.replace(place, path)
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words for words in commands if words]


BLOCKS = {document: read_blocks(document) for document in DOCUMENTS}


def blocks_of(document: Path, language: str) -> list[Block]:
    return [block for block in BLOCKS[document] if block.language == language]


def by_document(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("document", paths, ids=lambda path: path.name)


def documents_with(language: str) -> list[Path]:
    return [document for document in DOCUMENTS if blocks_of(document, language)]


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder like a checkout whose outputs are nobody else's; the tests of a document run in it."""
    for name in ("cbexp", "conf", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "outputs/reference", tmp_path / "outputs/reference")
    for name, text in STAND_INS.items():
        script = tmp_path / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"{text}\n")
        script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_files(document: Path) -> None:
    """Write each block of yaml to the path in its first comment, below the current folder."""
    for block in blocks_of(document, "yaml"):
        named = re.search(r"^# (\S+\.yaml)$", block.text, re.MULTILINE)
        assert named, f"{block.place}: a block of yaml begins with a comment that names its file"
        path = Path(named[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)


# What the documents are made of


def test_the_readme_links_every_document():
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/{path.name}" for path in DOCUMENTS[1:]}


@by_document(DOCUMENTS)
def test_a_block_is_fenced_and_says_what_it_is_and_what_it_needs(document):
    for block in BLOCKS[document]:
        assert block.language in {"bash", "python", "yaml", "text"}, block.place
        assert block.needs <= NEEDS, block.place
    for block in blocks_of(document, "text"):
        commands = re.findall(r"^\s*(?:python|pip|\./scripts|wandb|cbexp) ", block.text, re.MULTILINE)
        assert not commands, block.place
    # What is only indented would be run by nobody.
    assert "```" not in read_prose(document)
    assert re.findall(r"^\n( {4,}\S.*)$", read_prose(document), re.MULTILINE) == []


@by_document(DOCUMENTS)
def test_links_and_files_that_are_named_are_there(document):
    prose = read_prose(document)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose):
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), target
        assert not anchor or anchor in list_anchors(path), target
    known = r"(?:cbexp|conf|docs|outputs/reference|scripts|tests|\.ci)/[\w./-]*"
    for path in re.findall(rf"`({known})`", prose):
        assert (ROOT / path).exists() or document.name == "changes.md", path  # it speaks of what is gone


def list_anchors(document: Path) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", read_prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Names of settings


SCHEMA = get_type_hints(ExperimentConfig)
GROUPS = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()} - {"hydra"}


# The others speak of Python's objects (`driver.steps`) and of what is gone.
@by_document([path for path in DOCUMENTS if path.name not in ("training.md", "changes.md")])
def test_settings_and_choices_that_are_named_exist(document):
    for span in re.findall(r"`([^`\n]+)`", read_prose(document)):
        for word in span.split():
            key, _, value = word.partition("=")
            group, _, setting = key.partition(".")
            if group in SCHEMA and re.fullmatch(r"[a-z_]+", setting):
                assert setting in get_type_hints(SCHEMA[group]), word
            elif key in GROUPS and re.fullmatch(r"[\w,]+", value):
                choices = {path.stem for path in (ROOT / "conf" / key).iterdir()}
                assert set(value.split(",")) <= choices, word


def test_training_lists_every_setting_of_the_driver():
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", (ROOT / "docs/training.md").read_text(), re.MULTILINE)
    documented = [row for row in rows if not row[0].endswith("Error")]
    settings = [field for settings in (Sampling, CBSyncConfig) for field in dataclasses.fields(settings)]
    assert sorted(documented) == sorted(
        (field.name, repr(field.default).replace("'", '"')) for field in settings
    )


# Figures


@by_document(DOCUMENTS)
def test_throughputs_are_those_of_the_records(document):
    found = re.findall(r"([\d,]{3,})(?:\*\*)? \(([\d,]+) to ([\d,]+)\)", document.read_text())
    summaries = (ROOT / "outputs/reference").glob("*/*/summary.json")
    measured = [json.loads(path.read_text())["output_tokens_per_s"] for path in summaries]
    parts = ("median", "min", "max")
    assert set(found) <= {tuple(f"{rates[part]:,.0f}" for part in parts) for rates in measured}
    if document.name in ("README.md", "benchmarks.md"):
        assert found


def test_step_times_are_those_of_the_records():
    names = {"qwen3_0_6b": "Qwen3-0.6B", "qwen3_4b": "Qwen3-4B", "qwen3_8b": "Qwen3-8B"}
    rows = json.loads((ROOT / "outputs/reference/steps_h200/steps.json").read_text())["rows"]
    measured = []
    for row in rows:
        name = f" {names.pop(row['model'])}" if row["model"] in names else ""  # in its first row alone
        share = f"{row['roofline_fraction']:.0%}".replace("%", " %")
        figures = f"{row['step_ms']:.2f} ms | {row['floor_ms']:.2f} ms | {share}"
        measured.append(f"|{name} | {row['batch']} | {row['context']:,} | {figures} |")
    assert "\n".join(measured) in (ROOT / "docs/benchmarks.md").read_text()


# Commands and snippets


@by_document(documents_with("bash"))
def test_commands_are_right(document, checkout, monkeypatch):
    """Every command of the document in this process: single runs as dry runs, sweeps and marked ones composed."""
    write_files(document)
    monkeypatch.setenv("PATH", f"{TESTS / 'sweep/fake_slurm'}{os.pathsep}{os.environ['PATH']}")
    for block in blocks_of(document, "bash"):
        for words in read_commands(block):
            try:
                check_words(words, block.needs)
            except BaseException as error:
                error.add_note(f"{block.place}: {shlex.join(words)}")
                raise


def check_words(words: list[str], needs: frozenset[str]) -> None:
    if words[:3] == ["python", "-m", "cbexp"]:
        try_cbexp(words[3:], needs)
    elif words[0] == "./scripts/run":
        try_cbexp(words[1:], needs)
    elif words[:3] == REPORT:
        try_report(words[3:])
    elif words[0] == "python" and words[1].startswith("scripts/"):
        for flag in (word for word in words if word.startswith("--")):
            assert f'"{flag}"' in (ROOT / words[1]).read_text(), flag
    elif words[0] == "echo" and not needs:
        subprocess.run(["bash", "-c", f"echo {shlex.quote(words[1])} > {words[3]}"], check=True, timeout=60)
    else:  # a real run makes sure of the rest
        assert needs or words[0] in ("source", "./scripts/test"), "nothing checks it: mark the block"


def try_cbexp(overrides: list[str], needs: frozenset[str]) -> None:
    if SHOWING & set(overrides):
        try:
            main(overrides)
        except SystemExit as end:
            if end.code:
                raise
    else:
        register_schema()
        register_job_folder()
        register_no_experiment()
        command = check_command(parse_arguments(overrides), conf_dir())
        if not needs and not command.is_multirun:
            summarize_dry_run(command.jobs[0].config)


def try_report(arguments: list[str]) -> None:
    """The report of the folders that are named; records stand for what earlier commands would have left."""
    for path in [Path(word) for word in arguments if word.startswith("outputs/")]:
        if next(path.rglob("status.json"), None) is None:
            shutil.copytree(ROOT / "outputs/reference/drivers_h200", path, dirs_exist_ok=True)
    assert report_main(arguments) == 0


@pytest.mark.parametrize("has_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
@by_document(documents_with("python"))
def test_snippets_run(document, checkout, has_gpu):
    """One after the other, as a reader would."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(document, "python"):
        if block.needs <= ({"gpu"} if has_gpu else set()):
            exec(compile("\n" * block.line + block.text, str(document), "exec"), names)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@by_document(documents_with("bash"))
def test_commands_run(document, checkout):
    """Every unmarked block in a shell, in order, in one folder."""
    write_files(document)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks_of(document, "bash"):
        if not block.needs:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=checkout,
                env=os.environ | {"PATH": path, "HOME": str(checkout)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=1500,
            )
            assert done.returncode == 0, f"{block.place}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
