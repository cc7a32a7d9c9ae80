"""Thousands of bad inputs to the public API: each an error of ours that names the field and says what would do."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparseprefill as sp
from helpers.bad_inputs import REMEDIES, Bad, everything, outcome
from sparseprefill.errors import printed, told


def test_every_bad_input_gives_an_error_of_ours_with_field_and_remedy(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("files")  # a path that holds no word of a remedy, as the name of this test does
    found = [outcome(bad) for bad in everything(folder)]
    wrong = [f"{one.kind}: {one.bad.what}  {one.said[:200]}" for one in found if one.kind != "ours"]
    assert [] == wrong
    assert len(found) > 4000
    assert len({one.bad.what for one in found}) > 4000


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        ("accepted", lambda: None),
        ("others", lambda: dict[str, int]()["x"]),
        ("vague", lambda: _raise(sp.ParameterError("no"))),
        ("vague", lambda: _raise(sp.ParameterError("field is 3"))),
        ("ours", lambda: _raise(sp.ParameterError("field is 3: pass a string"))),
    ],
)
def test_the_judgement_tells_them_apart(kind: str, run: Callable[[], object]) -> None:
    assert kind == outcome(Bad("x", "field", run)).kind
    assert all(REMEDIES)


def _raise(error: BaseException) -> Any:
    raise error


class Silent(Exception):  # noqa: N818 - an object that is also an error
    def __repr__(self) -> str:
        raise KeyError("no words")

    __str__ = __repr__


def test_any_value_can_be_shown() -> None:
    assert "a Silent that cannot be printed" == printed(Silent()) == told(Silent())
    assert "a Tensor of torch.float32 (2, 3)" == printed(torch.ones(2, 3))
    assert "int of 19932 bits" == printed(10**6000)
    long = printed("x" * 5000)
    assert len(long) < 450
    assert long.endswith("(5002 characters)")
    with pytest.raises(KeyboardInterrupt):
        printed(type("Stop", (), {"__repr__": lambda _: _raise(KeyboardInterrupt())})())


def test_what_holds_tensors_is_shown_by_its_type() -> None:
    """Their values are not read: on a GPU that would wait for it."""
    values = torch.zeros(1, 2, 4, 8)
    for value, shown in (
        (sp.AttentionCall(values, values, values), "AttentionCall(...)"),
        ([values], "list(...)"),
        (torch.nn.Linear(2, 2), "Linear(...)"),
        ("a\n  b", r"'a\n  b'"),
        (type("Lines", (), {"__repr__": lambda _: "Lines(\n    a  b\n)"})(), "Lines( a  b )"),
    ):
        assert shown == printed(value)
