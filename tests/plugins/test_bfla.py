"""BFLA against a literal transcription of the paper: the mask bit for bit, the output to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.bfla.stages import block_scores

import sparseprefill as sp
from helpers.layers import fields_of
from oracles.bfla import Parameters, bfla
from sparseprefill.mask.geometry import reachable_map

HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2)])


@st.composite
def parameters(draw: st.DrawFn, gammas: st.SearchStrategy[float] | None = None) -> Parameters:
    """Small blocks, whose groups and tiles divide them."""
    g, tile = draw(st.integers(1, 6)), draw(st.sampled_from([2, 3, 4, 8]))
    b = draw(st.sampled_from([n for n in range(1, 49) if n % g == 0 and n % tile == 0]))
    return Parameters(
        b,
        g,
        draw(gammas or st.sampled_from([0.0, 1.0]) | st.floats(0.05, 0.995)),
        tile,
        draw(st.sampled_from(["sum", "mean"])),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 2)),
        draw(st.none() | st.integers(1, 9)),
        draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])),
        draw(st.integers(0, 2**63 - 1)),
        draw(st.booleans()),
    )


def tensors(seed: int, heads: tuple[int, int], q_len: int, kv_len: int, batch: int = 1) -> list[torch.Tensor]:
    """float64 q, k, v."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads[0], q_len, 4), (heads[1], kv_len, 4), (heads[1], kv_len, 3))
    return [torch.randn(batch, *size, generator=generator, dtype=torch.float64) for size in sizes]


def build(p: Parameters) -> sp.Pipeline:
    return sp.build(
        "bfla",
        block=p.b,
        group=p.g,
        keep_mass=p.gamma,
        score_norm=p.norm,
        local_tiles=p.n_local,
        sink_tiles=p.n_sink,
        stride=p.eta,
        random=p.rho,
        seed=p.s,
        tile=p.T,
        gqa_union=p.gqa_union,
    )


def compare(p: Parameters, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> sp.Result:
    """The plugin's result, once it equals the oracle's."""
    result = build(p).run(sp.AttentionCall(q, k, v, **fields_of(options)))
    out, mask = bfla(q, k, v, p, **options)
    assert torch.equal(mask, result.mask.to_dense())
    torch.testing.assert_close(out, result.out, rtol=1e-12, atol=1e-12)
    return result


@settings(max_examples=20)
@given(
    p=parameters(),
    length=st.integers(1, 140),
    heads=HEADS,
    seed=st.integers(0, 2**16),
    layer=st.integers(-1, 40),
    softcap=st.sampled_from([None, 0.7]),
    window=st.none() | st.integers(1, 150),
)
def test_equals_the_paper(
    p: Parameters,
    length: int,
    heads: tuple[int, int],
    seed: int,
    layer: int,
    softcap: float | None,
    window: int | None,
) -> None:
    compare(p, *tensors(seed, heads, length, length), layer=layer, softcap=softcap, window=window)


@settings(max_examples=20)
@given(
    p=parameters(), q_len=st.integers(1, 60), before=st.integers(0, 90), after=st.integers(0, 30), seed=st.integers(0)
)
def test_equals_the_paper_at_any_offset(p: Parameters, q_len: int, before: int, after: int, seed: int) -> None:
    q, k, v = tensors(seed % 2**16, (2, 1), q_len, before + q_len + after)
    compare(p, q, k, v, q_offset=before, scale=0.8)


@settings(max_examples=20)
@given(
    p=parameters(),
    kv_len=st.integers(2, 80),
    share=st.floats(0, 1),
    starts=st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
    ends=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    seed=st.integers(0, 2**16),
)
def test_equals_the_paper_in_a_padded_batch(
    p: Parameters, kv_len: int, share: float, starts: list[float], ends: list[float], seed: int
) -> None:
    first = [int(start * kv_len) for start in starts]
    lengths = [round(end * (kv_len - begin)) for begin, end in zip(first, ends, strict=True)]
    q, k, v = tensors(seed, (2, 2), max(1, round(share * kv_len)), kv_len, batch=2)
    compare(p, q, k, v, starts=first, lengths=lengths)


@settings(max_examples=25)
@given(p=parameters(), blocks=st.integers(1, 6), rest=st.integers(0, 47), cut=st.integers(1, 5), seed=st.integers(0))
def test_a_cut_at_a_block_changes_nothing(p: Parameters, blocks: int, rest: int, cut: int, seed: int) -> None:
    length = blocks * p.b + min(rest, p.b - 1) + 1
    q, k, v = tensors(seed % 2**16, (2, 1), length, length)
    at = min(cut, blocks) * p.b
    pipeline = build(p)
    whole = pipeline.run(sp.AttentionCall(q, k, v))
    assert p.b == pipeline.grain
    parts = [
        pipeline.run(sp.AttentionCall(q[:, :, :at], k[:, :, :at], v[:, :, :at])),
        pipeline.run(sp.AttentionCall(q[:, :, at:], k, v)),
    ]
    masks = [torch.nn.functional.pad(part.mask.to_dense(), (0, length - part.mask.geometry.kv_len)) for part in parts]
    assert torch.equal(whole.mask.to_dense(), torch.cat(masks, 2))
    torch.testing.assert_close(whole.out, torch.cat([part.out for part in parts], 2), rtol=1e-12, atol=1e-12)


# Bugs of released code, each as a test.


@pytest.mark.parametrize(("stride", "random"), [(7, 0.0), (None, 0.2), (5, 0.1)])
@pytest.mark.parametrize("cut", [1, 16, 37, 96])
def test_the_rescue_set_does_not_change_with_chunking(stride: int | None, random: float, cut: int) -> None:
    """With no mass kept, what is left is the rescue set: equal wherever the prompt is cut, inside a tile too."""
    pipeline = sp.build(
        "bfla", keep_mass=0.0, block=32, group=8, tile=8, local_tiles=0, sink_tiles=0, stride=stride, random=random
    )
    q, k, v = tensors(3, (4, 2), 130, 130)
    whole = pipeline.run(sp.AttentionCall(q, k, v, layer=2)).mask.to_dense()
    later = pipeline.run(sp.AttentionCall(q[:, :, cut:], k, v, layer=2)).mask.to_dense()
    earlier = pipeline.run(sp.AttentionCall(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], layer=2)).mask.to_dense()
    assert torch.equal(whole[:, :, cut:], later)
    assert torch.equal(whole[:, :, :cut, :cut], earlier)


@pytest.mark.parametrize("length", [33, 40, 63, 65])
def test_padding_of_the_last_block_does_not_win_the_maximum(length: int) -> None:
    """All scores are negative, so a padded group's 0 would draw the mass to the block that is not full."""
    q, k, v = tensors(4, (1, 1), length, length)
    q, k = q.abs(), -k.abs()
    k[:, :, 16:24] *= 0.01
    p = Parameters(b=16, g=8, gamma=0.5, T=8)
    result = compare(p, q, k, v)
    assert bool(result.mask.to_dense()[0, 0, 32:, 16:24].all())


def test_a_kept_mass_of_one_keeps_blocks_of_no_mass_too() -> None:
    q, k, v = tensors(5, (2, 1), 90, 90)
    result = sp.build("bfla", keep_mass=1.0, block=16, group=4, tile=8).run(sp.AttentionCall(q * 100, k * 100, v))
    assert result.density == 1.0


@pytest.mark.parametrize("offset", [0, 5, 16, 21])
def test_the_diagonal_tile_is_kept_at_any_offset(offset: int) -> None:
    pipeline = sp.build(
        "bfla", keep_mass=0.0, block=16, group=4, tile=8, local_tiles=0, sink_tiles=0, stride=None, random=0.0
    )
    result = pipeline.run(sp.AttentionCall(*tensors(6, (1, 1), 30, 60), q_offset=offset))
    position = torch.arange(30) + offset
    keep = result.mask.to_dense()[0, 0]
    expected = (position[:, None] // 8 == torch.arange(60) // 8) & (position[:, None] >= torch.arange(60))
    assert torch.equal(expected, keep)


def test_chunks_of_query_blocks_do_not_change_the_scores() -> None:
    options: tuple[dict[str, Any], ...] = {"q_offset": 13}, {"starts": torch.tensor([0, 21], dtype=torch.int32)}
    for fields in options:
        call = sp.AttentionCall(*tensors(7, (4, 2), 101, 130, batch=2), **fields)
        causal = reachable_map(call.geometry, 16, 16)[:, None]
        whole, parts = (torch.where(causal, block_scores(call, 16, 4, n), 0) for n in (None, 1))
        torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-12)


def test_one_mask_for_a_gqa_group() -> None:
    q, k, v = tensors(8, (4, 2), 150, 150)
    pipeline = sp.build("bfla", block=16, group=4, tile=8, keep_mass=0.6, gqa_union=True)
    keep = pipeline.run(sp.AttentionCall(q, k, v)).mask.to_dense()
    apart = sp.build("bfla", block=16, group=4, tile=8, keep_mass=0.6).run(sp.AttentionCall(q, k, v)).mask.to_dense()
    assert torch.equal(apart.unflatten(1, (2, 2)).any(2, keepdim=True).expand(-1, -1, 2, -1, -1).flatten(1, 2), keep)
    assert not torch.equal(apart, keep)


def test_nan_of_a_key_reaches_the_rows_of_its_blocks() -> None:
    q, k, v = tensors(9, (1, 1), 64, 64)
    k[:, :, 20] = torch.nan
    pipeline = sp.build(
        "bfla", keep_mass=0.0, block=16, group=4, tile=8, local_tiles=0, sink_tiles=0, stride=None, random=0.0
    )
    keep = pipeline.run(sp.AttentionCall(q, k, v)).mask.to_dense()[0, 0]
    assert bool(keep[32:, 16:32].all())
    assert not bool(keep[32:48, :16].any())


def test_rescues_are_refiners_that_can_be_replaced() -> None:
    pipeline = sp.build("bfla", random=0.1)
    names = [type(refiner).__name__ for refiner in pipeline.refiners]
    expected = ["LocalBand", "Sink", "StrideRescue", "RandomRescue"]
    assert expected == names
    assert sp.build("bfla").estimator == evolve(pipeline, refiners=()).estimator


@pytest.mark.parametrize("norm", ["sum", "mean"])
def test_the_softcap_counts_with_mean_scores_alone(norm: str) -> None:
    """A product of whole groups is a sum of logits, to which no softcap applies; their mean is as large as one."""
    q, k, v = tensors(3, (2, 1), 160, 160)

    def mask(softcap: float | None) -> torch.Tensor:
        pipeline = sp.build(
            "bfla", block=16, group=8, tile=16, keep_mass=0.5, score_norm=norm, stride=None, local_tiles=1
        )
        return pipeline.run(sp.AttentionCall(q, k, v, softcap=softcap)).mask.to_dense()

    assert torch.equal(mask(None), mask(0.2)) == (norm == "sum")
