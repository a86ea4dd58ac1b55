"""Records of a run are read whatever is in the file."""

from __future__ import annotations

import pytest

from cbexp.run_status import read_json_object


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"status": "comp', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_what_is_no_json_object_is_none(tmp_path, content):
    (tmp_path / "status.json").write_bytes(content)
    assert read_json_object(tmp_path / "status.json") is None


def test_what_is_no_file_is_none(tmp_path):
    assert read_json_object(tmp_path) is None
    assert read_json_object(tmp_path / "none") is None


def test_an_object_is_itself(tmp_path):
    (tmp_path / "status.json").write_text('{"status": "running"}')
    assert read_json_object(tmp_path / "status.json") == {"status": "running"}
