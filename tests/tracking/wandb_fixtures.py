"""What the tests of W&B share: a clean machine, runs read back from their files, and a server on this machine."""

from __future__ import annotations

import http.server
import json
import os
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from cbexp import metrics
from cbexp.config import TrackingConfig
from cbexp.metrics import RoundRecord
from cbexp.tracking import Tracker, start_tracking

REPOSITORY = Path(__file__).parents[2]
KEY = "k" * 40


@contextmanager
def clean_machine(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """No credentials, no settings of wandb, its folders in `folder`; nothing of it is left running."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.delenv("NETRC", raising=False)
        for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            (folder / name).mkdir()
            patch.setenv(name, str(folder / name))
        yield patch
        wandb.teardown()


def lose_server(patch: pytest.MonkeyPatch) -> None:
    """Credentials for a server that does not answer."""
    patch.setenv("WANDB_API_KEY", KEY)
    patch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    patch.setenv("WANDB_INIT_TIMEOUT", "3")
    wandb.teardown()


def run_script(script: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=600, check=True, cwd=REPOSITORY)


def a_round(index: int, is_warmup: bool = False) -> RoundRecord:
    requests = [metrics.RequestRecord(index, "r", "eos", 3, 4, 4, 0.5, 1.0, 1 / 3, 2.0, True, "d", None)]
    return metrics.summarize_round(index, is_warmup, 0.0, 1.0 + index / 7, requests, [], None)


def a_summary(**values: object) -> dict:
    return {"decode_tps": 100.0, "peak_reserved_gib": None, "peak_host_gib": 1.5, **values}


def start(run_dir: Path, mode: str = "offline", **options: object) -> Tracker:
    return start_tracking(TrackingConfig(mode=mode, **options), "seed=1", None, {"seed": 1}, run_dir)


def make_sweep(folder: Path) -> Path:
    folder.mkdir()
    record = {"format": 1, "name": "modes", "created_at": "2026-01-02T03:04:05+00:00", "cells": []}
    (folder / "sweep.json").write_text(json.dumps(record))
    return folder


def make_cell(sweep_folder: Path, index: int, name: str | None = None) -> Path:
    folder = sweep_folder / (name or f"{index}_seed={index}")
    folder.mkdir(parents=True)
    (folder / "cell.json").write_text(json.dumps({"index": index, "cell_hash": f"hash{index}"}))
    return folder


@dataclass
class ReadBack:
    """What an offline run's file holds."""

    run: wandb_internal_pb2.RunRecord | None = None
    config: dict = field(default_factory=dict)
    history: list[dict] = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    metrics: list[wandb_internal_pb2.MetricRecord] = field(default_factory=list)
    artifacts: list[wandb_internal_pb2.ArtifactRecord] = field(default_factory=list)
    saved_files: set[str] = field(default_factory=set)
    system_metrics: set[str] = field(default_factory=set)
    exit_code: int | None = None


def iterate_records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """The records of a .wandb file: a LevelDB log (blocks of 32 KiB) behind a header of seven bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, record = 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if position > len(data):  # still being written
            return
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def read_back(run_dir: Path, folder: str = "offline-run-*") -> ReadBack:
    wandb.teardown()  # wandb's own process writes the last records after finish() has returned
    return read_so_far(run_dir, folder)


def read_so_far(run_dir: Path, folder: str = "offline-run-*") -> ReadBack:
    (path,) = run_dir.glob(f"wandb/{folder}/*.wandb")
    found = ReadBack()
    for record in iterate_records(path):
        _take(found, record)
    return found


def _take(found: ReadBack, record: wandb_internal_pb2.Record) -> None:
    match record.WhichOneof("record_type"):
        case "run":
            found.run = record.run
            found.config |= _settings(record.run.config.update)
        case "config":
            found.config |= _settings(record.config.update)
        case "history":
            found.history.append(_nested_values(record.history.item))
        case "summary":
            found.summary |= _nested_values(record.summary.update)
        case "artifact":
            found.artifacts.append(record.artifact)
        case "metric":
            found.metrics.append(record.metric)
        case "exit":
            found.exit_code = record.exit.exit_code
        case _:
            found.saved_files |= {item.path for item in record.files.files}
            found.system_metrics |= {item.key for item in record.stats.item}


def _settings(items) -> dict:
    return {item.key: json.loads(item.value_json) for item in items if item.key not in ("", "_wandb")}


def _nested_values(items) -> dict:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


class FakeServer(http.server.ThreadingHTTPServer):
    """As much of a W&B server as runs need; it keeps the history of each, and what it was told of them."""

    def __init__(self) -> None:
        self.history: dict[str, list[str]] = {}
        self.runs: dict[str, list[dict]] = {}
        self.artifacts: list[dict] = []
        self.exit_codes: dict[str, int] = {}
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def rows(self, run_id: str) -> list[dict]:
        """The history of a run, as its page would draw it."""
        return [json.loads(line) for line in self.history[run_id]]

    def take_stream(self, path: str, body: dict) -> None:
        run_id = path.split("/")[-2]
        lines = self.history.setdefault(run_id, [])
        if "wandb-history.jsonl" in body.get("files", {}):
            chunk = body["files"]["wandb-history.jsonl"]
            lines[chunk["offset"] :] = chunk["content"]
        if "exitcode" in body:
            self.exit_codes[run_id] = body["exitcode"]


class FakeHandler(http.server.BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        answer = json.dumps(self.answer(body)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST  # noqa: N815 - the standard library's way

    def answer(self, body: bytes) -> dict:
        if self.path.endswith("/file_stream"):
            self.server.take_stream(self.path, json.loads(body))
            return {}
        if not self.path.endswith("/graphql"):  # wandb's own telemetry
            return {}
        request = json.loads(body)
        variables = request.get("variables") or {}
        for operation, answer in ANSWERS.items():
            if operation in request.get("query", ""):
                return {"data": answer(self.server, variables)}
        return {"data": {}}

    def log_message(self, *_arguments: object) -> None:
        pass


PROJECT = {"id": "p", "name": "project", "entity": {"id": "e", "name": "team"}}


def _upsert_run(server: FakeServer, variables: dict) -> dict:
    is_new = variables["name"] not in server.runs
    server.runs.setdefault(variables["name"], []).append(variables)
    bucket = {"id": "x", "name": variables["name"], "displayName": "n", "config": "{}", "project": PROJECT}
    return {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": is_new}}


def _resume_status(server: FakeServer, variables: dict) -> dict:
    lines = server.history.get(variables["name"])
    bucket = {"id": "x", "name": variables["name"], "displayName": "n", "config": "{}"}
    bucket |= {"summaryMetrics": "{}", "logLineCount": 0, "eventsLineCount": 0, "tags": []}
    bucket |= {"historyLineCount": len(lines or []), "historyTail": json.dumps((lines or [])[-1:])}
    bucket |= {"eventsTail": "[]", "wandbConfig": '{"t": 1}'}
    return {"model": PROJECT | {"bucket": None if lines is None else bucket}}


def _create_artifact(server: FakeServer, variables: dict) -> dict:
    server.artifacts.append(variables["input"])
    artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"id": "s", "latestArtifact": None}}
    return {"createArtifact": {"artifact": artifact}}


def _viewer(_server: FakeServer, _variables: dict) -> dict:
    viewer = {"id": "v", "entity": "team", "username": "u", "email": "", "flags": "{}"}
    return {"viewer": viewer | {"teams": {"edges": []}}}


ANSWERS = {
    "mutation UpsertBucket": _upsert_run,
    "query RunResumeStatus": _resume_status,
    "mutation CreateArtifact": _create_artifact,
    "mutation CreateRunFiles": lambda *_: {
        "createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}
    },
    "query ArtifactType": lambda *_: {"project": None},
    "query Viewer": _viewer,
}
