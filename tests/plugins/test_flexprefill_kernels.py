"""FlexPrefill's kernels against plain PyTorch: scores of tiles, and the distance that chooses a head's pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.flexprefill import launch
from sparseprefill.plugins.flexprefill.pooled import distance, products, scores

import sparseprefill as sp
from helpers.build import among
from kernels.device import CUDA, DEVICE
from kernels.test_sampled import FIELDS
from sparseprefill import AttentionCall
from sparseprefill.mask.geometry import reachable_map
from sparseprefill.statistics.pooled import key_tile_mean, tile_mean
from sparseprefill.statistics.sampled import last_rows, sampled_mass
from sparseprefill.statistics.slashes import slash_tiles


def call_of(lengths: tuple[int, int], heads: tuple[int, int], fields: dict[str, Any]) -> AttentionCall:
    generator = torch.Generator().manual_seed(sum(lengths))
    q, k = (
        torch.randn(2, h, n, 16, generator=generator) for h, n in ((heads[0], lengths[0]), (heads[1], sum(lengths)))
    )
    return AttentionCall(q * 3, k, k, **among(sum(lengths), fields))


def moved(call: AttentionCall) -> AttentionCall:
    q, k = call.q.to(DEVICE), call.k.to(DEVICE)
    given = {name: getattr(call, name) for name in ("starts", "lengths")}
    rows: dict[str, Any] = {name: None if x is None else x.to(DEVICE) for name, x in given.items()}
    return AttentionCall(q, k, k, window=call.window, softcap=call.softcap, **rows)


@settings(max_examples=100 if CUDA else 25)
@given(
    lengths=st.tuples(st.sampled_from([1, 16, 127, 128, 129, 251]), st.sampled_from([0, 77, 500])),
    heads=st.sampled_from([(1, 1), (4, 1), (8, 1), (4, 2)]),
    fields=st.sampled_from(FIELDS),
    block=st.sampled_from([7, 16, 128]),
)
def test_scores_and_distance(
    lengths: tuple[int, int], heads: tuple[int, int], fields: dict[str, Any], block: int
) -> None:
    call = call_of(lengths, heads, fields)
    geometry, there = call.geometry, moved(call)
    queries, keys = tile_mean(call.q, geometry, block), key_tile_mean(call, block)
    seen = reachable_map(geometry, block, block)
    real = tile_mean(geometry.real_queries()[:, None].float(), geometry, block)[:, 0] > 0
    expected = scores(call, queries, keys, seen & real[..., None])
    first = queries.shape[2] // 2
    for part in (slice(0, first), slice(first, None)):
        if not queries[:, :, part].shape[2]:
            continue
        raw = products(queries[:, :, part], keys).to(DEVICE)
        actual = launch.tile_softmax(there, raw, part.start, block)
        torch.testing.assert_close(expected[:, :, part], actual.cpu(), rtol=1e-5, atol=1e-6)

    rows, exist = last_rows(call, block)
    columns = sampled_mass(call, rows, exist, block).columns
    far = distance(call, keys, rows, exist, columns, block)
    padded = torch.nn.functional.pad(columns, [0, keys.shape[2] * block - columns.shape[2]])
    true = padded.unflatten(-1, (-1, block)).sum(-1)
    index = rows[:, None, :, None].expand(-1, heads[0], -1, 16)
    query = torch.where(exist[:, None, :, None], torch.gather(call.q, 2, index), 0).sum(2, keepdim=True)
    query = query / exist.sum(1).clamp(min=1)[:, None, None, None]
    raw = products(query, keys)[:, :, 0].to(DEVICE)
    actual = launch.distance(there, raw, true.to(DEVICE), rows.shape[1], block)
    # The square root makes much of rounding where two distributions are alike.
    torch.testing.assert_close(far**2, actual.cpu() ** 2, rtol=1e-4, atol=2e-6)


def test_tiles_of_another_map_stay() -> None:
    from sparseprefill.kernels.sampled.diagonals import diagonal_tiles

    call = call_of((200, 100), (4, 2), {})
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4, call.geometry.tile_rows(16), call.geometry.tile_columns(16))
    others, slashes = (torch.rand(x, generator=generator) < 0.3 for x in (shape, (2, 4, shape[3])))
    excluded = torch.rand(2, 4, generator=generator) < 0.5
    expected = slash_tiles(call.geometry, slashes, 16, exclude=(excluded, others))
    for given_map in (others.clone(), others.transpose(2, 3).contiguous().transpose(2, 3)):
        heads = (excluded.to(DEVICE), given_map.to(DEVICE))
        found = diagonal_tiles(moved(call).geometry, slashes[:, :, None].to(DEVICE), 16, None, None, *heads)
        assert torch.equal(expected, found.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("fields", FIELDS)
def test_masks_by_kernel_are_those_in_plain_pytorch(fields: dict[str, Any]) -> None:
    """Nearly: rounding may move a tile across the threshold."""
    call = call_of((500, 0), (4, 2), fields)
    pipeline = sp.build("flexprefill", block=16, min_budget=32)
    expected, actual = (pipeline.plan(one, sp.Memory()) for one in (call, moved(call)))
    differ = expected.mask.to_dense() != actual.mask.to_dense().cpu()
    assert float(differ.float().mean()) < 1e-3
