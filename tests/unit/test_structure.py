"""Which files are read at all, by every loader; and objects that say a thing twice."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, ClassVar

import pytest
from attrs import field, frozen

import sparseprefill as sp
from sparseprefill import structure
from sparseprefill.errors import ParameterError
from sparseprefill.structure import KEY, Schema
from sparseprefill.validate import whole

TABLES = {name: method.table for name, method in sp.default_registry().methods().items() if method.table is not None}
LOADERS: dict[str, Callable[[Any], object]] = {
    "profile": sp.Profile.load,
    "clusters": TABLES["share-prefill"].read,
    "anchors": TABLES["kascade"].read,
    "break-even table": sp.BreakEven.load,
    "configuration": sp.from_config,
    "parameter": lambda path: sp.build("kascade", anchors=str(path)),
}


@pytest.fixture(params=LOADERS)
def load(request: pytest.FixtureRequest) -> Callable[[Any], object]:
    return LOADERS[request.param]


def test_no_name_is_no_file(load: Callable[[Any], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a path it would be the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParameterError, match="''") as caught:
        load("")
    assert "irectory" not in str(caught.value)


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
        file.truncate(structure.MOST + 1)  # takes no room
    with pytest.raises(ParameterError, match=rf"has {structure.MOST + 1} bytes: pass a file of at most"):
        load(path)


def test_the_largest_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    assert "abc" == structure.read(tmp_path / "a", 3)
    with pytest.raises(ParameterError, match="has 3 bytes: pass a file of at most 2"):
        structure.read(tmp_path / "a", 2)


@pytest.mark.parametrize("text", ['{"method": 1, "method": 1}', '[{"x": {"a": 1, "b": [], "\\u0061": 2}}]'])
def test_a_key_twice_is_an_error(load: Callable[[Any], object], text: str, tmp_path: Path) -> None:
    path, name = tmp_path / "a.json", "method" if "method" in text else "a"
    path.write_text(text)
    with pytest.raises(ParameterError, match=rf"a\.json.* has the key '{name}' twice in one object: remove one"):
        load(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"[]", r"(the (file|configuration) is \[\]|clusters is list|anchors is empty)"),
        (b"\xff\xfe", "is not a text file"),
        (b"[" * 100000, "is nested too deeply"),
        (b"1" * 5000, r"is not JSON \(Exceeds the limit"),
    ],
    ids=["half", "list", "UTF-16", "nested", "long integer"],
)
def test_what_is_no_table(load: Callable[[Any], object], content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ParameterError, match=rf"a\.json.*{words}"):
        load(tmp_path / "a.json")


def test_a_path_leads_to_a_file(load: Callable[[Any], object], tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"none\.json.*No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(ParameterError, match=r"is not a path \(embedded null byte\)"):
        load("a\0b.json")


def test_a_key_may_come_again_elsewhere() -> None:
    text = '{"a": {"a": 1}, "b": [{"a": 1}, {"a": 1}]}'
    assert json.loads(text) == structure.parsed(text)


@frozen
class Pair:
    share: float
    number: int = field(validator=whole(1))


@frozen(kw_only=True)
class Inner:
    least: int = field(validator=whole(0), metadata={KEY: "from"})
    name: str | None = None


@frozen(kw_only=True)
class Outer:
    SCHEMA: ClassVar = Schema("test.outer", 3, "write it anew")

    inner: tuple[Inner, ...]
    pairs: tuple[Pair, ...] = ()
    by_layer: Mapping[int, tuple[Annotated[int, whole(0)], ...]] = field(factory=dict)
    free: Mapping[str, Any] = field(factory=dict)


GOOD: dict[str, Any] = {
    **{"schema": "test.outer", "version": 3, "inner": [{"from": 2, "name": None}]},
    **{"pairs": [{"share": 1, "number": 2}], "by_layer": {"4": [1, 2]}, "free": {"any": [1.5, "x", None]}},
}


def test_what_is_written_is_read() -> None:
    made = structure.structure(Outer, GOOD)
    assert Outer(inner=(Inner(least=2),), pairs=(Pair(1.0, 2),), by_layer={4: (1, 2)}, free=GOOD["free"]) == made
    assert isinstance(made.pairs[0].share, float)
    assert GOOD == structure.unstructure(made)
    assert made == structure.structure(Outer, json.loads(structure.by_lines(made)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 4}, "version is 4: this library reads 3; write it anew"),
        ({"inner": 1}, "inner is 1: pass a list"),
        ({"inner": [1]}, r"inner\[0\] is 1: give a table"),
        ({"inner": [{"from": -1, "name": None}]}, r"inner\[0\].from is -1: pass an integer >= 0"),
        ({"inner": [{"from": 1, "name": 2}]}, r"inner\[0\].name is 2: pass a string"),
        ({"inner": [{"from": 1}]}, r"inner\[0\].name is missing: add it"),
        ({"inner": [{"form": 1, "name": None}]}, r"inner\[0\].form is unknown; did you mean 'from'\?"),
        ({"pairs": [{"share": True, "number": 1}]}, r"pairs\[0\].share is True: pass a number"),
        ({"pairs": [{"share": 1.0, "number": 0}]}, r"pairs\[0\].number is 0: pass an integer >= 1"),
        ({"by_layer": {"04": []}}, "by_layer has the key '04': pass an integer from 0"),
        ({"by_layer": {"4": 1}}, r"by_layer\[4\] is 1: pass a list"),
        ({"free": {"a": [float("nan")]}}, r"free.a\[0\] is nan: pass a finite number"),
    ],
)
def test_what_does_not_fit_is_named_with_its_path(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        structure.structure(Outer, {**GOOD, **change})
