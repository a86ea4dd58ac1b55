"""What counts as changed code: the record of a run and the resumption of a sweep mean the same by it."""

import subprocess

import pytest

from cbexp.provenance import describe_source, hash_changes

UNKNOWN = {"commit": None, "is_dirty": None}


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    for folder in ("cbexp", "conf", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("one")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def is_changed(root):
    """Whether it is, by the record and by the hash, which have to agree."""
    by_record, by_hash = describe_source(root)["is_dirty"], hash_changes(root) != ""
    assert by_record is by_hash
    return by_record


@pytest.mark.parametrize("name", ["cbexp/file", "conf/experiment/new.yaml"])
def test_code_and_choices_count_tracked_or_not(checkout, name):
    assert len(describe_source(checkout)["commit"]) == 40
    assert not is_changed(checkout)
    path = checkout / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("two")
    assert is_changed(checkout)
    before = hash_changes(checkout)
    path.write_bytes(b"caf\xe9")  # not of Unicode
    assert hash_changes(checkout) not in (before, "")


def test_anything_else_does_not_and_staged_and_removed_files_do(checkout):
    for name in ("tests/file", "tests/new", "notes", "conf/ignored"):
        (checkout / name).write_text("two")
    assert not is_changed(checkout)
    (checkout / "conf/new").write_text("one")
    git(checkout, "add", "conf/new")
    assert is_changed(checkout)
    git(checkout, "rm", "-q", "-f", "conf/new")
    assert not is_changed(checkout)
    (checkout / "cbexp/file").unlink()
    assert is_changed(checkout)


def test_without_a_checkout_or_git_nothing_is_known(checkout, monkeypatch):
    (checkout / "site-packages").mkdir()  # a package that is installed inside a checkout
    assert describe_source(checkout / "site-packages") == UNKNOWN
    assert hash_changes(checkout / "site-packages") is None
    monkeypatch.setenv("PATH", "")
    assert describe_source(checkout) == UNKNOWN
