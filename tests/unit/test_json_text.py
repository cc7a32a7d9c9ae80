"""Which files are read at all, by every loader; and objects that say a thing twice."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import sparseprefill as sp
from sparseprefill import json_text
from sparseprefill.errors import ParameterError
from sparseprefill.profiles import anchors, cluster_file

LOADERS: dict[str, Callable[[Any], object]] = {
    "profile": sp.Profile.load,
    "clusters": cluster_file.load,
    "anchors": anchors.load,
    "break-even table": sp.BreakEven.load,
    "configuration": sp.from_config,
    "parameter": lambda path: sp.build("kascade", anchors=str(path)),
}


@pytest.fixture(params=LOADERS)
def load(request: pytest.FixtureRequest) -> Callable[[Any], object]:
    return LOADERS[request.param]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(load: Callable[[Any], object], tmp_path: Path) -> None:
    path, said = tmp_path / "a.json", list[str]()
    os.mkfifo(path)
    writing = os.open(path, os.O_RDWR)  # so that a reader waits until it is closed

    def run() -> None:
        with pytest.raises(ParameterError) as caught:
            load(path)
        said.append(str(caught.value))

    thread = Thread(target=run)
    thread.start()
    thread.join(20)
    waits = thread.is_alive()
    os.close(writing)
    thread.join(20)
    assert not waits
    assert "is no regular file: pass the path of one" in said[0]
    assert str(path) in said[0]


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="needs devices")
def test_a_device_is_not_read(load: Callable[[Any], object], tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("/dev/null")
    with pytest.raises(ParameterError, match="is no regular file"):
        load(tmp_path / "a.json")


def test_a_file_has_a_size(load: Callable[[Any], object], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(json_text.MOST + 1)  # takes no room
    with pytest.raises(ParameterError, match=rf"has {json_text.MOST + 1} bytes: pass a file of at most"):
        load(path)


def test_the_largest_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    assert "abc" == json_text.read(tmp_path / "a", 3)
    with pytest.raises(ParameterError, match="has 3 bytes: pass a file of at most 2"):
        json_text.read(tmp_path / "a", 2)


@pytest.mark.parametrize("text", ['{"method": 1, "method": 1}', '[{"x": {"a": 1, "b": [], "\\u0061": 2}}]'])
def test_a_key_twice_is_an_error(load: Callable[[Any], object], text: str, tmp_path: Path) -> None:
    path, name = tmp_path / "a.json", "method" if "method" in text else "a"
    path.write_text(text)
    with pytest.raises(ParameterError, match=rf"a\.json.* has the key '{name}' twice in one object: remove one"):
        load(path)


def test_a_key_may_come_again_elsewhere() -> None:
    text = '{"a": {"a": 1}, "b": [{"a": 1}, {"a": 1}]}'
    assert json.loads(text) == json_text.parsed(text)
