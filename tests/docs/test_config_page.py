"""docs/config.md names every key and refiner, and its TOML says what its Python says."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from attrs import fields
from sparseprefill.plugins.share_prefill.stages import Share

import sparseprefill as sp
from docs.pages import ROOT, blocks, section
from sparseprefill.config import KEYS

PAGE = (ROOT / "docs" / "config.md").read_text()


def test_every_key_has_its_row() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", section(PAGE, "Keys"), flags=re.M)
    assert sorted([*KEYS, *sp.default_registry().offered("refiner")]) == sorted(rows)


def test_every_refiners_row_has_its_parameters() -> None:
    for name, kind in sp.default_registry().offered("refiner").items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        words = re.findall(r"`([\w-]+)`", row)
        assert [name, kind.__name__, *[one.alias for one in fields(kind)]] == words


def test_the_file_is_the_table() -> None:
    first, *_ = (block for block in blocks(PAGE) if block.runs)
    (toml,) = (block for block in blocks(PAGE) if block.language == "toml")
    namespace: dict[str, sp.Pipeline] = {}
    exec(first.code.replace("print(", "str("), namespace)
    made, expected = sp.from_config(tomllib.loads(toml.code)), namespace["pipeline"]
    assert isinstance(made, sp.Pipeline)
    assert (expected.name, expected.refiners) == (made.name, made.refiners)
    assert repr(expected.estimator) == repr(made.estimator)


def test_the_file_that_chooses_by_score_can_be_read() -> None:
    page = (ROOT / "docs" / "compose.md").read_text()
    (toml,) = (block for block in blocks(page) if block.language == "toml")
    made = sp.from_config(tomllib.loads(toml.code))
    assert isinstance(made, sp.Pipeline)
    assert [sp.ValueWeights(), sp.PositionDecay(share=0.1), sp.StrideRescue(16)] == list(made.refiners[-3:])


def test_the_file_that_shares_xattention_can_be_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "methods" / "share-prefill.md").read_text()
    (toml,) = (block for block in blocks(page) if block.language == "toml")
    (tmp_path / "shared.toml").write_text(toml.code)
    shutil.copy(ROOT / "adapters" / "demo" / "clusters.json", tmp_path)
    made = sp.from_config(tmp_path / "shared.toml")
    assert isinstance(made, sp.Pipeline)
    assert isinstance(made.estimator, Share)
    inner = made.estimator.fallback
    assert isinstance(inner, sp.Pipeline)
    assert repr(sp.build("xattention", threshold=0.95, stride=8, block=64).estimator) == repr(inner.estimator)


def test_the_hybrid_of_a_plugin_is_its_file() -> None:
    """What docs/write-a-plugin.md shows in Python and in TOML."""
    page = blocks((ROOT / "docs" / "write-a-plugin.md").read_text())
    namespace: dict[str, Any] = {}
    before = set(sp.default_registry().plugins())
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for block in page:
                if block.runs:
                    exec(block.code, namespace)
        (toml,) = (block for block in page if block.language == "toml" and block.file is None)
        made = sp.from_config(tomllib.loads(toml.code))
    finally:
        for record in set(sp.default_registry().plugins()) - before:
            sp.default_registry().unregister(record.name)
    united: sp.Pipeline = namespace["rescued"]
    assert isinstance(made, sp.Pipeline)
    assert repr((united.estimator, united.refiners)) == repr((made.estimator, made.refiners))
