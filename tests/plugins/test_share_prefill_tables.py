"""Tables of head clusters: what is read, what is refused, and what share-prefill does without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.plugins.share_prefill import TABLE as NEEDED
from sparseprefill.plugins.share_prefill.table import ClusterTable

import sparseprefill as sp
from sparseprefill.profiles.identity import ModelIdentity

SIZES = ModelIdentity(
    name="tiny", architecture="TinyModel", layers=2, heads=2, kv_heads=1, head_dim=8, digest="0123456789abcdef"
)
TABLE = ClusterTable(clusters=(((0, 0), (1, 0)),), noise=((0, 1), (1, 1)), model=SIZES, made={"tokens": 64})


def call(heads: int = 2, kv_heads: int = 1, head_dim: int = 8, layer: int = 0) -> sp.AttentionCall:
    q, k = torch.randn(1, heads, 40, head_dim), torch.randn(1, kv_heads, 40, head_dim)
    return sp.AttentionCall(q, k, k, layer=layer)


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "clusters.json"
    path.write_text(TABLE.to_json())
    assert NEEDED.read(path) == TABLE
    assert NEEDED.read(json.loads(TABLE.to_json())) == TABLE
    for clusters in (path, str(path), TABLE, json.loads(TABLE.to_json())):
        assert sp.build("share-prefill", clusters=clusters).run(call()).density <= 1


def test_a_mapping_by_hand() -> None:
    table = NEEDED.read({(0, 0): 7, (1, 1): 7, (0, 1): None, (2, 0): 3, (5, 0): -1})
    assert table.clusters == (((2, 0),), ((0, 0), (1, 1)))
    assert [table.label(*head) for head in ((1, 1), (0, 1), (2, 0), (9, 9))] == [1, -1, 0, -1]


def changed(**fields: Any) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(TABLE.to_json())
    return {**facts, **fields}


MODEL = json.loads(TABLE.to_json())["model"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (changed(schema="other"), "schema is 'other'"),
        (changed(version=2), "version is 2"),
        (changed(version=True), "version is True"),
        (changed(model={**MODEL, "heads": float("nan")}), "model.heads is nan"),
        (changed(model={**MODEL, "layers": 0}), "model.layers is 0"),
        (changed(model={"name": "x"}), "model.architecture is missing"),
        (changed(model={**MODEL, "name": 3}), "model.name is 3"),
        (changed(clusters=[[[0, 0], [1, 7]]]), r"clusters\[0\]: layer 1, head 7 does not exist"),
        (changed(clusters=[[[0, 0]]]), "layer 1, head 0 is neither in a cluster"),
        (changed(noise=[[0, 0], [0, 1], [1, 1]]), r"noise: layer 0, head 0 is in clusters\[0\] already"),
        (changed(clusters=[[[0, 0], [1, float("nan")]]]), r"clusters\[0\]\[1\]\[1\] is nan"),
        (changed(clusters=[[[0, 0], [1, 0]], []]), r"clusters\[1\] is empty"),
        (changed(clusters=None), "clusters is None"),
        (changed(noise=3), "noise is 3"),
        (changed(made=3), "made is 3"),
        (changed(more=3), "more is unknown"),
        ({(0, 0): float("nan")}, r"clusters\[\(0, 0\)\] is nan"),
        ({(0, "a"): 1}, r"\(0, 'a'\)"),
        (7, "clusters is int"),
    ],
)
def test_what_does_not_fit_is_refused(facts: Any, words: str) -> None:
    with pytest.raises(sp.ParameterError, match=words):
        sp.build("share-prefill", clusters=facts)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(sp.ParameterError, match=r"nowhere.json.*No such file"):
        sp.build("share-prefill", clusters=tmp_path / "nowhere.json")
    path = tmp_path / "half.json"
    path.write_text("{")
    with pytest.raises(sp.ParameterError, match=r"half.json: is not JSON"):
        sp.build("share-prefill", clusters=str(path))
    path.write_text(json.dumps(changed(version=9)))
    with pytest.raises(sp.ParameterError, match=r"half.json: version is 9"):
        sp.build("share-prefill", clusters=str(path))


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (call(heads=4), "model.heads is 2 .tiny., the call has 4"),
        (call(kv_heads=2), "model.kv_heads is 1 .tiny., the call has 2"),
        (call(head_dim=16), "model.head_dim is 8 .tiny., the call has 16"),
        (call(layer=2), "model.layers is 2 .tiny., the call is of layer 2"),
    ],
)
def test_a_table_of_another_model_is_refused(one: sp.AttentionCall, words: str) -> None:
    with pytest.raises(sp.UnsupportedCallError, match=words):
        sp.build("share-prefill", clusters=TABLE).run(one)


def test_a_table_of_another_model_of_the_same_sizes_is_refused() -> None:
    stage: Any = sp.build("share-prefill", clusters=TABLE).estimator
    stage.check_model(evolve(SIZES, name="a copy"))
    with pytest.raises(sp.ParameterError, match=r"another model: model.digest is '0123.*sparseprefill cluster"):
        stage.check_model(evolve(SIZES, digest="other"))


def test_without_a_table_it_says_how_to_make_one() -> None:
    with pytest.raises(sp.UnsupportedCallError, match="sparseprefill cluster --model PATH"):
        sp.build("share-prefill").run(call())


@pytest.mark.parametrize(("name", "value"), [("block", 0), ("delta", -1), ("tau", -1), ("gamma", 2)])
def test_parameters_out_of_bounds(name: str, value: object) -> None:
    parameters: dict[str, Any] = {name: value}
    with pytest.raises(sp.ParameterError, match=name):
        sp.build("share-prefill", **parameters)
