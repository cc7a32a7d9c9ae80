"""docs/breakeven.md says what stands in a table's file, in the words of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from docs.pages import ROOT, section
from sparseprefill.breakeven.gate import shipped
from sparseprefill.breakeven.points import DeviceKind

FILE = section((ROOT / "docs" / "breakeven.md").read_text(), "The file")


def keys(value: Any, *, named: bool = False) -> Iterator[str]:
    """The keys of all objects in a file; names of methods are none. named: the object's keys are names."""
    if isinstance(value, dict):
        for key, one in value.items():
            if not named:
                yield key
            yield from keys(one, named=key == "methods")
    elif isinstance(value, list):
        for one in value:
            yield from keys(one)


def test_every_key_is_on_the_page_and_lists_hold_what_it_says() -> None:
    table = shipped(DeviceKind(type="cpu"))
    assert table is not None
    facts = json.loads(table.to_json())
    facts["measured"], facts["versions"] = {}, {}  # for people
    assert set() == {key for key in keys(facts) if not re.search(rf"\b{key}\b", FILE)}
    (line,) = re.findall(r"^ +executor +(.+)$", FILE, flags=re.M)
    (ran, *_) = facts["shapes"][0]["points"][0]["executor"]
    assert f"list of tables with {' and '.join(ran)}, by ascending density" == line
