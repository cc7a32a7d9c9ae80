"""Tables of clusters: files that claim, nest or name what no model has are refused at once."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict, evolve
from sparseprefill.plugins.share_prefill import TABLE
from sparseprefill.plugins.share_prefill.table import ClusterTable

import sparseprefill as sp
from sparseprefill.errors import ParameterError
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import Profile

MODEL = ModelIdentity(name="tiny", architecture="Tiny", layers=2, heads=2, kv_heads=1, head_dim=8, digest="01")
HUGE = (1 << 31) - 1


def facts(**model: Any) -> dict[str, Any]:
    table = {"schema": "sparseprefill.clusters", "version": 1, "clusters": [[[0, 0], [0, 1]]], "noise": [[1, 0]]}
    return {**table, "model": {**asdict(MODEL), **model}}


def test_a_model_of_billions_of_heads_is_refused_at_once() -> None:
    with pytest.raises(ParameterError, match="clusters: layer 0, head 2 is neither in a cluster nor in noise"):
        TABLE.read(facts(layers=HUGE, heads=HUGE))
    with pytest.raises(ParameterError, match="clusters: layer 1, head 1 is neither in a cluster"):
        TABLE.read(facts(layers=HUGE))


def test_the_first_head_at_fault_is_named() -> None:
    spots = ((0, 0), (0, 1), (1, 0), (1, 1))
    assert 4 == len(ClusterTable(clusters=(spots,), model=MODEL).labels)
    with pytest.raises(
        ParameterError, match=r"noise: layer 1, head 2 does not exist in a model of 2 layers with 2 heads"
    ):
        ClusterTable(clusters=(spots,), noise=((2, 0), (1, 2)), model=MODEL)
    with pytest.raises(ParameterError, match=r"clusters: layer 1, head 0 is neither in a cluster"):
        ClusterTable(clusters=(spots[:2], spots[3:]), model=evolve(MODEL, layers=3))


@pytest.mark.parametrize("value", [1 << 31, 10**400, 10**5000], ids=["2^31", "400 digits", "5000 digits"])
@pytest.mark.parametrize("name", ["layers", "heads", "kv_heads", "head_dim"])
def test_sizes_that_no_model_has(name: str, value: int) -> None:
    with pytest.raises(ParameterError, match=rf"model\.{name} is .*: pass an integer from 1 to 2147483647"):
        TABLE.read(facts(**{name: value}))


def test_an_empty_table_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ParameterError, match="clusters is an empty table: pass"):
        TABLE.read({})
    with pytest.raises(ParameterError, match="clusters is an empty table: pass"):
        TABLE.read(tmp_path / "a.json")


def test_a_profile_nested_as_deep_as_json_allows(tmp_path: Path) -> None:
    names = ("methods", "model", "break_even", "versions", "ranges")
    deep = '{"a":' * 900 + "1" + "}" * 900
    head = {"schema": "sparseprefill.profile", "version": 2, **dict.fromkeys(names)}
    (tmp_path / "a.json").write_text(json.dumps(head)[:-1] + f', "tuned": {deep}}}')
    with pytest.raises(ParameterError, match=r"a.json: "):
        Profile.load(tmp_path / "a.json")


@pytest.mark.parametrize("file", ["rescued.toml", "rescued-single.toml"])
def test_the_example_rescues_at_bflas_own_values_under_its_own_name(file: str) -> None:
    path = Path(__file__).parents[2] / "docs" / "examples" / "share-prefill" / file
    made = sp.from_config(path)
    own: list[Any] = [*sp.build("bfla").refiners]
    tile = sp.default_registry().get("bfla").config().tile
    assert isinstance(made, sp.Pipeline)
    assert tuple(evolve(one, tile=tile) for one in own) == made.refiners
    assert made.name == "share-prefill, rescued as in bfla"
