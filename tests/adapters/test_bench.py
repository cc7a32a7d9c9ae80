"""What stands behind `bench`: cases, tables, measuring on a CPU, captured inputs, and a model's first token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.huggingface import attach
from torch import Tensor

import sparseprefill as sp
from lab.bench import baseline as ours
from lab.bench import dense, facts, tables
from lab.bench.baseline import baseline
from lab.bench.captured import captured_call, inputs
from lab.bench.case import Part, call_of, of_mask, of_method, parse_mask, random_mask
from lab.bench.clock import Clock, middle
from lab.bench.markdown import markdown
from lab.bench.measure import ROWS, Bench, memories, prepare
from lab.bench.report import table, title
from lab.bench.shape import ModelShape, Shape
from lab.bench.ttft import Prefill, tiles
from sparseprefill import ParameterError, ReferenceExecutor, SparseMask, default_registry
from sparseprefill.metrics import lowest_rows
from sparseprefill.plan import Plan

CPU = torch.device("cpu")
SMALL = Shape(length=320, heads=4, kv_heads=2, head_dim=32, dtype="float32")


def quick() -> Bench:
    return Bench(Clock(CPU, rounds=1, budget=0.01), inputs=inputs)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("full", (Part("full"),)),
        ("tiles:0.1", (Part("tiles", 0.1),)),
        ("tiles:.05 + stripes:5e-2", (Part("tiles", 0.05), Part("stripes", 0.05))),
    ],
)
def test_masks_are_read(text: str, parts: tuple[Part, ...]) -> None:
    assert parse_mask(text) == parts


@pytest.mark.parametrize("text", ["", "tiles", "tiles:2", "tiles:x", "full:0.5", "rows:0.1", "tiles:0.1+", "tiles:1-"])
def test_other_masks_are_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="tiles:SHARE"):
        parse_mask(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 3}, "heads is 3"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"length": 1}, "length is 1"),
        ({"batch": 0}, "batch is 0"),
        ({"new": 0}, "new is 0"),
        ({"new": 321}, "new is 321: pass at most the 320 tokens"),
        ({"new": 2, "batch": 2}, "batch is 2: new tokens and pages"),
        ({"page": 16, "batch": 2}, "batch is 2: new tokens and pages"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        evolve(SMALL, **change)


def test_batch_rows_have_unequal_lengths() -> None:
    assert Shape(length=1000, batch=4).lengths == (1000, 750, 500, 250)


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_have_cases_that_differ(name: str) -> None:
    shapes = [Shape(length=length) for length in tables.lengths(name, "cuda")]
    cases = tables.cases(name, default_registry(), shapes)
    assert len({str(case) for case in cases}) == len(cases) > 0
    assert {case.table for case in cases} == {name}


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(ParameterError, match="did you mean 'methods'"):
        tables.cases("method", default_registry(), [SMALL])


def test_random_masks_repeat_and_have_about_their_share() -> None:
    shape = evolve(SMALL, length=4200)
    call = call_of(shape, "random", 0, CPU)
    rows = torch.tensor([0, 1000, 2047, 2048, 3000, 4095, 4100, 4199])
    one, same, other = (random_mask(call, [Part("stripes", 0.1)], seed).to_dense(rows) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    behind = one[..., 3:6, :2048].double().mean()
    assert float(behind) == pytest.approx(0.1, abs=0.01)
    assert not one[..., :3, :].any()
    both = random_mask(call, [Part("tiles", 0.2), Part("stripes", 0.1)], 1)
    assert both.tiles is not None
    assert both.stripes is not None


@pytest.mark.parametrize("text", ["full", "tiles:0.2", "stripes:0.1", "tiles:0.1+stripes:0.1"])
def test_a_mask_is_measured(text: str) -> None:
    row = quick().measure(of_mask(text, SMALL))
    assert row.error == ""
    assert row.seconds > 0 < row.dense
    assert row.speedup == pytest.approx(row.dense / row.seconds)
    assert row.efficiency == pytest.approx(row.speedup * row.density)
    assert (row.recall, row.row_p1, row.row_lowest, row.estimate) == (None, None, None, None)
    assert table([row]).heads == ["what", "ms", "density", "speed-up", "eff."]
    assert row.baseline == "SDPA"
    if text == "full":
        assert row.density == 1.0


@pytest.mark.parametrize("name", tables.names(default_registry()))
def test_every_method_is_measured(name: str) -> None:
    row = quick().measure(of_method(default_registry(), name, SMALL, "methods"))
    assert row.error == ""
    assert row.recall is not None
    assert 0 < row.recall <= 1 + 1e-4
    assert row.lowest is not None
    assert row.lowest <= row.recall
    assert row.estimate is not None
    assert row.estimate > 0


def test_an_error_is_told_in_the_row() -> None:
    row = quick().measure(
        of_method(default_registry(), "streaming", evolve(SMALL, head_dim=64, batch=2), "", input="captured")
    )
    assert "batch is 2" in row.error
    assert table([row]).rows[0][1] == "failed"
    assert facts.fact(row)["error"] == row.error


def test_a_row_of_kascade_is_the_mean_over_the_layers_of_a_prefill() -> None:
    """A dense layer that chooses, and three that take its choice."""
    given = {"anchors": [0], "tile": 16, "least": 16}
    case = of_method(default_registry(), "kascade", SMALL, "", parameters=given, layers=4)
    assert of_method(default_registry(), "kascade", SMALL, "").layers == 32
    assert of_method(default_registry(), "streaming", SMALL, "").layers == 1
    ready = prepare(case, CPU)
    results = [ready.layer(call) for call in ready.calls]
    densities = [result.density for result in results]
    assert [call.layer for call in ready.calls] == [0, 1, 2, 3]
    assert densities[0] == 1.0
    assert densities[1] == densities[2] == densities[3] < 0.5
    assert ready.plan is not None
    plans = ready.plan()  # each as in the prefill: the later ones take what the first has chosen
    assert len(plans) == 4
    row = quick().measure(case)
    assert row.density == pytest.approx(sum(densities) / 4)
    assert row.recall is not None
    assert row.lowest is not None
    assert row.lowest < row.recall < 1
    kept = torch.stack([sp.recall(*pair, rows=ROWS) for pair in zip(ready.calls, results, strict=True)])
    assert kept.shape[-1] == 64
    first, lowest = map(float, lowest_rows(kept))
    assert (row.row_p1, row.row_lowest) == pytest.approx((first, lowest), abs=1e-6)
    assert 0 < lowest < first < row.lowest, "of rows of all layers, while heads are means"
    shown = table([row])
    assert shown.heads[-3:] == ["recall", "rows", "lowest"]
    assert shown.rows[0][-3:] == [f"{row.recall:.3f}", f"{first:.3f}", f"{row.lowest:.3f}"]
    assert (row.row_p1, row.row_lowest) == tuple(facts.fact(row)[name] for name in ("row_p1", "row_lowest"))
    assert facts.fact(row)["layers"] == 4
    assert "mean of 4 layers" in case.label


def test_plans_are_timed_with_the_memory_that_each_layer_finds() -> None:
    from sparseprefill.plugins.kascade.records import Chosen

    pipeline = default_registry().build("kascade", anchors=[0, 2], tile=16, least=16)
    calls = [evolve(call_of(SMALL, "heads", 0, CPU), layer=layer) for layer in range(4)]
    before = memories(pipeline, calls)
    plans = [pipeline.plan(call, memory) for call, memory in zip(calls, before, strict=True)]
    chosen = [note for plan in plans for note in plan.notes.values() if isinstance(note, Chosen)]
    assert [one.layer for one in chosen] == [None, 0, 2, 2]


def test_rows_of_a_batch_are_padded_for_nobody() -> None:
    shape = evolve(SMALL, batch=3)
    ready = prepare(of_mask("full", shape), CPU)
    assert [out.shape[2] for out in ready.dense.run()] == list(shape.lengths)
    result = ready.run()
    for row, (length, out) in enumerate(zip(shape.lengths, ready.dense.run(), strict=True)):
        torch.testing.assert_close(result.out[row, :, :length], out[0], atol=1e-4, rtol=1e-4)
    assert result.density == 1.0


def test_new_tokens_stand_behind_the_cached_in_call_mask_and_yardstick() -> None:
    shape = evolve(SMALL, length=4500, new=300)
    whole, call = (call_of(one, "random", 3, CPU) for one in (evolve(shape, new=None), shape))
    assert torch.equal(whole.q[:, :, -300:], call.q)
    assert torch.equal(whole.k, call.k)
    expected = ReferenceExecutor().execute(call, Plan(SparseMask.full(call))).out
    torch.testing.assert_close(baseline(call, shape.lengths).run()[0], expected, rtol=1e-4, atol=1e-4)
    stripes = random_mask(call, parse_mask("diagonal+stripes:0.5"), seed=1)
    pairs = stripes.to_dense()
    assert pairs[..., :4096].any()  # before the group of 2,048 rows that the new tokens lie in
    assert int(pairs[0, 0, 0, :4096].sum()) > 1500
    assert 0.3 < stripes.density < 0.7


@pytest.mark.parametrize("name", ["bfla", "vertical-slash", "tiles 0.1"])
def test_pages_hold_the_same_call(name: str) -> None:
    shape = evolve(SMALL, length=700, new=200)
    rows = []
    for page in (0, 16):
        one = evolve(shape, page=page)
        case = of_mask("tiles:0.1", one, "") if name == "tiles 0.1" else of_method(default_registry(), name, one, "")
        ready = prepare(case, CPU)
        result = ready.run()
        assert (ready.calls[0].pages is not None) == (page > 0)
        if ready.calls[0].pages is not None:
            assert not ready.calls[0].pages.gathered  # each run copies anew, as in a server
        rows.append((result.out, ready.row(1.0, 1.0)))
    (out, plain), (paged, other) = rows
    torch.testing.assert_close(out, paged)
    assert (plain.density, plain.recall) == (other.density, other.recall)
    assert "200 of them new, pages of 16" in title(other)


def test_large_calls_run_dense_by_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(SMALL, "heads", 0, CPU)
    (whole,) = baseline(call, SMALL.lengths).run()
    monkeypatch.setattr(dense, "LARGE", 1)
    parts = baseline(call, SMALL.lengths).run()
    assert len(parts) == SMALL.kv_heads
    torch.testing.assert_close(torch.cat(list(parts), 1), whole)


@pytest.mark.parametrize(("factor", "found"), [(1.0, ["FlashAttention-4"]), (1.1, [])])
def test_a_kernel_counts_only_with_the_right_output(
    factor: float, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> tuple[torch.Tensor, None]:
        assert options == {"softmax_scale": call.softmax_scale, "causal": True}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2) * factor, None

    call = call_of(SMALL, "heads", 0, CPU)
    monkeypatch.setattr(ours, "flash4", lambda: attend)
    able = ours.able_of([(call.q, call.k, call.v)], call.softmax_scale)
    assert [one.kernel for one in able if one.kernel == ours.FLASH4] == found


def test_dense_attention_that_takes_long_runs_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Clock(CPU, rounds=1, budget=0.0))
    first = bench.measure(of_mask("tiles:0.1", SMALL))
    again = bench.measure(of_mask("tiles:0.2", SMALL))
    other = bench.measure(of_mask("tiles:0.2", evolve(SMALL, length=300)))
    assert first.dense == again.dense != other.dense


def test_the_clock_keeps_to_its_budget() -> None:
    ran: list[int] = []
    assert len(Clock(CPU, rounds=5, budget=10.0).times(lambda: ran.append(1))) == 5
    assert len(ran) == 8
    assert len(Clock(CPU, rounds=5, budget=0.0).times(lambda: ran.append(1))) == 1
    assert len(ran) == 10


def test_of_two_times_in_the_middle_the_longer_counts() -> None:
    assert middle(iter([3.0, 1.0, 9.0, 2.0]).__next__, 4) == 3.0
    assert middle(iter([3.0, 1.0, 2.0]).__next__, 3) == 2.0


@pytest.mark.thorough
@pytest.mark.usefixtures("_one_tokenizer")
def test_captured_inputs_keep_the_models_logits() -> None:
    """Wider heads, more of them: the logits of each are still those of a head of the model."""
    narrow = captured_call(evolve(SMALL, length=600, heads=4, kv_heads=2, head_dim=64), 0, CPU)
    wide = captured_call(evolve(SMALL, length=600, heads=16, kv_heads=4, head_dim=96), 0, CPU)
    assert wide.softmax_scale == narrow.softmax_scale == pytest.approx(1 / 8)

    def logits(q: Tensor, k: Tensor) -> Tensor:
        return q[0] @ k[0].repeat_interleave(q.shape[1] // k.shape[1], 0).mT

    few, many = logits(narrow.q, narrow.k), logits(wide.q, wide.k)
    torch.testing.assert_close(many[:8], torch.cat([few[:2], few[:2], few[2:], few[2:]]))
    full = ReferenceExecutor().execute(wide, Plan(SparseMask.full(wide)))
    assert bool(torch.isfinite(full.out).all())
    assert float(full.out[..., 64:].abs().max()) == 0.0


@pytest.mark.usefixtures("_one_tokenizer")
@pytest.mark.parametrize(
    ("change", "words"),
    [({"length": 50000}, "length is 50000"), ({"head_dim": 32}, "head_dim is 32"), ({"heads": 2}, "heads is 2")],
)
def test_captured_inputs_say_what_they_need(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        captured_call(evolve(SMALL, **{"length": 512, "head_dim": 64, **change}), 0, CPU)


def test_markdown_has_a_table_for_each_length() -> None:
    bench = quick()
    rows = [bench.measure(of_mask("full", evolve(SMALL, length=length))) for length in (200, 300)]
    text = markdown(rows)
    assert text.count("| what |") == 2
    assert "### 200 tokens, 4 / 2 heads, d 32, float32, inputs random" in text


def test_first_token() -> None:
    shape = ModelShape(layers=2, hidden=64, inner=64, heads=4, kv_heads=2, head_dim=32, vocabulary=64, dtype="float32")
    prefill = Prefill(shape=shape, device=CPU, tokens=400, rounds=1)
    registry = default_registry()
    streaming = registry.build("streaming", sink=1, window=64, block=32)
    rows = prefill.run([("streaming", streaming), ("tiles", tiles(0.1))])
    stock, method, fixed = rows
    assert [row.error for row in rows] == [""] * 3
    assert stock.density is None
    assert stock.name == "stock (SDPA)"
    assert stock.speedup == 1.0
    assert method.density is not None
    assert 0 < method.density < 1
    assert fixed.density is not None
    assert method.stock == stock.seconds


def test_layers_run_on_the_heads_that_are_given() -> None:
    """The density is that of the made-up heads and not of the model's own, for a method that looks at them."""
    shape = ModelShape(layers=1, hidden=128, inner=64, heads=4, kv_heads=2, head_dim=32, vocabulary=64, dtype="float32")
    method = default_registry().build("anchor-attention", theta=4.0, step=1, block=32, init_tokens=1)
    given = Prefill(shape=shape, device=CPU, tokens=700, rounds=1).run([("anchor-attention", method)])[1].density
    model = shape.build(700, CPU)
    with attach(model, method, verify=False, gate=None, measure=True, recall_every=0) as handle, torch.inference_mode():
        model(torch.randint(2, 64, (1, 700)))
    own = handle.report().layers[0].density
    assert given is not None
    assert own is not None
    assert given < 0.6 * own


def test_a_model_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ParameterError, match="heads is 5"):
        ModelShape(heads=5)
