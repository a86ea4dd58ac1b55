"""What the tests of W&B share: a machine without credentials, rounds to log, runs read back, and a server."""

from __future__ import annotations

import http.server
import json
import os
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator
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


def lose_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for a server that does not answer."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    wandb.teardown()


def a_round(index: int, is_warmup: bool = False) -> RoundRecord:
    requests = [metrics.RequestRecord(index, "r", "eos", 3, 4, 4, 0.5, 1.0, 1 / 3, 2.0, True, "d", None)]
    return metrics.summarize_round(index, is_warmup, 0.0, 1.0 + index / 7, requests, [], None)


def a_summary(**values: object) -> dict:
    return {"decode_tps": 100.0, "peak_reserved_gib": None, "peak_host_gib": 1.5, **values}


def start(run_dir: Path, mode: str = "offline", **options: object) -> Tracker:
    return start_tracking(TrackingConfig(mode=mode, **options), "seed=1", None, {"seed": 1}, run_dir)


class ReadBack:
    """What a run's file holds: its records by their kind."""

    def __init__(self, path: Path) -> None:
        self.records: dict[str, list] = defaultdict(list)
        for record in iterate_records(path):
            kind = record.WhichOneof("record_type")
            self.records[kind].append(getattr(record, kind))
        self.history = [_values(row.item) for row in self.records["history"]]
        self.summary, self.config = {}, {}
        for update in self.records["summary"]:
            self.summary |= _values(update.update)
        for update in [run.config for run in self.records["run"]] + self.records["config"]:
            self.config |= _values(update.update)

    @property
    def run(self) -> wandb_internal_pb2.RunRecord:
        return self.records["run"][-1]

    @property
    def exit_code(self) -> int:
        (end,) = self.records["exit"]
        return end.exit_code

    @property
    def rounds(self) -> list[int]:
        return [row["round"] for row in self.history if "wall_s" in row]


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
    (path,) = run_dir.glob(f"wandb/{folder}/*.wandb")
    return ReadBack(path)


def _values(items) -> dict:
    named = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
    return {name: value for name, value in named.items() if name not in ("", "_wandb")}


class FakeServer(http.server.BaseHTTPRequestHandler):
    """As much of a W&B server as runs need."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        answer = json.dumps(self.answer(json.loads(body)) if self.path.endswith("/graphql") else {})
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    do_GET = do_POST  # noqa: N815 - the standard library's way

    def answer(self, request: dict) -> dict:
        viewer = {"id": "v", "entity": "team", "username": "u", "email": "", "flags": "{}"}
        project = {"id": "p", "name": "project", "entity": {"id": "e", "name": "team"}}
        bucket = {"id": "x", "displayName": "n", "config": "{}", "project": project, "historyLineCount": 0}
        bucket["name"] = (request.get("variables") or {}).get("name")
        answers = {
            "query Viewer": {"viewer": viewer | {"teams": {"edges": []}}},
            "mutation CreateRunFiles": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}},
            "mutation UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": True}},
        }
        known = [answer for operation, answer in answers.items() if operation in request["query"]]
        return {"data": known[0] if known else {}}

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture(autouse=True)
def machine_without_credentials(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    wandb.teardown()  # what other tests of this process have set up
    yield
    wandb.teardown()


@pytest.fixture
def run_dir(tmp_path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def server(monkeypatch):
    """A server on this machine, with credentials for it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    wandb.teardown()
    yield server
    server.shutdown()
    server.server_close()
