"""One word turns a recall floor on: in `build`, pipelines, routes, profiles, methods and configuration files."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import sparseprefill as sp
from helpers.build import make
from sparseprefill.errors import ParameterError
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import LengthRange, Profile

SMALL: dict[str, Any] = {"sink": 16, "window": 16, "block": 16}
FLOOR = sp.RecallFloor(target=0.9, rows=8, span=64)
CALL = make(200, heads=4, kv_heads=2)
MODEL = ModelIdentity(
    name="tiny", architecture="TinyModel", layers=2, heads=4, kv_heads=2, head_dim=8, digest="0123456789abcdef"
)


def refiners(made: sp.Pipeline | sp.Route) -> list[tuple[sp.MaskRefiner, ...]]:
    return [one.refiners for one in sp.Route.of(made).known]


def profile() -> Profile:
    ranges = tuple(
        LengthRange(least=i * 100, tokens=i * 100 + 1, method="streaming", parameters={**SMALL, **more})
        for i, more in enumerate(({}, {"recall": 0.5}))
    )
    return Profile(methods=("streaming",), model=MODEL, ranges=ranges, versions={}, tuned={})


def test_a_number_is_a_target() -> None:
    made = sp.build("streaming", recall=0.9, **SMALL)
    assert isinstance(made, sp.Pipeline)
    assert [(sp.RecallFloor(target=0.9),)] == refiners(made)
    assert made.name == "streaming"
    assert made.grain is None
    bare = sp.build("streaming", **SMALL).run(CALL)
    result = made.run(CALL)
    assert bare.density < result.density
    last = sp.recall(CALL, result, rows=[199])
    assert bool((last >= 0.9 - 1e-5).all())
    assert bool((sp.recall(CALL, bare, rows=[199]) < 0.9).any())


@pytest.mark.parametrize("given", [FLOOR, {"target": 0.9, "rows": 8, "span": 64}])
def test_options_of_its_own(given: Any) -> None:
    made = sp.build("streaming", recall=given, **SMALL)
    assert [(FLOOR,)] == refiners(made)
    assert made.grain == 64


def test_none_is_none() -> None:
    assert [()] == refiners(sp.build("streaming", recall=None, **SMALL))


def test_over_dense_plans_a_floor_is_its_notes() -> None:
    """With the names, shapes and types of any other floor's; nothing else of the pipeline changes."""
    bare, made, other = sp.build("dense"), sp.build("dense", recall=0.9), sp.build("streaming", recall=0.9, **SMALL)
    assert isinstance(bare, sp.Pipeline)
    assert isinstance(made, sp.Pipeline)
    call = attrs.evolve(CALL, starts=torch.tensor([7], dtype=torch.int32))
    notes, known = made.run(call).plan.notes, other.run(call).plan.notes
    assert set(known) == set(notes)
    for name in ("recall_before", "recall_after", "recall_dense"):
        assert (known[name].shape, known[name].dtype) == (notes[name].shape, notes[name].dtype)
    assert bool((notes["recall_before"] == 1).all())
    assert not bool(notes["recall_dense"].any())
    sample = notes["recall_sample"]
    kept = sp.recall(call, bare.run(call), rows=sample.rows[0].tolist())
    torch.testing.assert_close(kept[:, :, sample.real[0]], sample.before[:, :, sample.real[0]])
    assert torch.equal(bare.run(call).out, made.run(call).out)
    assert (bare.grain, bare.tail, bare.head_scope) == (made.grain, made.tail, made.head_scope)
    assert made.with_tail(128) is made
    assert made.refiners == made.with_recall(0.5).refiners
    empty = made.run(attrs.evolve(CALL, lengths=torch.tensor([0], dtype=torch.int32))).plan.notes["recall_before"]
    assert bool(empty.isnan().all()), "a row of padding alone has no recall"


def test_a_floor_comes_last_and_in_place_of_another() -> None:
    made = attrs.evolve(sp.build("streaming", **SMALL), refiners=(sp.Sink(2),)).with_recall(0.5)
    assert made.with_recall(None) is made
    assert made.with_recall(FLOOR).refiners == (sp.Sink(2), FLOOR)
    assert made.with_recall(FLOOR).with_tail(16).refiners == (sp.Sink(2), FLOOR, sp.DenseRows(16))


def test_behind_a_gate_and_in_a_profile() -> None:
    assert [(FLOOR,)] == refiners(sp.build("streaming", gate="auto", recall=FLOOR))
    own = sp.RecallFloor(target=0.5)
    assert [(), (own,)] == refiners(sp.build(profile=profile()))
    assert [(FLOOR,), (FLOOR,)] == refiners(sp.build(profile=profile(), recall=FLOOR))
    assert [(), (own,)] == refiners(sp.build("streaming", profile=profile(), window=32))


def test_it_survives_a_profiles_file(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(profile().to_json(), encoding="utf-8")
    assert Profile.load(path) == profile()


def test_every_method_has_it_as_a_parameter() -> None:
    method = sp.default_registry().get("bfla")
    assert method.pipeline(recall=0.9).refiners[-1] == sp.RecallFloor(target=0.9)
    assert method.configure({"recall": 0.9}) == method.configure({})
    with pytest.raises(ParameterError, match=r"recall is 1\.5: pass a number from 0 to 1"):
        method.configure({"recall": 1.5})


@pytest.mark.parametrize("given", [0.9, {"target": 0.9}])
def test_in_a_configuration(given: Any, tmp_path: Path) -> None:
    table = {"method": "streaming", "parameters": SMALL, "recall": given}
    expected = [(sp.RecallFloor(target=0.9),)]
    assert expected == refiners(sp.from_config(table))
    assert expected == refiners(sp.from_config({"method": "streaming", "parameters": {**SMALL, "recall": given}}))
    path = tmp_path / "one.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    assert expected == refiners(sp.from_config(path))
    toml = tmp_path / "one.toml"
    toml.write_text('method = "streaming"\n[recall]\ntarget = 0.9\n', encoding="utf-8")
    assert expected == refiners(sp.from_config(toml))
    union = {"union": [table, {"method": "bfla"}], "recall": 0.5}
    assert [(sp.RecallFloor(target=0.5),)] == refiners(sp.from_config(union))


def test_as_a_refiner_among_others_in_a_configuration() -> None:
    floor = {"name": "recall-floor", "target": 0.9, "rows": 8, "span": 64}
    made = sp.from_config({"method": "streaming", "refiners": [floor, {"name": "sink", "tiles": 1}]})
    assert [(FLOOR, sp.Sink(1))] == refiners(made)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (-0.5, "recall is -0.5: pass a number from 0 to 1, a table of options, a RecallFloor, or None"),
        (1.5, "recall is 1.5: pass a number from 0 to 1, a table of options, a RecallFloor, or None"),
        (True, "recall is True: pass a number from 0 to 1"),
        ("high", "recall is 'high': pass a number from 0 to 1"),
        (float("nan"), "recall is nan: pass a number from 0 to 1"),
        ({"rows": 0}, "recall.rows is 0: pass an integer from 1 to 65536"),
        ({"taget": 0.9}, "recall has no option 'taget'; did you mean 'target'"),
    ],
)
def test_what_is_no_floor(given: Any, words: str) -> None:
    for what in (
        lambda: sp.build("streaming", recall=given),
        lambda: sp.build("streaming", **SMALL).with_recall(given),
        lambda: sp.default_registry().build("streaming", recall=given),
        lambda: sp.from_config({"method": "streaming", "recall": given}),
    ):
        with pytest.raises(ParameterError) as caught:
            what()
        assert str(caught.value).startswith(words)


def test_the_plan_of_a_part_of_a_union_may_have_a_floor() -> None:
    part = sp.build("streaming", recall=0.9, **SMALL)
    both = sp.Pipeline(sp.UnionEstimator(part, sp.build("streaming", sink=0, window=8, block=8)))
    alone, united = (one.run(CALL).mask.to_dense() for one in (part, both))
    assert not bool((alone & ~united).any())
    assert torch.is_tensor(both.plan(CALL, sp.Memory()).notes["recall_after"])
