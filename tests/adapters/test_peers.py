"""`python -m lab.peers`: what is measured, what is compared before a time counts, how others fail in it."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from typer.testing import CliRunner, Result

from helpers.modules import as_module
from lab.bench.baseline import FLASH4
from lab.bench.case import Part, call_of, parse_mask, random_mask
from lab.bench.clock import Clock
from lab.bench.shape import Shape
from lab.peers import peers, tables
from lab.peers.app import app
from lab.peers.peers import FULL, OURS, PEERS, Features, Mask, Peer, Work
from lab.peers.scoreboard import MASKS, Score, Scoreboard, exact
from sparseprefill import AttentionCall, SparseMask, UnsupportedCallError
from sparseprefill.testing import attention, tensors

CPU = torch.device("cpu")
SHAPE = Shape(length=300, heads=4, kv_heads=2, head_dim=32, dtype="float32")
QUICK = Clock(CPU, rounds=1, budget=0.01)
TINY = ("--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--rounds", "1", "--tokens", "300", "--device", "cpu")
SOME = [FULL, parse_mask("tiles:0.2"), parse_mask("diagonal+stripes:0.2")]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def named(name: str) -> Peer:
    return next(peer for peer in PEERS if peer.name == name)


def measured(*contenders: Peer, masks: list[tuple[Part, ...]] = SOME, shape: Shape = SHAPE) -> list[Score]:
    return Scoreboard(QUICK, masks, peers=contenders).run(shape)


@pytest.mark.thorough
@pytest.mark.filterwarnings("error")
def test_ours_and_flex_attention_beside_sdpa() -> None:
    board = Scoreboard(QUICK, SOME)
    told: list[str] = []
    scores = board.run(SHAPE, told.append)
    assert len(told) == board.steps == len(scores) == 7
    kernels = [(score.kernel, score.mask) for score in scores]
    assert kernels[0] == ("SDPA", "full")
    assert kernels[1:3] == [(OURS, "full"), ("FlexAttention", "full")]
    assert {mask for _, mask in kernels} == {"full", "tiles 0.2", "diagonal + stripes 0.2"}
    for score in scores:
        assert (score.refused, score.error, score.baseline) == ("", "", "SDPA")
        assert score.off is not None
        assert score.off < 1e-5
        assert score.seconds > 0 < score.dense
        assert score.efficiency == pytest.approx(score.density * score.dense / score.seconds)
        assert score.flops == pytest.approx(4 * 32 * score.pairs / score.seconds)
        assert score.pairs == pytest.approx(score.density * 4 * 300 * 301 / 2)
        assert score.syncs is None
    plans = {(score.kernel, score.mask): score.plan for score in scores}
    assert plans["SDPA", "full"] is None is plans[OURS, "full"]
    assert all(seconds for (name, mask), seconds in plans.items() if name != "SDPA" and (name, mask) != (OURS, "full"))


def test_masks_are_the_same_for_all_and_as_wanted() -> None:
    shape = evolve(SHAPE, length=4300)
    call = call_of(shape, "random", 0, CPU)
    dense = random_mask(call, parse_mask("diagonal+stripes:0.1"), 0)
    diagonal = random_mask(call, parse_mask("diagonal"), 0)
    assert dense.disjoint
    rows = torch.arange(0, 4300, 61)
    assert torch.equal(dense.to_dense(rows), random_mask(call, parse_mask("diagonal+stripes:0.1"), 0).to_dense(rows))
    assert int((diagonal - dense).pairs().sum()) == 0
    assert int(diagonal.pairs().sum()) + int((dense - diagonal).pairs().sum()) == int(dense.pairs().sum())
    assert [" + ".join(map(str, parse_mask(text))) for text in MASKS][-1] == "diagonal + stripes 0.05"


def fake(factor: float = 1.0, fails: Exception | None = None, dense: bool = False) -> Peer:
    """Our executor under another name, whose output is `factor` times what it should be."""

    def make(call: AttentionCall, mask: Mask) -> Work:
        if fails is not None:
            raise fails
        work = named(OURS).make(call, mask)
        return evolve(work, out=lambda found: found * factor)

    return Peer(name="other", features=Features(), make=make, device="", dense=dense)


def test_an_output_that_is_off_has_no_time() -> None:
    *_, score = measured(named("SDPA"), fake(1.05), masks=[parse_mask("tiles:0.3")])
    assert score.off == pytest.approx(0.05, rel=1e-3)
    assert (score.seconds, score.efficiency, score.flops) == (0.0, 0.0, 0.0)
    assert "is off by 0.05" in score.error
    assert tables.cells(score)[3] == "off"
    fact = tables.fact(score)
    assert fact["error"] == score.error
    assert "seconds" not in fact
    *_, close = measured(named("SDPA"), evolve(fake(1.05), within=0.1), masks=[parse_mask("tiles:0.3")])
    assert close.counts


def test_a_dense_kernel_that_is_off_is_no_yardstick() -> None:
    first, off, ours = measured(named("SDPA"), fake(1.05, dense=True), named(OURS), masks=[FULL])
    assert (first.baseline, ours.baseline) == ("SDPA", "SDPA")
    assert not off.counts


@pytest.mark.parametrize(
    ("error", "refused", "text"),
    [
        (UnsupportedCallError(["no stripes here"]), True, "no stripes here"),
        (RuntimeError("CUDA error: misaligned\nmore"), False, "RuntimeError: CUDA error: misaligned"),
        (AssertionError(), False, "AssertionError: no reason"),
    ],
)
def test_what_others_raise_is_told(error: Exception, refused: bool, text: str) -> None:
    _, score, ours = measured(named("SDPA"), fake(fails=error), named(OURS), masks=[parse_mask("tiles:0.1")])
    assert (score.refused, score.error) == ((text, "") if refused else ("", text))
    assert ours.counts
    word = "does not take" if refused else "failed on"
    assert f"other {word} tiles 0.1: {text}" in list(tables.remarks([score, ours]))
    assert ([ours] if refused else [score, ours]) == tables.shown([score, ours])


def test_without_any_dense_kernel_there_is_no_share() -> None:
    (ours,) = measured(named(OURS), masks=[parse_mask("tiles:0.1")])
    assert ours.counts
    assert (ours.dense, ours.baseline, ours.efficiency) == (0.0, "", 0.0)


def test_the_truth_is_plain_attention() -> None:
    q, k, v = tensors("random", batch=2, heads=4, kv_heads=2, q_len=70, kv_len=70, head_dim=16)
    call = AttentionCall(q, k, v)
    mask = SparseMask.from_tiles(call, torch.rand(2, 4, 9, 9) < 0.3, 8, diagonal=False)
    rows = torch.tensor([0, 3, 40, 69])
    out, _ = attention(call, mask.to_dense())
    torch.testing.assert_close(exact(call, mask.to_dense, rows), out[:, :, rows].float(), atol=1e-5, rtol=1e-5)


def test_what_is_absent_is_listed_with_the_way_to_get_it() -> None:
    def load() -> None:
        raise ImportError("No module named 'other'")

    other = Peer(name="other", features=Features(), make=fake().make, load=load, device="", install="pip install other")
    assert not Scoreboard(QUICK, SOME, peers=[other]).present
    line = "not here: other (ImportError: No module named 'other'): pip install other"
    assert [line] == tables.absent([other, named(OURS)], CPU)
    (fact, _) = tables.features([other, named(OURS)], [], CPU)
    assert (fact["missing"], fact["install"]) == ("ImportError: No module named 'other'", "pip install other")
    for words in ("flash-attn-4[cu13]", "nvidia-cudnn-frontend[cutedsl]", "flash-sparse-attn"):
        assert any(words in text for text in tables.absent(PEERS, CPU))


def test_a_gpu_has_no_stand_in() -> None:
    cuda = torch.device("cuda")
    assert "SDPA" not in [row[0] for row in tables.feature_cells(PEERS, [], cuda)]
    assert "SDPA" in [row[0] for row in tables.feature_cells(PEERS, [], CPU)]
    assert named("SDPA").missing(cuda)


def by_blocks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Attention over bool ``[B, H, N, N]`` of ``[B, H, N, D]``."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, keep, scale=scale, enable_gqa=True)


def listed(counts: Tensor, index: Tensor) -> Tensor:
    """bool ``[B, H, R, C]`` of lists."""
    entry = torch.arange(index.shape[-1]) < counts[..., None]
    columns = torch.where(entry, index, index.shape[-1]).long()
    keep = torch.zeros(*index.shape[:-1], index.shape[-1] + 1, dtype=torch.bool)
    return keep.scatter_(-1, columns, True)[..., :-1]


def per_token(keep: Tensor, tokens: int, tile: int = 128) -> Tensor:
    return keep.repeat_interleave(tile, 2)[:, :, :tokens].repeat_interleave(tile, 3)[..., :tokens]


def test_flash_attention_4_gets_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part is played by PyTorch: blocks as the lists say, causality inside the partial ones alone."""
    from sparseprefill.mask.export import Fa4Lists

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        lists, n = options["block_sparse_tensors"], q.shape[1]
        assert (lists.block_size, options["mask_mod"], options["pack_gqa"]) == ((128, 128), "causal", False)
        for x in lists[:4]:
            assert x.dtype == torch.int32
            assert x.shape[:3] == (1, 4, 3)
            assert x.is_contiguous()
        partial_, full = (listed(lists[at], lists[at + 1]) for at in (0, 2))
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        keep = per_token(full, n) | (per_token(partial_, n) & causal)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return by_blocks(q, k, v, keep, options["softmax_scale"]).transpose(1, 2), None

    as_module("flash_attn.cute", monkeypatch, flash_attn_func=attend)
    as_module("flash_attn.cute.block_sparsity", monkeypatch, BlockSparseTensorsTorch=Fa4Lists)
    monkeypatch.setattr(peers, "causal", lambda: "causal")
    other = evolve(named(f"{FLASH4} block-sparse"), device="", load=lambda: None)
    scores = {score.mask: score for score in measured(named("SDPA"), other, masks=SOME) if score.kernel == other.name}
    assert scores["full"].counts
    assert scores["tiles 0.2"].counts
    assert "has stripes" in scores["diagonal + stripes 0.2"].refused


@pytest.mark.parametrize("extra", [None, RuntimeError("no")])
def test_cudnn_gets_what_it_wants(extra: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part is played by PyTorch: whole tiles, nothing causal inside them."""

    def attend(q: Tensor, k: Tensor, v: Tensor, index: Tensor, **options: Any) -> dict[str, Tensor]:
        if extra is not None:
            raise extra
        counts = options["q2k_block_nums"]
        assert (counts.dtype, index.dtype, options["sparse_block_size"]) == (torch.int32, torch.int32, 128)
        assert (counts.shape, index.shape) == ((1, 4, 3), (1, 4, 3, 3))
        keep = per_token(listed(counts, index), q.shape[2])
        return {"o_tensor": by_blocks(q, k, v, keep, options["softmax_scale"])}

    cudnn(monkeypatch, block_sparse_attention_forward=attend)
    other = evolve(named("cuDNN block-sparse"), device="", load=lambda: None)
    scores = {score.mask: score for score in measured(named("SDPA"), other, masks=SOME) if score.kernel == other.name}
    told = (True, "") if extra is None else (False, "RuntimeError: no")
    for mask in ("full", "tiles 0.2"):
        assert told == (scores[mask].counts, scores[mask].error)
    assert "only takes blocks" in scores["diagonal + stripes 0.2"].refused


def test_cudnn_in_fp8_gets_lists_of_equal_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, index: Tensor, **options: Any) -> dict[str, Tensor]:
        assert q.shape == k.shape == v.shape == (1, 4, 512, 128)
        assert options == {"softmax_scale": pytest.approx(128**-0.5), "sparse_block_size": 128}
        counts = torch.full(index.shape[:3], index.shape[3])
        assert all(len(set(row)) == len(row) for row in index.flatten(0, 2).tolist())
        wide = torch.nn.functional.pad(index, (0, 4 - index.shape[3]))
        return {"o_tensor": by_blocks(q, k, v, per_token(listed(counts, wide), 512), 128**-0.5)}

    cudnn(monkeypatch, block_sparse_attention_fp8_forward=attend)
    other = evolve(named("cuDNN block-sparse fp8"), device="", load=lambda: None)
    shape = evolve(SHAPE, length=512, head_dim=128, dtype="bfloat16")
    full, tiles, stripes = measured(other, shape=shape)
    assert (full.error, full.counts, full.pairs) == ("", True, 4 * 4 * 2 * 128 * 128)
    assert tiles.counts
    assert tiles.pairs % (4 * 4 * 128 * 128) == 0
    assert "only takes blocks" in stripes.refused
    changes: list[tuple[dict[str, Any], str]] = [({"head_dim": 64}, "pass 128"), ({"length": 300}, "multiple")]
    for change, words in [*changes, ({"dtype": "float32"}, "bfloat16")]:
        (score,) = measured(other, masks=[FULL], shape=evolve(shape, **change))
        assert words in score.refused


def cudnn(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    library = ModuleType("BSA")
    for name, function in functions.items():
        setattr(library, name, function)
    as_module("cudnn.block_sparse_attention", monkeypatch, BSA=library)


def test_flash_sparse_attention_is_a_dense_kernel_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, softmax_scale: float) -> Tensor:
        causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        assert is_causal
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return by_blocks(q, k, v, causal, softmax_scale).transpose(1, 2)

    as_module("flash_sparse_attn", monkeypatch, flash_dense_attn_func=attend)
    other = evolve(named("flash-sparse-attn"), device="", load=lambda: None)
    (score,) = measured(other, masks=[])
    assert (score.counts, score.mask, score.baseline) == (True, "full", "flash-sparse-attn")
    with pytest.raises(UnsupportedCallError, match="takes no mask"):
        other.make(call_of(SHAPE, "random", 0, CPU), (SparseMask.full(call_of(SHAPE, "random", 0, CPU)), SOME[1]))


@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_on_a_gpu() -> None:
    """Whatever is installed: nothing fails, and nothing is off."""
    shape = Shape(length=4096, heads=8, kv_heads=2)
    masks = [FULL, parse_mask("tiles:0.25"), parse_mask("diagonal+stripes:0.1")]
    scores = Scoreboard(Clock(torch.device("cuda"), rounds=2, budget=0.1), masks).run(shape)
    assert [] == [(score.kernel, score.mask, score.error) for score in scores if score.error]
    ours = [score for score in scores if score.kernel == OURS]
    assert [True] * 3 == [score.counts for score in ours]
    assert {0} == {score.syncs for score in ours}
    assert {"cuDNN", "FlashAttention", "FlexAttention"} <= {score.kernel for score in scores if score.counts}


def test_the_command_writes_what_it_measures(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"peers.{name}" for name in ("md", "json")}
    written = ("--markdown", str(paths["md"]), "--json", str(paths["json"]))
    masks = ("--executor", "tiles:0.2", "--executor", "diagonal+stripes:0.1", "--tokens", "200")
    result = invoke(*TINY, *masks, *written)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "200 tokens, 4 / 2 heads, d 32, float32, inputs random" in text
    assert "fastest dense (SDPA)" in text
    assert "times on a CPU" in text
    assert 'pip install --pre "flash-attn-4[cu13]"' in text
    page = paths["md"].read_text()
    assert "| FlexAttention | tiles 0.2 |" in page
    assert "| kernel | causal | GQA | paged | LSE | stripes | fp8 | waits |" in page
    found = json.loads(paths["json"].read_text())
    assert set(found) == {"version", "machine", "seed", "rounds", "scores", "peers"}
    rows = [(one["length"], one["kernel"], one["mask"]) for one in found["scores"]]
    kernels = ("sparseprefill", "FlexAttention")
    wanted = [("SDPA", "full"), *((name, mask) for mask in ("tiles 0.2", "diagonal + stripes 0.1") for name in kernels)]
    assert rows == [(length, *one) for length in (300, 200) for one in wanted]
    assert all(one["error"] is None and one["seconds"] > 0 for one in found["scores"])
    absent = {one["kernel"]: one["missing"] for one in found["peers"]}
    assert absent["sparseprefill"] is absent["FlexAttention"] is None
    assert absent["FlashAttention-4"] == "needs a CUDA device"


def test_the_command_shows_the_lengths_that_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(board: Scoreboard, shape: Shape, *arguments: Any) -> list[Score]:
        if shape.length == 128:
            raise KeyboardInterrupt
        return real(board, shape, *arguments)

    real = Scoreboard.run
    monkeypatch.setattr(Scoreboard, "run", run)
    page = tmp_path / "peers.md"
    result = invoke(*TINY, "--executor", "full", "--tokens", "128", "--markdown", str(page))
    assert 130 == result.exit_code, result.output
    assert page.is_file()
    told = "".join(result.stderr.split())  # a narrow terminal breaks a long path anywhere
    assert f"stopped after 1 of 2 lengths; written: {page}".replace(" ", "") in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--executor", "rows:1"), "diagonal, tiles:SHARE"),
        (("--tokens", "1000000000"), "or less"),
        (("--heads", "5"), "heads is 5"),
        (("--json", "/nowhere/a.json"), "there is no folder /nowhere; make it"),
    ],
)
def test_the_command_refuses_what_does_not_fit(arguments: tuple[str, ...], words: str) -> None:
    result = invoke("--device", "cpu", *arguments)
    assert (1, "") == (result.exit_code, result.stdout), result.output
    assert words in result.stderr
    assert 1 == len(result.stderr.splitlines())
