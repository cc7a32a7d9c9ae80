"""Made-up layers look as they are said to, by exact attention at small lengths."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseprefill.errors import ParameterError
from sparseprefill.testing import head_tensors
from sparseprefill.testing.characters import CHARACTERS, LAYER, NEAR, Character
from sparseprefill.testing.rotary import Rotary

TOKENS, SEEDS = 4096, 3


def rows_of_attention(q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Softmax of some rows, ``[H, n, N]``."""
    logits = q[0, :, rows].double() @ k[0].double().repeat_interleave(q.shape[1] // k.shape[1], 0).mT
    future = torch.arange(k.shape[2]) > rows[:, None]
    return (logits / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf).softmax(-1)


@cache
def shares(name: str) -> dict[str, float]:
    """Mean shares of the mass over rows of the second half, heads and seeds."""
    rows = torch.linspace(TOKENS // 2, TOKENS - 1, 48).long()
    found: dict[str, list[Tensor]] = {}
    for seed in range(SEEDS):
        q, k, _ = head_tensors(q_len=TOKENS, heads=4, kv_heads=2, characters=[name], seed=seed)
        p = rows_of_attention(q, k, rows)
        key = torch.arange(TOKENS)
        near = (rows[:, None] - key < NEAR) & (key > 0)
        ranked = p.sort(-1, descending=True).values.cumsum(-1)
        peak = p.argmax(-1)
        facts = {
            "sink": p[..., 0],
            "local": (p * near).sum(-1),
            "top 5 %": ranked.gather(-1, (rows // 20).expand(4, -1)[..., None])[..., 0],
            "keys for 95 %": ((ranked < 0.95).sum(-1) + 1) / (rows + 1),
            "peak in the anchor": ((peak == 0) | (rows - peak < 128)).double(),
        }
        for fact, value in facts.items():
            found.setdefault(fact, []).append(value.mean())
    return {fact: float(torch.stack(values).mean()) for fact, values in found.items()}


@pytest.mark.parametrize("name", CHARACTERS)
def test_sink_and_local_window_hold_about_their_shares(name: str) -> None:
    one = CHARACTERS[name]
    assert shares(name)["sink"] == pytest.approx(one.sink, abs=0.2)
    # Of 4,096 keys the nearest 256 are many: part of what is spread, and of the spans, lies among them.
    assert one.local - 0.12 <= shares(name)["local"] <= one.local + 0.25


@pytest.mark.parametrize("name", [name for name in CHARACTERS if name != "diffuse"])
def test_few_keys_carry_most_of_a_concentrated_head(name: str) -> None:
    assert shares(name)["top 5 %"] > 0.85
    assert shares(name)["keys for 95 %"] < 0.1


def test_a_diffuse_head_is_spread() -> None:
    assert shares("diffuse")["top 5 %"] < 0.45
    assert shares("diffuse")["keys for 95 %"] > 0.5


@pytest.mark.parametrize("name", CHARACTERS)
def test_most_rows_peak_at_the_sink_or_nearby(name: str) -> None:
    assert shares(name)["peak in the anchor"] > (0.9 if name in ("sink", "local", "diffuse") else 0.55)


def test_a_layer_is_as_sparse_as_models_are() -> None:
    """SampleAttention, Table 4: at 4K tokens 9 to 12 % of the keys carry 95 % of the mass, at 128K 3 to 4 %."""
    needed = sum(shares(name)["keys for 95 %"] for name in LAYER) / len(LAYER)
    assert 0.03 < needed < 0.12


def test_stripes_vanish() -> None:
    """The columns that rows of one passage share are not those of every other passage."""
    q, k, _ = head_tensors(q_len=TOKENS, heads=1, kv_heads=1, characters=["stripes"], seed=1)
    p = rows_of_attention(q, k, torch.arange(TOKENS // 2, TOKENS))[0, :, 1 : TOKENS // 2 - NEAR]
    by_rows = p.unflatten(0, (32, -1)).mean(1)
    tops = [set(row.topk(12).indices.tolist()) for row in by_rows]
    common = [len(one & other) / 12 for one in tops for other in tops if one is not other]
    assert min(common) < 0.2
    assert max(common) > 0.6


def test_slashes_stay_at_their_distance() -> None:
    q, k, _ = head_tensors(q_len=TOKENS, heads=1, kv_heads=1, characters=["slash"], seed=2)
    rows = torch.arange(TOKENS // 2, TOKENS)
    p = rows_of_attention(q, k, rows)[0]
    p[:, 0] = 0
    distance = rows[:, None] - torch.arange(TOKENS)
    by_distance = torch.zeros(TOKENS, dtype=p.dtype).index_add_(0, distance.clamp(min=0).flatten(), p.flatten())
    by_distance[:NEAR] = 0
    best = by_distance.topk(2).indices
    assert float(by_distance.topk(16).values.sum() / by_distance.sum()) > 0.5
    assert int(best.min()) >= NEAR


def test_the_same_for_a_seed_and_another_for_another() -> None:
    size: dict[str, Any] = {"q_len": 300, "heads": 4, "kv_heads": 2, "head_dim": 64}
    first, again, other = (head_tensors(seed=seed, **size) for seed in (3, 3, 4))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_chunks_of_tokens_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.testing import heads

    monkeypatch.setattr(heads, "CHUNK", 128)
    q, k, _ = head_tensors(q_len=1000, heads=4, kv_heads=2, head_dim=64)
    assert bool(torch.isfinite(q).all())
    assert bool(torch.isfinite(k).all())
    p = rows_of_attention(q, k, torch.tensor([999]))
    assert float(p[:, 0, 0].max()) > 0.1


def test_shapes_and_storage() -> None:
    q, k, v = head_tensors(q_len=40, heads=6, kv_heads=3, head_dim=32, strided=True, dtype=torch.float16)
    assert (q.shape, k.shape, v.shape) == ((1, 6, 40, 32), (1, 3, 40, 32), (1, 3, 40, 32))
    assert {x.dtype for x in (q, k, v)} == {torch.float16}
    assert q.transpose(1, 2).is_contiguous()


def test_longer_prompts_turn_the_slow_pairs_no_further() -> None:
    slow = [float(Rotary.of(128, tokens).speeds[-1]) * tokens for tokens in (8192, 1 << 17, 1 << 20)]
    assert slow[1:] == pytest.approx(slow[:1] * 2, rel=0.2)
    assert float(Rotary.of(128, 8192).speeds[1]) == pytest.approx(500_000.0 ** (-2 / 128))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 30}, "head_dim is 30"),
        ({"head_dim": 65}, "head_dim is 65"),
        ({"heads": 5}, "heads is 5"),
        ({"characters": ["stripe"]}, "did you mean 'stripes'"),
        ({"characters": "local"}, "pass a list"),
        ({"q_len": 0}, "q_len is 0"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        head_tensors(**{"q_len": 16, "heads": 4, "kv_heads": 2, **change})


def test_shares_leave_a_rest() -> None:
    with pytest.raises(ParameterError, match="leave a rest"):
        Character(sink=0.6, local=0.4)
