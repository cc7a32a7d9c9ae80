"""The parts of Star Attention over ranks, each in one process: layout, merging, the tail, text, refusals."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from sparseprefill.adapters.star import Star, exchange
from sparseprefill.adapters.star.anchor import Anchor
from sparseprefill.adapters.star.api import attention_of
from sparseprefill.adapters.star.attention import Switch
from sparseprefill.adapters.star.encode import Block
from sparseprefill.adapters.star.executor import AnchoredBlockExecutor, Shard
from sparseprefill.adapters.star.fingerprint import fingerprint
from sparseprefill.adapters.star.inspection import decoder_of
from sparseprefill.adapters.star.layout import Sizes
from sparseprefill.adapters.star.options import check_options, stops
from sparseprefill.adapters.star.ranks import Ranks
from sparseprefill.adapters.star.tail import Tail
from sparseprefill.adapters.star.tokens import rows_of
from sparseprefill.adapters.star.unmasked import attend_all, attend_rows
from torch import Tensor

import sparseprefill as sp
from distributed.models import build, tokens
from sparseprefill import AttentionCall, ReferenceExecutor, SparseMask
from sparseprefill.errors import AttachError, InvalidCallError, ParameterError, UnsupportedCallError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.plan import Plan

maybe = st.one_of(st.none(), st.integers(1, 300))


@given(st.integers(1, 2000), maybe, maybe, st.sampled_from([1, 16, 128]), st.integers(1, 9))
def test_every_token_of_the_context_is_held_once(
    length: int, block: int | None, anchor: int | None, tile: int, ranks: int
) -> None:
    layout = Sizes(block, anchor, tile).layout(length, ranks)
    shares = [layout.share(rank) for rank in range(ranks)]
    assert [number for share in shares for number in share] == list(range(layout.count))
    assert sum(layout.held(rank) for rank in range(ranks)) == layout.context == length // tile * tile
    assert shares[0].stop >= layout.anchors
    rest = [len(share) for share in shares[1:]]
    assert not rest or max(rest) - min(rest) <= 1
    assert layout.sends == (layout.prefix > 0 and any(rest))
    for number in range(layout.count):
        span = layout.span(number)
        assert span.start % tile == 0
        assert layout.before(number) <= span.start


@frozen(eq=False)
class Together:
    """The ranks of one process: what rank `me` gets when all of them run one after the other."""

    parts: list[Tensor]
    me: int

    @property
    def size(self) -> int:
        return len(self.parts)

    def gather(self, x: Tensor) -> Tensor:
        if x.shape == self.parts[0].shape:
            return torch.stack(self.parts)
        return torch.stack([_merged_share(self.parts, rank) for rank in range(self.size)])

    def swap(self, x: Tensor) -> Tensor:
        return _shares(self.parts)[:, self.me]


def _shares(parts: list[Tensor]) -> Tensor:
    """[from rank, to rank, rows, D + 1]"""
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    share = -(-rows[0].shape[0] // len(parts))
    padded = [torch.nn.functional.pad(x, (0, 0, 0, share * len(parts) - x.shape[0])) for x in rows]
    return torch.stack(padded).view(len(parts), len(parts), share, -1)


def _merged_share(parts: list[Tensor], rank: int) -> Tensor:
    return exchange.pack(*exchange.merge(_shares(parts)[:, rank]))


@pytest.mark.parametrize("large", [False, True])
@given(st.integers(1, 5), st.data())
def test_parts_over_disjoint_keys_merge_to_the_whole(large: bool, ranks: int, data: st.DataObject) -> None:
    seed, strength = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1.0, 60.0]))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))
    generator = torch.Generator().manual_seed(seed)
    q, new_k, new_v = (torch.randn(2, heads, 3, 8, generator=generator) * strength for heads in (4, 2, 2))
    shards = [Shard(*_pair(n + 1, generator), (n, n)) for n in lengths]
    options: dict[str, Any] = {
        "sinks": torch.randn(4, generator=generator),
        "softcap": data.draw(st.sampled_from([None, 0.5])),
        "scale": data.draw(st.sampled_from([None, 0.8])),
    }
    call = AttentionCall(q, new_k, new_v, **options)
    k, v = (
        torch.cat([*(getattr(one, name)[:, :, : one.lengths[0]] for one in shards), x], 2)
        for name, x in (("k", new_k), ("v", new_v))
    )
    whole = AttentionCall(q, k, v, **options)
    wanted = ReferenceExecutor().execute(whole, Plan(SparseMask.full(whole)))
    # A logit's rounding grows with its terms, not with what is left of them: other sums, other errors.
    terms = (q.abs() @ k.abs().repeat_interleave(2, 1).transpose(-1, -2)).amax() * whole.softmax_scale
    slack = 4 * torch.finfo(torch.float32).eps * float(terms)
    parts: list[Tensor] = []
    for rank, shard in enumerate(shards):
        sent = _Sent()
        AnchoredBlockExecutor(ReferenceExecutor(), sent).attend(call, shard, owner=rank == ranks - 1)
        parts.append(sent.part)
    before, exchange.LARGE = exchange.LARGE, 0 if large else 1 << 30
    try:
        for me in range(ranks):
            last = AnchoredBlockExecutor(ReferenceExecutor(), Together(parts, me))
            out, lse = last.attend(call, shards[me], owner=me == ranks - 1)
            torch.testing.assert_close(out, wanted.out, rtol=1e-5, atol=(1e-5 + slack) * float(v.abs().amax()))
            torch.testing.assert_close(lse, wanted.lse, rtol=1e-5, atol=1e-4 + slack)
    finally:
        exchange.LARGE = before


def _pair(length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(2, 2, length, 8, generator=generator) for _ in "kv")
    return k, v


class _Sent:
    """Two ranks, so that there is something to send: keeps it."""

    size = 2
    part: Tensor

    def gather(self, x: Tensor) -> Tensor:
        self.part = x
        return torch.stack([x, x])

    def swap(self, x: Tensor) -> Tensor:
        self.part = x.view(-1, *x.shape[2:])
        return x


class Plain:
    """Attributes, and no repr of its own."""

    def __init__(self, x: Any) -> None:
        self.x = x


def _adds(number: int, other: Any = None) -> Any:
    return lambda x: x + number


def _kinds() -> dict[str, Any]:
    """What settings may hold, each made anew; and by the same name something else."""
    return {
        "default": (lambda n: partial(_adds, 1, other=n)),
        "tensor": (lambda n: torch.tensor([1.0, n])),
        "shape": (lambda n: torch.zeros(1 + n, 2 - n)),
        "dtype": (lambda n: torch.zeros(2, dtype=(torch.int32, torch.float32)[n])),
        "bfloat16": (lambda n: torch.full((), 1.0 + n, dtype=torch.bfloat16)),
        "plain": (lambda n: Plain({"a": [n]})),
        "set": (lambda n: {"b", "a", 3 + n}),
        "number": float,
        "class": (lambda n: (Plain, Tail)[n]),
        "function": (lambda n: (build, tokens)[n]),
        "pipeline": (lambda n: sp.build("streaming", window=64 + n)),
        "name": (lambda n: sp.build(("streaming", "dense")[n])),
    }


@pytest.mark.parametrize("kind", _kinds())
def test_equal_settings_have_one_fingerprint_and_others_have_another(kind: str) -> None:
    make = _kinds()[kind]
    first, again, other = (json.dumps(fingerprint("x", make(n))) for n in (0, 0, 1))
    assert first == again != other
    assert " at 0x" not in first


def test_a_fingerprint_ends_where_settings_hold_themselves() -> None:
    one, two = Plain(None), Plain(None)
    one.x, two.x = [one], [two]
    assert fingerprint("x", one) == fingerprint("x", two)


def test_of_nested_values_every_place_has_its_path() -> None:
    found = fingerprint("x", {"a": 1, "b": {"c": [1, None]}})
    lists = {"x.b": "a mapping", "x.b.c": "a list of 2"}
    assert found == {"x": "a mapping", "x.a": 1, **lists, "x.b.c[0]": 1, "x.b.c[1]": None}


def test_parts_without_any_key_give_zeros() -> None:
    parts = torch.zeros(3, 2, 5)
    parts[..., -1] = -torch.inf
    two = (parts[0, ..., :-1], parts[0, ..., -1])
    for out, lse in (exchange.merge(parts), exchange.join(*two, *two)):
        assert bool((out == 0).all())
        assert bool((lse == -torch.inf).all())


def test_what_cannot_be_spread_over_ranks_is_refused() -> None:
    call = AttentionCall(*(torch.randn(1, heads, 40, 8) for heads in (4, 2, 2)))
    executor = AnchoredBlockExecutor(ReferenceExecutor(), _Sent())
    with pytest.raises(InvalidCallError, match="other ranks"):
        executor.attend(AttentionCall(call.q, call.k, call.v, window=8), None, owner=True)
    with pytest.raises(InvalidCallError, match="one length for each"):
        Shard(call.k, call.v, (41,))


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4), st.data())
def test_a_tail_keeps_the_real_tokens_of_each_row(chunks: list[list[int]], data: st.DataObject) -> None:
    tail, number = Tail(), 0.0
    rows: list[list[float]] = [[], [], []]
    for real in chunks:
        width = max(*real, 1)
        chunk = torch.zeros(3, 1, width, 1)
        for row, count in enumerate(real):
            for at in range(width - count, width):
                number += 1
                chunk[row, 0, at] = number
                rows[row].append(number)
        tail.append(chunk, -chunk, real)
    if data.draw(st.booleans()):
        kept = [data.draw(st.integers(0, len(row))) for row in rows]
        rows = [row[:count] for row, count in zip(rows, kept, strict=True)]
        tail.keep(kept)
    assert tail.k is not None
    assert tail.v is not None
    starts = tail.starts(torch.device("cpu"))
    for row, wanted in enumerate(rows):
        first = 0 if starts is None else int(starts[row])
        assert tail.k[row, 0, first:, 0].tolist() == wanted
        assert tail.v[row, 0, first:, 0].tolist() == [-x for x in wanted]


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "softcap": {"softcap": 0.5}, "scale": {"scale": 0.9}}
OPTIONS["both"] = {**OPTIONS["softcap"], **OPTIONS["scale"]}
# On a GPU FlashAttention-2 serves few rows, and cuDNN many.
PLACES = [("cpu", 1), ("cpu", 5), *(pytest.param("cuda", rows, marks=pytest.mark.gpu) for rows in (1, 5, 130))]


def _exact(q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None, scale: float | None = None) -> Any:
    """Every row over every key, in float64, as the formula stands: output and LSE."""
    group, width = q.shape[1] // k.shape[1], q.shape[-1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    logits = q @ k.transpose(-1, -2) * (width**-0.5 if scale is None else scale)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize(("device", "rows"), PLACES)
@pytest.mark.parametrize("name", OPTIONS)
def test_keys_of_a_rank_are_attended_to_with_softcap_and_scale(name: str, device: str, rows: int) -> None:
    """Whatever kernel serves it: a kernel of torch knows no softcap."""
    generator, options, cuda = torch.Generator().manual_seed(3), OPTIONS[name], device == "cuda"
    dtype, width = (torch.bfloat16, 64) if cuda else (torch.float32, 8)
    q, k, v = (
        torch.randn(2, heads, length, width, generator=generator).to(device, dtype)
        for heads, length in ((4, rows), (2, 70), (2, 70))
    )
    new = torch.randn(2, 2, rows, width, generator=generator).to(device, dtype)
    call = AttentionCall(q, new, new, **options)
    close: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if cuda else {"rtol": 1e-5, "atol": 1e-5}
    out, lse = attend_all(AutoExecutor(), call, k, v)
    wanted, wanted_lse = _exact(q, k, v, **options)
    torch.testing.assert_close(out.double(), wanted, **close)
    torch.testing.assert_close(lse.double(), wanted_lse, **close)
    out, lse = attend_rows(AutoExecutor(), call, k, v, (70, 33))  # rows of unequal length go one by one
    wanted, wanted_lse = _exact(q[1:], k[1:, :, :33], v[1:, :, :33], **options)
    torch.testing.assert_close(out[1:].double(), wanted, **close)
    torch.testing.assert_close(lse[1:].double(), wanted_lse, **close)
    if name != "plain":
        plain, _ = _exact(q, k, v)
        assert float((plain - _exact(q, k, v, **options)[0]).abs().max()) > 0.1


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("inner", [None, "dense", {"method": "streaming", "parameters": {"sink": 64, "window": 64}}])
@pytest.mark.usefixtures("group")
def test_a_block_is_attended_to_with_softcap_scale_and_sinks(name: str, inner: Any) -> None:
    """Phase 1, behind an anchor: (anchor, block) as one call with every option, by torch's kernel or by a method."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, heads, 40, 8, generator=generator) for heads in (4, 2, 2))
    new, options = slice(24, 40), {**OPTIONS[name], "sinks": torch.randn(4, generator=generator)}
    held = {0: Shard(k.clone(), v.clone(), (k.shape[2],))}
    inside = attention_of(None if inner is None else sp.from_config(_table(inner)))
    anchor = Anchor(Ranks(timeout=1.0), {}, 24)
    block = Block(inside, anchor.ranks, anchor, held, row=0, at=24, before=24, sends=False, again=False)
    out = block.attend(AttentionCall(q[:, :, new], k[:, :, new], v[:, :, new], **options))
    whole = AttentionCall(q[:, :, new], k, v, **options)
    wanted = ReferenceExecutor().execute(whole, Plan(SparseMask.full(whole))).out
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def _table(inner: Any) -> dict[str, Any]:
    return {"method": inner} if isinstance(inner, str) else inner


@pytest.mark.usefixtures("group")
def test_what_a_layer_asks_for_reaches_the_call_or_is_refused() -> None:
    """Scale, softcap and sinks of a layer; a window and other things that no phase can give are errors."""
    q, sinks = torch.randn(1, 4, 3, 8), torch.randn(4)
    asked = {"scaling": 0.7, "softcap": 2.0, "s_aux": sinks}
    model = build("Gemma2")
    layer = model.model.layers[1].self_attn
    call = Switch(model)._call(layer, q, q, q, asked)
    assert (call.scale, call.softcap, call.layer) == (0.7, 2.0, 1)
    assert call.sinks is sinks
    sdpa = Switch(build())  # which drops both in silence, as equality wants it
    call = sdpa._call(layer, q, q, q, asked)
    assert (call.scale, call.softcap, call.sinks) == (0.7, None, None)
    for more, why in {
        "sliding_window": (24, "sliding window"),
        "is_causal": (False, "not causal"),
        "dropout": (0.1, "dropout"),
        "output_attentions": (True, "attention weights"),
        "position_bias": (torch.zeros(1), "the layer passes position_bias"),
    }.items():
        with pytest.raises(UnsupportedCallError, match=f"layer 1: .*{why[1]}"):
            sdpa._call(layer, q, q, q, {**asked, more: why[0]})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sliding": (
        "Gemma2",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
        "layers of sliding_attention",
    ),
    "rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary"),
    "window": ("Mistral", {"sliding_window": 24}, "sliding window|sliding_attention"),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_spread_are_refused(name: str) -> None:
    family, changes, why = REFUSED[name]
    with pytest.raises(Exception, match=why) as caught:
        Star(build(family, **changes), tile=16)
    assert "Error" in type(caught.value).__name__


def test_training_and_missing_group_are_refused() -> None:
    with pytest.raises(AttachError, match=r"model.eval\(\)"):
        decoder_of(build().train())
    with pytest.raises(AttachError, match="torchrun"):
        Star(build())


@pytest.mark.usefixtures("group")
def test_wrong_arguments_are_refused() -> None:
    model = build()
    with pytest.raises(ParameterError, match="block_size"):
        Star(model, block_size=0)
    with pytest.raises(ParameterError, match="timeout"):
        Star(model, timeout=0)
    with pytest.raises(ParameterError, match="inner"):
        Star(model, inner=3)  # type: ignore[arg-type,unused-ignore]
    context = Star(model, block_size=32, tile=16).encode([tokens(70)])
    with pytest.raises(ParameterError, match="2 rows for 1"):
        context.generate([tokens(3), tokens(3)])
    with pytest.raises(ParameterError, match="num_beams is 4"):
        context.generate([tokens(3)], num_beams=4)
    with pytest.raises(ParameterError, match="attention_mask"):
        context.generate([tokens(3)], attention_mask=None)


def test_options_are_read_from_where_they_stand() -> None:
    config = build().generation_config
    check_options({"max_new_tokens": 3}, config)
    assert stops({"eos_token_id": [3, 4]}, config) == {3, 4}
    assert stops({}, config) == frozenset()
    config.eos_token_id = 7
    assert stops({}, config) == {7}
    config.num_beams = 2
    with pytest.raises(ParameterError, match="num_beams"):
        check_options({}, config)


@pytest.mark.parametrize("given_rows", [[], [[]], [["a"]], "text", [1, 2], [[True]]])
def test_rows_are_token_ids(given_rows: Any) -> None:
    with pytest.raises(ParameterError, match="questions: "):
        rows_of("questions", given_rows)


def test_rows_may_be_tensors() -> None:
    assert rows_of("x", torch.tensor([[1, 2]])) == rows_of("x", torch.tensor([1, 2])) == [[1, 2]]
    assert rows_of("x", [torch.tensor([1]), [2, 3]]) == [[1], [2, 3]]  # type: ignore[list-item,arg-type,unused-ignore]
