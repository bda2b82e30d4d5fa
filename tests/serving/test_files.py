"""Files that a user names: whatever a disk or a text does wrong is one message, and what stood there before is not lost."""

from __future__ import annotations

import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from serving.errors import InputError
from serving.files import parse_json, read_json_object, read_text, read_yaml, write_whole


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &x [1]\nb: [*x, *x]", r":1: anchors and aliases"),
        ("a: 1\nb: {c: 1, c: 2}", r":2: key 'c' is given twice"),
        ("a:\n\t- 1", r":2: is not valid YAML"),
        ("a: 2026-13-45", r"is not valid YAML: month"),
        ("a: " + "9" * 5000, r"is not valid YAML"),
        ("a: " + "[" * 100, r":1: nested deeper than 64"),
        ("? [1, 2]\n: 3", r":1: is not valid YAML: found unhashable key"),
        ("a: !!python/object:os.system x", r":1: is not valid YAML"),
        ("a: [1", r"is not valid YAML"),
    ],
)
def test_facts_in_yaml_that_is_loose_or_hostile(tmp_path, text, says):
    path = tmp_path / "facts.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"facts\.yaml.*{says}") as error:
        read_yaml(path)
    assert len(str(error.value)) < 400


def test_facts_may_have_dates_and_numbers_as_keys(tmp_path):
    path = tmp_path / "facts.yaml"
    path.write_text("\ufeffby_degree: {1: 2, 2: 3}\r\nmeasured: 2026-01-02\r\nlist: [{a: 1}, {a: 2}]\r\n", encoding="utf-8")
    assert read_yaml(path)["by_degree"] == {1: 2, 2: 3} and read_yaml(path)["measured"].year == 2026


@pytest.mark.parametrize(("path", "says"), [("/dev/zero", "larger than"), ("/", "Is a directory"), ("/no/such", "No such file")])
def test_what_cannot_be_read_as_text(path, says):
    with pytest.raises(InputError, match=says):
        read_text(Path(path))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": 1}\n}'])
def test_json_that_is_cut_short_or_hostile(text):
    with pytest.raises(InputError, match=r"f\.json:[78]: is not JSON"):
        parse_json(text, "f.json", first_line=7)


def test_a_list_is_no_object(tmp_path):
    (tmp_path / "f.json").write_text("[]")
    with pytest.raises(InputError, match="must hold one JSON object"):
        read_json_object(tmp_path / "f.json")


def test_a_disk_that_fills_leaves_what_was_there(tmp_path):
    path = tmp_path / "page.html"
    write_whole(path, "older")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(InputError, match=r"page\.html: cannot be written: .*large.*\(as before\)"):
            write_whole(path, b"x" * 100_000, "as before")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "older" and os.listdir(tmp_path) == ["page.html"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    write_whole(path, b"through")
    reader.join(timeout=10)
    assert got == [b"through"] and stat.S_ISFIFO(path.stat().st_mode)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "text"


@pytest.mark.parametrize("name", ["", "folder", "x" * 300, "file/below"])
def test_places_that_no_file_can_have(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / name, "text")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
