"""The Hopper kernel in 8 bits against its oracle, against float64 attention, and against itself in 16 bits."""

from __future__ import annotations

import pytest
import torch

from kernels.device import HOPPER
from oracles import eight_bits as oracle
from sparseprefill import AttentionCall, Pages, Plan, Result, SparseMask, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.plan import Rounding
from sparseprefill.testing import attention

launch = pytest.importorskip("sparseprefill.kernels.hopper.launch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of capability 9.0")]
PLAIN, EIGHT = TritonExecutor(), TritonExecutor(precision="int8")
ALL_IN_16 = TritonExecutor(precision="int8", bound=0.0)
LENGTHS = [(2048, 2048, 4), (4133, 4133, 1), (2053, 5003, 2), (2048, 8192 + 64, 8)]


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LEAST_KEYS", 0)
    monkeypatch.setattr(launch, "LEAST_ITEMS", 0)


def make(lengths: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> AttentionCall:
    """Keys and values with means, as models have them."""
    n, keys, group = lengths
    g = torch.Generator(device="cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(1, heads, length, 128, generator=g, device="cuda")
        for heads, length in ((2 * group, n), (2, keys), (2, keys))
    )
    k += 3 * torch.randn(1, 2, 1, 128, generator=g, device="cuda")
    return AttentionCall(q.to(dtype), k.to(dtype), (v + 1).to(dtype))


def rounding_of(result: Result) -> Rounding:
    assert result.rounded is not None
    return result.rounded


def masks(call: AttentionCall, seed: int = 0) -> dict[str, SparseMask]:
    g = torch.Generator(device="cuda").manual_seed(seed)
    rows, columns = call.geometry.tile_rows(128), call.geometry.tile_columns(128)
    some = torch.rand(1, call.q.shape[1], rows, columns, generator=g, device="cuda") < 0.3
    return {
        "full": SparseMask.full(call),
        "some": SparseMask.from_tiles(call, some),
        "without a diagonal": SparseMask.from_tiles(call, some, diagonal=False),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_its_oracle(lengths: tuple[int, int, int], dtype: torch.dtype) -> None:
    call = make(lengths, dtype)
    for name, mask in masks(call).items():
        result = EIGHT.execute(call, Plan(mask))
        assert [str(one) for one in result.kernels] == ["hopper-int8"]
        assert bool(rounding_of(result).heads.all()), name
        head = 1
        tiles = mask.tile_map()[0, head].cpu()
        kv = head // lengths[2]
        q, k, v = call.q[0, head].cpu(), call.k[0, kv].cpu(), call.v[0, kv].cpu()
        out, lse = oracle.attention(q, k, v, tiles, call.geometry.q_offset, call.softmax_scale, False)
        assert output_error(result.out[:1, head : head + 1].cpu(), out[None, None]) < 3e-3, name
        real = lse > -torch.inf
        assert torch.equal(result.lse[0, head].cpu() > -torch.inf, real)
        assert (result.lse[0, head].cpu() - lse)[real].abs().max() < 2e-3, name


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_is_as_near_to_float64_as_its_errors_say(lengths: tuple[int, int, int]) -> None:
    call = make(lengths)
    for mask in masks(call).values():
        result = EIGHT.execute(call, Plan(mask))
        out, lse = attention(call, mask.to_dense())
        assert output_error(result.out, out) < 5e-3
        assert float(rounding_of(result).errors.max()) < 1e-2
        real = lse > -torch.inf
        assert (result.lse - lse)[real].abs().max() < 2e-2
        assert result.out[~real].abs().sum() == 0


def test_heads_beyond_the_bound_run_in_16_bits() -> None:
    """Values of one KV head are noise around zero: of them flat attention leaves little, of their rounding more."""
    call = make((4133, 4133, 2))
    call.v[:, 0] -= 1
    mask = masks(call)["full"]
    exact = PLAIN.execute(call, Plan(mask))
    loose = TritonExecutor(precision="int8", bound=1.0).execute(call, Plan(mask))
    bound = 0.02
    result = TritonExecutor(precision="int8", bound=bound).execute(call, Plan(mask))
    errors = rounding_of(result).errors[0]
    assert (errors[:2] > bound).all()
    assert (errors[2:] <= bound).all()
    assert rounding_of(result).heads.tolist() == [[False, False, True, True]]
    for head in range(4):
        wanted = exact if head < 2 else loose
        assert output_error(result.out[:, head], wanted.out[:, head]) < 2e-3
    assert output_error(loose.out[:, :2], exact.out[:, :2]) > bound
    every = ALL_IN_16.execute(call, Plan(mask))
    assert not bool(rounding_of(every).heads.any())
    assert output_error(every.out, exact.out) < 2e-3


def test_flat_attention_sums_what_13_bits_would_lose() -> None:
    """131,072 keys, one weight for each; values that rise from -1 to 1, so that no mean makes sums small."""
    n, keys = 2048, 1 << 17
    q = torch.zeros(1, 1, n, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, 1, keys, 128, device="cuda").to(torch.bfloat16)
    v = torch.linspace(-1, 1, keys, device="cuda")[:, None].expand(1, 1, keys, 128).to(torch.bfloat16)
    call = AttentionCall(q, k, v, q_offset=keys // 4)
    result = EIGHT.execute(call, Plan(SparseMask.full(call)))
    wanted = v[0, 0, :, 0].float().cumsum(0)[keys // 4 : keys // 4 + n] / torch.arange(
        keys // 4 + 1, keys // 4 + n + 1, device="cuda"
    )
    inner = slice(0, n - 128)  # the last query tile is in 16 bits
    assert ((result.out[0, 0, inner, 0].float() - wanted[inner]) / wanted[inner]).abs().max() < 6e-3


@pytest.mark.parametrize("page", [16, 128])
def test_pages_are_read_where_they_are(page: int) -> None:
    call = make((2053, 5003, 2))
    count = -(-call.kv_len // page)
    table = torch.randperm(count + 3, device="cuda")[:count].to(torch.int32)
    caches = []
    for x in (call.k, call.v):
        cache = torch.full((count + 3, page, 2, 128), torch.nan, dtype=x.dtype, device="cuda")
        whole = torch.zeros(count * page, 2, 128, dtype=x.dtype, device="cuda")
        whole[: call.kv_len] = x[0].transpose(0, 1)
        cache[table.long()] = whole.view(count, page, 2, 128)
        caches.append(cache)
    paged = AttentionCall.of_pages(call.q, Pages(caches[0], caches[1], table, call.kv_len))
    for name, mask in masks(call).items():
        there = {"full": SparseMask.full(paged)}.get(
            name, SparseMask.from_tiles(paged, mask.tile_map(), diagonal=False)
        )
        result, wanted = EIGHT.execute(paged, Plan(there)), EIGHT.execute(call, Plan(mask))
        assert [str(one) for one in result.kernels] == ["hopper-int8"]
        assert output_error(result.out, wanted.out) < 1e-3, name
        assert torch.allclose(result.lse, wanted.lse, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_only_the_rows_that_see_it(value: float) -> None:
    for where in ("k", "v", "q"):
        call = make((2048, 2048, 2))
        getattr(call, where)[:, 1, 700, 3] = value
        mask = masks(call)["some"]
        found, wanted = (one.execute(call, Plan(mask)).out for one in (EIGHT, PLAIN))
        assert torch.equal(found.isfinite(), wanted.isfinite()), where
        assert output_error(found[found.isfinite()][None], wanted[found.isfinite()][None]) < 5e-3


def test_what_stays_in_16_bits_is_told() -> None:
    call = make((2048, 2048, 2))
    columns = SparseMask.from_stripes(call, torch.arange(2048, device="cuda") % 8 == 0)
    result = EIGHT.execute(call, Plan(columns))
    assert result.rounded is None
    assert "hopper-int8: columns in the mask" in str(result.kernels[0])
