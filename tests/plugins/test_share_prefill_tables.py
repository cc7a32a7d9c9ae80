"""Tables of head clusters: what is read, what is refused, and what share-prefill does without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def test_a_table_serves_a_copy_of_its_model() -> None:
    stage: Any = sp.build("share-prefill", clusters=TABLE).estimator
    stage.check_model(evolve(SIZES, name="a copy"))
