"""Profiles: what is read, what is refused and how, and which parameters a call gets."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.build import make
from helpers.tables import altered, from_length
from sparseprefill.memory import Memory
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import LengthRange, Profile

MODEL = ModelIdentity(
    name="tiny", architecture="TinyModel", layers=2, heads=2, kv_heads=1, head_dim=8, digest="0123456789abcdef"
)
SHORT: dict[str, Any] = {"sink": 0, "window": 4, "block": 4}
LONG: dict[str, Any] = {"sink": 8, "window": 16, "block": 8}


def profile(*parameters: dict[str, Any] | None, method: str = "streaming", step: int = 40) -> Profile:
    """One range per setting, from 0, `step`, two `step`, ..."""
    ranges = tuple(
        LengthRange(least=i * step, tokens=i * step + 1, method=None if p is None else method, parameters=p)
        for i, p in enumerate(parameters)
    )
    return Profile(methods=(method,), model=MODEL, ranges=ranges, versions={"torch": "2"}, tuned={"loss": 0.01})


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    made = profile(SHORT, None, LONG)
    path.write_text(made.to_json(), encoding="utf-8")
    assert made == Profile.load(path)
    assert made is Profile.load(made)


@pytest.mark.parametrize(("kv_len", "expected"), [(1, SHORT), (39, SHORT), (40, LONG), (300, LONG)])
def test_the_number_of_keys_chooses_the_parameters(kv_len: int, expected: dict[str, Any]) -> None:
    call = make(1, kv_len)
    result = sp.build("streaming", profile=profile(SHORT, LONG)).run(call)
    truth = sp.build("streaming", **expected).run(call)
    assert torch.equal(truth.mask.to_dense(), result.mask.to_dense())
    assert torch.equal(truth.out, result.out)


def test_parameters_given_go_over_those_of_the_profile() -> None:
    call = make(60)
    result = sp.build("streaming", profile=profile(SHORT), sink=12).run(call)
    assert torch.equal(sp.build("streaming", **{**SHORT, "sink": 12}).run(call).out, result.out)


def test_a_length_without_a_setting_runs_dense_with_the_reason() -> None:
    route = sp.build("streaming", profile=profile(SHORT, None))
    assert not route.run(make(39)).dense
    call = make(50)
    found = route.run(call)
    assert found.dense == "the profile has no setting of streaming that is accurate enough at 50 keys"
    torch.testing.assert_close(sp.build("dense").run(call).out, found.out)
    assert () == route.unsupported(call)


def several(**first: Any) -> Profile:
    """Two methods by length, of whose layers the second range keeps one dense."""
    ranges = (
        LengthRange(least=0, tokens=20, method="streaming", parameters=SHORT, **first),
        LengthRange(least=40, tokens=60, method="vertical-slash", parameters={"block": 8}, dense_layers=(1,)),
    )
    return Profile(methods=("streaming", "vertical-slash"), model=MODEL, ranges=ranges)


def test_chunks_of_a_prompt_get_one_setting_where_its_length_is_known() -> None:
    route = sp.Route.by_length(several(), sp.default_registry().get)
    calls = (make(20), make(20, prompt_lengths=50), make(30, 50, prompt_lengths=50), make(20, 50, prompt_lengths=30))
    names = [route.choose(call).pipeline.name for call in calls]
    assert ["streaming", "vertical-slash", "vertical-slash", "vertical-slash"] == names
    assert "keeps layer 1 dense" in route.choose(evolve(calls[1], layer=1)).dense


def test_a_profile_of_several_methods_needs_no_name_and_chooses_by_length(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_text(several().to_json(), encoding="utf-8")
    assert several() == Profile.load(path)
    for source in (path, several()):
        route = sp.build(profile=source)
        short, long = make(20), make(60)
        assert torch.equal(sp.build("streaming", **SHORT).run(short).out, route.run(short).out)
        assert torch.equal(sp.build("vertical-slash", block=8).run(long).out, route.run(long).out)
    configured = sp.from_config({"profile": str(path)})
    assert torch.equal(route.run(long).out, configured.run(long).out)


def test_a_layer_that_the_profile_keeps_dense_runs_dense_at_its_lengths_alone() -> None:
    route = sp.build(profile=several())
    assert not route.run(make(20, layer=1)).dense
    assert "the profile keeps layer 1 dense: vertical-slash is not" in route.run(make(60, layer=1)).dense
    assert not route.run(make(60, layer=0)).dense
    chosen = {layer: route.choose(make(60, layer=layer)) for layer in (0, 1)}
    assert (chosen[0].of_layer, chosen[1].of_layer) == (False, True)
    nothing = sp.build("streaming", profile=profile(SHORT, None)).choose(make(50))
    assert nothing.dense
    assert not nothing.of_layer  # no layer runs sparse at this length


def test_each_range_is_judged_under_its_own_method() -> None:
    asked: list[str] = []

    class Judge:
        def judge(self, call: sp.AttentionCall, method: str) -> sp.Verdict:
            asked.append(method)
            return sp.Verdict(True)

    route = sp.build(profile=several(), gate=Judge())
    route.run(make(20))
    route.run(make(60))
    assert asked == ["streaming", "vertical-slash"]


def test_the_profiles_own_break_even_table_goes_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSEPREFILL_BREAKEVEN", raising=False)
    table = from_length(30, heads=2, kv_heads=1)
    own = evolve(several(), break_even=table)
    assert Profile.of(json.loads(own.to_json())) == own
    assert "below break-even" in sp.build(profile=own, gate="auto").run(make(20)).dense
    assert not sp.build(profile=own, gate="auto").run(make(39)).dense
    assert sp.build(profile=own).gate is None


def test_a_profile_of_several_methods_is_for_none_alone() -> None:
    with pytest.raises(sp.ParameterError, match="for streaming, vertical-slash, not for 'streaming': leave the"):
        sp.build("streaming", profile=several())
    with pytest.raises(sp.ParameterError, match=r"parameters \(sink\) belong to one method"):
        sp.build(profile=several(), sink=3)
    lost = LengthRange(least=0, tokens=9, method="lost", parameters={})
    with pytest.raises(sp.UnknownMethodError, match="no method is named 'lost'"):
        sp.build(profile=Profile(methods=("lost",), model=MODEL, ranges=(lost,)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": None}, r"ranges\[0\].method is None and ranges\[0\].parameters is"),
        ({"parameters": None}, "pass both, or None for both"),
        ({"method": "bfla"}, r"ranges\[0\].method is 'bfla': pass one of methods, streaming, vertical-slash"),
        ({"dense_layers": (1, 0)}, r"ranges\[0\].dense_layers is \[1, 0\]: pass ascending indices of the model's 2"),
        ({"dense_layers": (2,)}, r"ranges\[0\].dense_layers is \[2\]"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    made = several()
    with pytest.raises(sp.ParameterError, match=message):
        evolve(made, ranges=(evolve(made.ranges[0], **wrong),))


def test_a_call_of_another_model_is_refused() -> None:
    pipeline = sp.build("streaming", profile=profile(SHORT))
    with pytest.raises(sp.UnsupportedCallError, match=r"another model: model.heads is 2 \(tiny\), the call has 4"):
        pipeline.run(make(20, heads=4))
    with pytest.raises(sp.UnsupportedCallError, match=r"model\.layers is 2"):
        pipeline.run(make(20, layer=2))


def test_objections_of_the_chosen_method_are_passed_on() -> None:
    pipeline = sp.build("anchor-attention", profile=profile({"theta": 1.0}, method="anchor-attention"))
    (reason,) = pipeline.unsupported(make(20, window=4))
    assert "sliding window" in reason


def test_grain_of_one_range_is_the_methods_and_of_several_none() -> None:
    assert sp.build("streaming", profile=profile(SHORT)).grain == 1
    assert sp.build("streaming", profile=profile(SHORT, LONG)).grain is None


def test_observers_and_refiners_of_the_chosen_pipeline_run() -> None:
    seen: list[int] = []

    class Watcher:
        def refine(self, call: sp.AttentionCall, plan: sp.Plan, memory: Memory) -> sp.Plan:
            seen.append(1)
            return plan

        def observe(self, call: sp.AttentionCall, plan: sp.Plan, result: sp.Result, memory: Memory) -> None:
            seen.append(2)

    streaming = sp.default_registry().get("streaming")
    watched = evolve(
        streaming,
        build=lambda config: evolve(streaming.build(config), refiners=(Watcher(),), observers=(Watcher(),)),
    )
    sp.Route.by_length(profile(SHORT), lambda name: watched).run(make(20))
    assert [1, 2] == seen


def test_a_profile_of_another_method_or_with_wrong_parameters_is_refused() -> None:
    with pytest.raises(sp.ParameterError, match="the profile is for 'streaming', not for 'vertical-slash'"):
        sp.build("vertical-slash", profile=profile(SHORT))
    with pytest.raises(sp.ParameterError, match=r"ranges\[1\].parameters: streaming has no parameter 'windov'"):
        sp.build("streaming", profile=profile(SHORT, {"windov": 1}))
    with pytest.raises(sp.ParameterError, match=r"ranges\[0\].parameters: window is 0"):
        sp.build("streaming", profile=profile({"window": 0}))


def test_models_differ_by_any_field_but_the_name() -> None:
    assert MODEL.differs(evolve(MODEL, name="other")) is None
    with pytest.raises(sp.ParameterError, match=r"model.digest is '0123456789abcdef' \(tiny\), here it is 'f'"):
        profile(SHORT).check_model(evolve(MODEL, digest="f"))


FAULTS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("schema",), "sparseprefill.clusters", "schema is 'sparseprefill.clusters'"),
    (("version",), 1, "version is 1: this library reads 2; pass a file of sparseprefill fit"),
    (("methods",), "streaming", "methods is 'streaming': pass a list"),
    (("methods",), [], "methods is empty"),
    (("methods", 0), 3, r"methods\[0\] is 3"),
    (("break_even",), {}, "break_even.schema is None"),
    (("ranges", 0, "method"), 3, r"ranges\[0\].method is 3"),
    (("ranges", 0, "dense_layers"), [True], r"ranges\[0\].dense_layers\[0\] is True: pass an integer"),
    (("ranges", 0, "dense_layers"), 0, r"ranges\[0\].dense_layers is 0: pass a list"),
    (("model", "more"), 1, "model.more is unknown"),
    (("ranges",), [], "ranges is empty"),
    (("ranges",), {}, "ranges is {}"),
    (("ranges", 0, "from"), 5, r"ranges\[0\].from is 5: the first range starts at 0"),
    (("ranges", 1, "from"), 0, r"ranges\[1\].from is 0: ranges must ascend"),
    (("ranges", 1, "from"), 40.0, r"ranges\[1\].from is 40.0"),
    (("ranges", 0, "parameters"), [1], r"ranges\[0\].parameters is \[1\]"),
    (("ranges", 0, "parameters", "sink"), float("nan"), r"ranges\[0\].parameters.sink is nan: pass a finite"),
    (("ranges", 0, "measured", "seconds"), float("inf"), r"ranges\[0\].measured.seconds is inf"),
    (("ranges", 0, "note"), 1, r"ranges\[0\].note is unknown"),
    (("notes",), 1, "notes is unknown"),
]


@pytest.mark.parametrize(("at", "value", "message"), FAULTS)
def test_a_wrong_file_is_refused_by_field(at: tuple[Any, ...], value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(altered(profile(SHORT, LONG).to_json(), at, value)), encoding="utf-8")
    with pytest.raises(sp.ParameterError, match=f"wrong.json: {message}"):
        sp.build("streaming", profile=path)


@pytest.mark.parametrize("name", ["schema", "version", "methods", "model", "break_even", "versions", "tuned", "ranges"])
def test_a_missing_field_is_named(name: str) -> None:
    facts = json.loads(profile(SHORT).to_json())
    del facts[name]
    with pytest.raises(sp.ParameterError, match=name):
        Profile.of(facts)


@given(
    bounds=st.lists(st.integers(1, 500), unique=True, max_size=6).map(sorted),
    kv_len=st.integers(1, 600),
)
def test_every_length_falls_in_the_last_range_that_begins_before_it(bounds: list[int], kv_len: int) -> None:
    ranges = tuple(LengthRange(least=least, tokens=1, method="streaming", parameters=SHORT) for least in [0, *bounds])
    index = Profile(methods=("streaming",), model=MODEL, ranges=ranges).index(kv_len)
    assert ranges[index].least <= kv_len
    assert index + 1 == len(ranges) or ranges[index + 1].least > kv_len
