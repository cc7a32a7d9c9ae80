"""Selected, but nothing can run sparse: said before the first request, as an error or as a warning."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.prospects import SLIDING, prospects
from sparseprefill.adapters.session.session import Session

import sparseprefill as sp
from helpers import hf_models
from helpers.build import make
from helpers.hf_models import STREAMING, logits
from helpers.stubs import Estimate
from helpers.tables import from_length
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import LengthRange, Profile

HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8}
LIKE = make(1, heads=4, kv_heads=2)
LAYERS = {0: LIKE, 1: evolve(LIKE, layer=1)}
FULL = sp.Route.of(sp.build("streaming", **STREAMING))
NONE = "share-prefill can never run on LlamaForCausalLM: every chosen layer stays dense: Share: no table"


@pytest.fixture
def model() -> Any:
    return hf_models.build("llama")


def untouched(model: Any) -> bool:
    return bool(model.config._attn_implementation == "sdpa")


def test_share_prefill_without_a_table_is_refused_when_attaching(model: Any) -> None:
    with pytest.raises(sp.AttachError, match=NONE):
        attach(model, "share-prefill")
    assert untouched(model)
    with attach(model, "share-prefill", clusters="single", block=16) as handle:
        logits(model)
    assert {} == handle.report().notes


def test_without_the_dry_run_nobody_can_tell(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with attach(model, "share-prefill", verify=False) as handle:
        logits(model)
    assert not any("never" in record.getMessage() for record in caplog.records)
    assert [0, 0] == [one.sparse_calls for one in handle.report().layers]


def test_a_model_of_sliding_windows_alone_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Its windows are served, exactly, so it is no error; the method is never asked."""
    model = hf_models.build("mistral-sliding")
    with attach(model, "streaming", gate=None, **STREAMING) as handle:
        logits(model)
    (record,) = caplog.records
    assert f"streaming may never run on MistralForCausalLM: every chosen layer stays dense: {SLIDING}" in (
        record.getMessage()
    )
    assert [record.getMessage()] == list(handle.report().notes)
    assert ["window"] * 2 == [layer.mode for layer in handle.report().layers]


def test_layers_that_leave_sliding_windows_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = hf_models.build("gemma3")  # layer 0 slides, layer 1 is full
    for layers, count in (([0], 1), ([1], 0), (None, 0)):
        caplog.clear()
        attach(model, "streaming", gate=None, layers=layers, **STREAMING).detach()
        assert count == len(caplog.records)


def test_layers_that_leave_none() -> None:
    session = Session(FULL, HostOptions(layers=[5]))
    with pytest.raises(
        sp.AttachError, match="streaming can never run on host: no layer is left: not among the chosen layers"
    ):
        session.start("host", LAYERS)


def test_min_query_beyond_what_the_model_was_made_for(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Rotary embeddings go on beyond: a warning."""
    attach(model, "streaming", gate=None, min_query=513, **STREAMING).detach()
    (record,) = caplog.records
    assert "min_query is 513, but the model was trained for at most 512 tokens" in record.getMessage()
    caplog.clear()
    attach(model, "streaming", gate=None, min_query=512, **STREAMING).detach()
    assert [] == caplog.records


def test_a_gate_that_lets_nothing_pass(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    attach(model, "streaming", gate=from_length(4096, **HEADS), **STREAMING).detach()
    (record,) = caplog.records
    assert "up to 512 tokens every call stays dense: below break-even" in record.getMessage()
    caplog.clear()
    attach(model, "streaming", gate=from_length(500, **HEADS), **STREAMING).detach()
    assert [] == caplog.records


def test_what_the_gate_says_of_the_longest_call_is_told() -> None:
    class Never:
        def judge(self, call: sp.AttentionCall, method: str) -> sp.Verdict:
            return sp.Verdict(False, 2.0, f"{call.kv_len} keys are too few")

    found = prospects(sp.gated(sp.build("streaming", **STREAMING), Never()), LAYERS, 16, trained=64)
    assert found.doubts == ("up to 64 tokens every call stays dense: 64 keys are too few",)


def test_one_batch_row_is_tried_however_many_the_layer_has() -> None:
    """The other sizes are the layer's."""
    like, asked = make(3, batch=2, heads=4, kv_heads=2), set[tuple[int, ...]]()

    class Notes:
        def judge(self, call: sp.AttentionCall, method: str) -> sp.Verdict:
            asked.add((*call.q.shape, *call.v.shape))
            return sp.Verdict(False)

    prospects(sp.gated(sp.build("streaming", **STREAMING), Notes()), {0: like}, 16, trained=32)
    assert {(1, 4, keys, 8, 1, 2, keys, 8) for keys in (16, 32)} == asked


@pytest.mark.parametrize(("size", "value"), [("heads", 8), ("kv_heads", 1), ("head_dim", 16), ("dtype", torch.float64)])
def test_every_kind_of_layer_is_tried(size: str, value: Any) -> None:
    """Of two alike only one is; here the second differs, and its calls alone are worth it."""
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    calls = []
    for one in (sizes, {**sizes, size: value}):
        shapes = ((1, one[name], 1, one["head_dim"]) for name in ("heads", "kv_heads", "kv_heads"))
        calls.append(sp.AttentionCall(*(torch.zeros(shape, dtype=one["dtype"]) for shape in shapes)))

    class Other:
        def judge(self, call: sp.AttentionCall, method: str) -> sp.Verdict:
            found = call.q.shape[1], call.kv_heads, call.q.shape[3], call.q.dtype
            return sp.Verdict(found != tuple(sizes.values()), None, "one kind")

    route = sp.gated(sp.build("streaming", **STREAMING), Other())
    assert () == prospects(route, dict(enumerate(calls)), 16).doubts
    assert 1 == len(prospects(route, dict(enumerate([calls[0]] * 2)), 16).doubts)


def test_layers_of_the_host_and_layers_without_any() -> None:
    def never(layers: dict[int, Any], **options: Any) -> str:
        return prospects(FULL, layers, 16, **options).never

    assert "the model has no attention layer" == never({})
    assert "layers 0 to 2: pooling; layer 3: MLA" == never({0: "pooling", 1: "pooling", 2: "pooling", 3: "MLA"})
    assert "layers 0, 2, 3: pooling; layer 1: MLA" == never({0: "pooling", 1: "MLA", 2: "pooling", 3: "pooling"})
    assert "" == never({0: "pooling", 1: LIKE})
    assert "every chosen layer stays dense: pooling" == never({0: "pooling", 1: LIKE}, chosen=frozenset({0}))


@frozen
class OnlyLong:
    """An estimator that takes calls from a length on, and up to one."""

    least: int
    most: int = 1 << 40

    def unsupported(self, call: sp.AttentionCall) -> str | None:
        return None if self.least <= call.kv_len <= self.most else f"{call.kv_len} keys"

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        raise NotImplementedError


def test_an_objection_to_some_lengths_is_none_to_all() -> None:
    def never(least: int, most: int = 1 << 40, **bounds: Any) -> str:
        return prospects(sp.Route.of(sp.Pipeline(OnlyLong(least, most))), LAYERS, 16, **bounds).never

    assert "" == never(5000)
    assert "" == never(0, 16)
    assert "" == never(4096, trained=4096)
    assert "OnlyLong: 16 keys; OnlyLong: 32 keys" in never(4097, trained=4096)


def test_three_objections_are_told_at_most() -> None:
    found = prospects(sp.Route.of(sp.Pipeline(OnlyLong(4097))), LAYERS, 16, trained=4096).never
    assert found.endswith("OnlyLong: 16 keys; OnlyLong: 32 keys; OnlyLong: 64 keys")


def test_a_length_of_a_profile_is_tried() -> None:
    sizes: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    identity = ModelIdentity(name="m", architecture="M", digest="0", **sizes)

    def told(*settings: dict[str, Any] | None) -> tuple[str, str]:
        ranges = [
            LengthRange(least=least, tokens=max(least, 1), method=None if one is None else "streaming", parameters=one)
            for least, one in zip((0, 3000), settings, strict=True)
        ]
        profile = Profile(methods=("streaming",), model=identity, ranges=tuple(ranges))
        route = sp.build("streaming", profile=profile)
        found = prospects(route, LAYERS, 16, trained=3001)
        return found.never, " ".join(found.doubts)

    assert ("", "") == told(None, {"block": 16})
    assert ("", "") == told({"block": 16}, None)
    never, doubt = told(None, None)  # it was measured and made so: a warning, no refusal
    assert not never
    assert "the profile has no setting of streaming" in doubt


def test_a_stage_that_fails_to_answer_fails_at_the_start(model: Any) -> None:
    class Odd(OnlyLong):
        def unsupported(self, call: sp.AttentionCall) -> str | None:
            raise KeyError("lost")

    with pytest.raises(sp.StageError, match=r"mine: Odd\.unsupported\(\) raised KeyError"):
        attach(model, sp.Pipeline(Odd(0), name="mine"))
    assert untouched(model)


def test_trying_needs_no_memory_and_no_values() -> None:
    """A million tokens, on a device without values."""
    like = sp.AttentionCall(*(torch.empty(1, heads, 1, 8, device="meta") for heads in (4, 2, 2)))
    found = prospects(sp.Route.of(sp.Pipeline(Estimate(objection="never"))), {0: like}, 16)
    assert "every chosen layer stays dense: Estimate: never" == found.never
