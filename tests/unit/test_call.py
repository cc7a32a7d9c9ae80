"""AttentionCall: what it derives, and every bad input with the field, the value and the remedy."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import int32, make, nested
from sparseprefill.call import AttentionCall
from sparseprefill.errors import InvalidCallError, SparsePrefillError
from sparseprefill.testing import attention

Q, K, V = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 5)

NESTED = nested(K[0], K[1])
JAGGED = nested(K[0], K[1], layout=torch.jagged)
ONES = nested(torch.ones(1), torch.ones(1))
BAD_TENSORS = {
    "q is no tensor": ([[1.0]], K, V, "q", "list", "torch.Tensor"),
    "rank 3": (Q[0], K, V, "q", "(4, 6, 8)", "four dimensions"),
    "rank 5": (Q, K[None], V, "k", "(1, 2, 2, 9, 8)", "four dimensions"),
    "integer dtype": (Q.int(), K, V, "q", "torch.int32", "float16, bfloat16, float32 or float64"),
    "empty": (Q, K, V[:, :, :0], "v", "(2, 2, 0, 5)", "no dimension may be empty"),
    "dtype mix in k": (Q, K.half(), V, "k", "torch.float16", "q is torch.float32"),
    "dtype mix in v": (Q, K, V.double(), "v", "torch.float64", "q is torch.float32"),
    "device mix": (Q, K.to("meta"), V, "k", "meta", "q's device cpu"),
    "batch mix": (Q, K, V[:1], "v", "batch 1", "q has batch 2"),
    "head dimension": (Q, K[..., :4], V, "k", "head dimension 4", "q has 8"),
    "v heads": (Q, K, V[:, :1], "v", "(2, 1, 9, 5)", "must be k's"),
    "v length": (Q, K, V[:, :, :7], "v", "(2, 2, 7, 5)", "must be k's"),
    "heads not divisible": (Q[:, :3], K, V, "q", "3 heads", "multiple of the 2 KV heads"),
    **{
        f"nested {name}": (
            *(NESTED if name == other else x for other, x in zip("qkv", (Q, K, V), strict=True)),
            name,
            "a nested tensor",
            "padded",
        )
        for name in "qkv"
    },
    "ragged": (Q, JAGGED, V, "k", "a nested tensor", "`lengths`"),
    "sparse": (Q, K, V.to_sparse(), "v", "of layout torch.sparse_coo", "plain tensor [B, H, N, D]"),
    "kv shorter than q": (Q, K[:, :, :5], V[:, :, :5], "k", "length 5", "cover the 6 query rows"),
}

BAD_FIELDS = {
    "offset past the keys": ("q_offset", 4, "4", "0 to 3"),
    "negative offset": ("q_offset", -1, "-1", "0 to 3"),
    "offset is a bool": ("q_offset", True, "True", "0 to 3"),
    "NaN scale": ("scale", math.nan, "nan", "finite positive number"),
    "infinite scale": ("scale", math.inf, "inf", "finite positive number"),
    "zero scale": ("scale", 0.0, "0.0", "finite positive number"),
    "scale is text": ("scale", "1", "'1'", "finite positive number"),
    "negative softcap": ("softcap", -2.0, "-2.0", "finite positive number"),
    "softcap beyond float32": ("softcap", 1e300, "1e+300", "from 1e-30 to 1e+30"),
    "softcap below float32": ("softcap", 1e-300, "1e-300", "from 1e-30 to 1e+30"),
    "infinite softcap": ("softcap", math.inf, "inf", "finite positive number"),
    "NaN softcap": ("softcap", math.nan, "nan", "finite positive number"),
    "softcap beyond floats": ("softcap", 10**400, "1000", "from 1e-30 to 1e+30"),
    "softcap beyond words": ("softcap", 10**5000, "int of 16610 bits", "from 1e-30 to 1e+30"),
    "scale beyond float32": ("scale", 1e38, "1e+38", "from 1e-30 to 1e+30"),
    "zero window": ("window", 0, "0", "positive number of keys"),
    "window is a bool": ("window", True, "True", "positive number of keys"),
    "window is a float": ("window", 2.5, "2.5", "positive number of keys"),
    "layer is text": ("layer", "first", "'first'", "integer"),
    "layer is a bool": ("layer", True, "True", "integer"),
    "negative first head": ("first_head", -1, "-1", "pass an integer from 0, below 2^31"),
    "first head is a bool": ("first_head", True, "True", "pass an integer from 0, below 2^31"),
    "first head is a float": ("first_head", 1.0, "1.0", "pass an integer from 0, below 2^31"),
    "negative prompt": ("prompt_lengths", -1, "-1", "from 0 to 2147483647"),
    "prompt of too many tokens": ("prompt_lengths", 1 << 31, "2147483648", "from 0 to 2147483647"),
    "prompt is a bool": ("prompt_lengths", True, "True", "int32 tensor of shape (2,) or a number of tokens"),
    "prompt is a float": ("prompt_lengths", 9.0, "9.0", "int32 tensor of shape (2,) or a number of tokens"),
    "prompts of another type": ("prompt_lengths", torch.zeros(2), "torch.float32 (2,)", "int32 tensor of shape (2,)"),
    "negative prompts": ("prompt_lengths", int32(3, -3), "[3, -3]", "pass numbers from 0"),
    "starts as a list": ("starts", [0, 0], "[0, 0]", "int32 tensor of shape (2,)"),
    "starts int64": ("starts", torch.zeros(2, dtype=torch.int64), "torch.int64", "int32 tensor of shape (2,)"),
    "lengths of another batch": ("lengths", int32(1, 2, 3), "(3,)", "int32 tensor of shape (2,)"),
    "lengths elsewhere": ("lengths", int32(1, 2).to("meta"), "meta", "q's device cpu"),
    "complex sinks": ("sinks", torch.zeros(4, dtype=torch.complex64), "torch.complex64", "float16, bfloat16"),
    "integer sinks": ("sinks", torch.zeros(4, dtype=torch.int32), "torch.int32", "float16, bfloat16"),
    "sinks of rank 2": ("sinks", torch.zeros(1, 4), "(1, 4)", "shape (4,)"),
    "negative starts": ("starts", int32(0, -3), "[0, -3]", "pass numbers from 0"),
    "negative lengths": ("lengths", int32(-1, 3), "[-1, 3]", "pass numbers from 0"),
    "starts behind the keys": ("starts", int32(0, 10), "[0, 10]", "from 0 to 9, the keys of a row"),
    "lengths beyond the keys": ("lengths", int32(10, 9), "[10, 9]", "must lie among the 9 from its start on"),
    "lengths of the largest": ("lengths", int32(9, (1 << 31) - 1), "2147483647", "must lie among the 9"),
    "sinks per KV head": ("sinks", torch.zeros(2), "(2,)", "shape (4,)"),
    "sinks as a list": ("sinks", [0.0] * 4, "[0.0", "shape (4,)"),
    **{
        f"nested {name}": (name, ONES.to(dtype), "a nested tensor", remedy)
        for name, dtype, remedy in (
            ("starts", torch.int32, "int32 tensor"),
            ("lengths", torch.int32, "int32 tensor"),
            ("prompt_lengths", torch.int32, "int32 tensor"),
            ("sinks", torch.float32, "shape (4,)"),
        )
    },
    "sinks elsewhere": ("sinks", torch.zeros(4, device="meta"), "meta", "q's device cpu"),
}


@pytest.mark.parametrize("case", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensor_is_named_with_value_and_remedy(case: tuple[Any, ...]) -> None:
    q, k, v, field, value, remedy = case
    with pytest.raises(InvalidCallError) as caught:
        AttentionCall(q, k, v)
    assert field == caught.value.field
    assert f"AttentionCall.{field} is " in str(caught.value)
    assert value in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("case", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_bad_field_is_named_with_value_and_remedy(case: tuple[Any, ...]) -> None:
    field, value, shown, remedy = case
    with pytest.raises(InvalidCallError) as caught:
        AttentionCall(Q, K, V, **{field: value})
    assert field == caught.value.field
    assert shown in str(caught.value)
    assert remedy in str(caught.value)


def test_padding_lies_among_the_keys() -> None:
    call = AttentionCall(Q, K, V, starts=int32(9, 2), lengths=int32(0, 7))
    assert [0, 7] == call.geometry.key_counts().tolist()
    for lengths in (int32(1, 7), int32(0, 8)):
        with pytest.raises(InvalidCallError, match="from its start on") as caught:
            AttentionCall(Q, K, V, starts=int32(9, 2), lengths=lengths)
        assert "lengths" == caught.value.field


BAD_INDEX: dict[str, tuple[Any, str]] = {
    "behind the keys": (torch.tensor([[0, 9], [0, 1]]), "of numbers from 0 to 9"),
    "negative": (torch.tensor([[0, 8], [-1, 1]]), "of numbers from -1 to 8"),
    "of one row": (torch.tensor([0, 1]), "Tensor of torch.int64 (2,)"),
    "of another batch": (torch.tensor([[0], [1], [2]]), "(3, 1)"),
    "int32": (torch.zeros(2, 1, dtype=torch.int32), "torch.int32"),
    "elsewhere": (torch.zeros(2, 1, dtype=torch.int64, device="meta"), "torch.int64"),
    "a list": ([[0], [1]], "[[0], [1]]"),
}


@pytest.mark.parametrize("verb", ["keys_at", "values_at"])
@pytest.mark.parametrize("case", BAD_INDEX.values(), ids=BAD_INDEX)
def test_what_is_no_index_of_keys_is_refused(case: tuple[Any, str], verb: str) -> None:
    index, shown = case
    with pytest.raises(InvalidCallError, match="pass ") as caught:
        getattr(AttentionCall(Q, K, V), verb)(index)
    assert "index" == caught.value.field
    assert shown in str(caught.value)


def test_error_belongs_to_the_tree_and_to_value_error() -> None:
    assert issubclass(InvalidCallError, SparsePrefillError)
    assert issubclass(InvalidCallError, ValueError)


def test_defaults() -> None:
    call = AttentionCall(Q, K, V)
    assert 2 == call.group
    assert pytest.approx(8**-0.5) == call.softmax_scale
    assert 3 == call.geometry.q_offset
    assert call.geometry.window is None


def test_given_values_are_used() -> None:
    call = AttentionCall(Q, K, V, scale=2, q_offset=1, window=4)
    assert 2.0 == call.softmax_scale
    assert (1, 4) == (call.geometry.q_offset, call.geometry.window)


def test_value_width_may_differ_and_views_are_kept() -> None:
    call = make(7)
    strided = AttentionCall(call.q.transpose(2, 3).contiguous().transpose(2, 3), call.k, call.v[..., :3])
    assert not strided.q.is_contiguous()
    assert 3 == strided.v.shape[-1]


def test_values_on_the_device_are_not_read() -> None:
    """A tensor without storage passes, so checking a call cannot synchronise with a device."""
    rows: dict[str, Any] = {"starts": int32(1, 2).to("meta"), "lengths": int32(1, 2).to("meta")}
    call = AttentionCall(Q.to("meta"), K.to("meta"), V.to("meta"), **rows)
    assert "meta" == call.geometry.device.type
    assert (2, 2, 1, 8) == call.keys_at(torch.zeros(2, 1, dtype=torch.int64, device="meta")).shape


@pytest.mark.parametrize("window", [40, 41, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, 2**70, 10**400])
@pytest.mark.parametrize("name", sorted(sp.default_registry().methods()))
def test_a_window_that_no_key_is_behind_changes_nothing(name: str, window: int) -> None:
    method = sp.default_registry().get(name)
    pipeline, call = method.pipeline(**method.small), make(40, heads=4, kv_heads=2)
    wide = evolve(call, window=window)
    assert wide.geometry.window == (window if window < 1 << 31 else None)
    if pipeline.unsupported(wide):
        return
    expected, found = pipeline.run(call), pipeline.run(wide)
    torch.testing.assert_close(found.out, expected.out, atol=1e-5, rtol=1e-5)
    assert expected.density == found.density
    torch.testing.assert_close(sp.recall(wide, found), sp.recall(call, expected))
    truth, _ = attention(wide)
    for executor in (sp.ReferenceExecutor(), sp.CpuExecutor()):
        out = executor.execute(wide, sp.Plan(sp.SparseMask.full(wide, 8))).out
        torch.testing.assert_close(out, truth.float(), atol=1e-5, rtol=1e-5)
