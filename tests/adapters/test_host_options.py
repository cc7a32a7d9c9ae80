"""Options of hosts are declared once: what `attach` and a server's table take is what a session has."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict, evolve, fields, fields_dict
from sparseprefill.adapters.huggingface.api import attach
from sparseprefill.adapters.serving.model import Model
from sparseprefill.adapters.serving.options import OWN, Settings, read_table
from sparseprefill.adapters.serving.runtime import Runtime
from sparseprefill.adapters.serving.tally import Owner
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.session import Session

import sparseprefill as sp
from helpers.hf_models import STREAMING, build
from sparseprefill.profiles.identity import ModelIdentity

OPTIONS = fields_dict(HostOptions)
GIVEN: dict[str, Any] = {
    "min_query": 40, "layers": (1,), "strict": True, "measure": True, "tail": 5, "recall_every": 3,
    "strict_recall": 0.5, "skip_unread": True,
}  # fmt: skip


def test_every_option_is_tried_here() -> None:
    assert set(OPTIONS) == set(GIVEN)


@pytest.mark.parametrize("name", OPTIONS)
def test_attach_takes_each_with_its_default(name: str) -> None:
    parameter = inspect.signature(attach).parameters[name]
    assert parameter.default == OPTIONS[name].default
    assert parameter.kind is parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", OPTIONS)
def test_attach_hands_each_to_its_session(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[HostOptions] = []
    made = Session.__init__

    def noted(self: Session, pipeline: Any, options: HostOptions, **more: Any) -> None:
        seen.append(options)
        made(self, pipeline, options, **more)

    monkeypatch.setattr(Session, "__init__", noted)
    more: dict[str, Any] = {"recall_every": 3} if name == "strict_recall" else {}
    attach(build("llama"), "streaming", verify=False, **{name: GIVEN[name]}, **more, **STREAMING).detach()
    assert evolve(HostOptions(), **{name: GIVEN[name]}, **more) == seen[0]


def test_a_servers_table_takes_all_of_them() -> None:
    assert set(OPTIONS) < set(OWN)
    table = {**GIVEN, "layers": [1]}
    found = read_table({"method": "streaming", **table})
    assert isinstance(found, HostOptions)
    assert GIVEN == {name: value for name, value in asdict(found, recurse=False).items() if name in GIVEN}
    usual = {name: one.default for name, one in fields_dict(Settings).items() if name in OPTIONS}
    assert {name: one.default for name, one in OPTIONS.items()} == {**usual, "min_query": 16}, (
        "a chunk of a server is longer"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_query": 1}, "min_query is 1: pass an integer from 2, so that decoding stays dense"),
        ({"layers": [3, -1]}, r"layers is \[3, -1\]: pass indices from 0"),
        ({"tail": -1}, "tail is -1: pass a number of query rows from 0"),
        ({"strict": 1}, "strict is 1: pass (True or False|true or false)$"),
        ({"strict_recall": 2}, "strict_recall is 2: pass a number from 0 to 1"),
        ({"recall_every": -1}, "recall_every is -1: pass N"),
        ({"strict_recall": 0.5, "recall_every": 0}, "strict_recall is 0.5, but .*recall_every is 0"),
    ],
)
def test_wrong_ones_are_told_alike(options: dict[str, Any], words: str) -> None:
    with pytest.raises(sp.ParameterError, match=f"^{words}"):
        Session(sp.build("streaming"), HostOptions(**options))
    with pytest.raises(sp.ParameterError, match=rf"^sparseprefill\.{words}"):
        read_table({"method": "streaming", **options})


FLAGS = [one.name for one in fields(Settings) if "bool" in str(one.type)]


@pytest.mark.parametrize("table", [
    *[{name: wrong} for name in FLAGS for wrong in (1, 0, "yes", "True or False")],
    {"method": "xattention", "parameters": {"sink": 1}},
    {"method": "anchor-attention", "parameters": {"use_anchor": "yes"}},
    {"method": "star-attention", "parameters": {"inner": {"method": "rowmax", "parameters": {"sink": 1}}}},
    {"union": [{"method": "dense"}, {"method": "rowmax", "parameters": {"sink": 0}}]},
    {"profiles": {"other": {"method": "rowmax", "parameters": {"sink": 0}}}},
], ids=str)  # fmt: skip
def test_who_writes_json_is_told_of_json(table: dict[str, Any], tmp_path: Path) -> None:
    def told(make: Callable[[], object]) -> str:
        with pytest.raises(sp.ParameterError) as caught:
            make()
        return str(caught.value)

    def start(given: dict[str, Any]) -> None:
        found = read_table(given)
        for source in (found.source, *found.profiles.values()):
            source.build()

    (tmp_path / "a.json").write_text(json.dumps(table))
    asked = table if {"method", "union"} & set(table) else {"method": "streaming", **table}
    said = [told(lambda: start(asked))]
    if {"parameters", "union"} & set(table):
        said += [
            told(lambda: sp.from_config(tmp_path / "a.json")),
            told(lambda: start({"config": str(tmp_path / "a.json")})),
        ]
    assert ["true or false"] * len(said) == [text.rpartition("pass ")[2] for text in said]


def test_null_is_for_json_and_none_for_python() -> None:
    for table, remedy in (
        ({"strict_recall": 2}, "pass a number from 0 to 1, or null"),
        ({"layers": []}, r"such as \[4, 5, 6\], or null for all"),
        ({"method": "rowmax", "parameters": {"width": 3}}, "or null for tiles of block keys"),
        ({"method": "flexprefill", "parameters": {"max_budget": 3}}, "1024, or null"),
    ):
        with pytest.raises(sp.ParameterError, match=remedy):
            read_table({"method": "streaming", **table}).build()
    with pytest.raises(sp.ParameterError, match="or None for tiles of block keys"):
        sp.build("rowmax", width=3)
    with pytest.raises(sp.ParameterError, match="is None: pass an integer"):
        read_table({"method": "streaming", "layers": [None]})  # a value stands as it is


def test_a_server_refuses_at_its_start_and_falls_back_at_work() -> None:
    """Its `strict` is of the start alone, and the rest is its sessions'."""
    whole = ModelIdentity(name="m", architecture="M", layers=2, heads=4, kv_heads=2, head_dim=8, digest="0" * 16)
    table = {"method": "streaming", "parameters": dict(STREAMING), **GIVEN, "layers": [1]}
    served = Runtime.made(read_table(table), Model(whole, whole, "M", "STOCK", 0), Owner())
    assert (False, 40, frozenset({1}), 5) == (
        served.session.strict, served.session.min_query, served.session.layers, served.session.tail,
    )  # fmt: skip
