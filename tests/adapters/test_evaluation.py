"""Fidelity: a sparse prefill held against the model's own, without tasks."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.cli.render import to_json
from sparseprefill.adapters.demo.model import load_tokenizer
from sparseprefill.adapters.evaluation import comparison
from sparseprefill.adapters.evaluation.comparison import Comparison, outcomes
from sparseprefill.adapters.evaluation.outcome import (
    AT_ONCE,
    Contender,
    Divergence,
    Fidelity,
    Layer,
    Outcome,
    Summary,
    compare,
    log_probabilities,
    pooled,
    summaries,
)
from sparseprefill.adapters.evaluation.prompts import Prompt, read, tokenized
from sparseprefill.adapters.evaluation.reading import APART, Reader, Rows, Sizes
from sparseprefill.adapters.huggingface import attach
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Qwen3Config,
)

import sparseprefill as sp
from sparseprefill.executors.reference import ReferenceExecutor
from sparseprefill.mask.lists import IndexLists
from sparseprefill.profiles.table import Progress

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,
    "pad_token_id": 0,
}
SIZES = Sizes(last=5, tail=6, greedy=7, rows=9)


def load(path: Path, tokenizer: Any, tokens: int | None = None) -> list[Prompt]:
    """The prompts of a file or a folder, as a command reads them."""
    return tokenized(read(path), tokenizer, tokens)


def model_of(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    made: LlamaForCausalLM = model_of(LlamaConfig(**SMALL))
    return made


def prompt_of(tokens: int, seed: int = 0) -> Prompt:
    source = torch.Generator().manual_seed(seed)
    return Prompt(f"drawn {seed}", tuple(torch.randint(1, 97, (tokens,), generator=source).tolist()))


def streaming(window: int = 16) -> Contender:
    return Contender("streaming", sp.build("streaming", sink=1, window=window), dense_tail=0)


# Distances of distributions.


def test_divergence_is_that_of_plain_loops() -> None:
    torch.manual_seed(0)
    dense, sparse, text = torch.randn(37, 11), torch.randn(37, 11), torch.randint(11, (37,))
    found = compare(log_probabilities(dense), sparse, text)
    p, q = dense.double().softmax(-1), sparse.double().softmax(-1)
    each = [sum(float(a * (a / b).log()) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    assert found.rows == 37
    assert found.kl == pytest.approx(sum(each) / 37, rel=1e-5)
    assert found.worst == pytest.approx(max(each), rel=1e-5)
    assert found.agreement == sum(int(x.argmax()) == int(y.argmax()) for x, y in zip(p, q, strict=True)) / 37
    surprise = [-math.log(float(y[t])) for y, t in zip(q, text.tolist(), strict=True)]
    dense_surprise = [-math.log(float(x[t])) for x, t in zip(p, text.tolist(), strict=True)]
    assert found.surprise == pytest.approx(sum(surprise) / 37, rel=1e-5)
    ratio = math.exp((sum(surprise) - sum(dense_surprise)) / 37)
    assert found.perplexity_ratio == pytest.approx(ratio, rel=1e-5)


def test_tokens_that_dense_excludes_add_nothing() -> None:
    dense = torch.tensor([[0.0, -torch.inf, 1.0]])
    found = compare(log_probabilities(dense), torch.tensor([[0.0, -torch.inf, 1.0]]))
    assert found.kl == 0.0
    assert compare(log_probabilities(dense), torch.tensor([[0.0, 2.0, 1.0]])).kl > 0.1


def test_what_sparse_excludes_is_infinitely_far() -> None:
    found = compare(log_probabilities(torch.zeros(1, 2)), torch.tensor([[0.0, -torch.inf]]))
    assert found.kl == math.inf


def apart(each: list[float], *more: float) -> Divergence:
    return Divergence(torch.tensor(each, dtype=torch.float64), *more)


def test_logits_are_made_of_many_rows_at_once_however_large_the_vocabulary() -> None:
    """Or the head would be read from memory for every row."""

    class Counted:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return 65

        def __getitem__(self, rows: slice) -> torch.Tensor:
            made = torch.zeros(65, AT_ONCE["cpu"] + 1)[rows]
            self.asked.append(len(made))
            return made

    counted = Counted()
    assert compare(torch.zeros(65, AT_ONCE["cpu"] + 1), counted).rows == 65
    assert counted.asked == [1, 64]


def test_a_prefill_of_random_tokens_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice on a GPU, where the first time is that of compiling."""
    asked: list[torch.Tensor] = []

    def timed(self: Reader, ids: torch.Tensor) -> tuple[float, int | None]:
        asked.append(ids)
        return float(len(asked)), None

    config: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=9))
    monkeypatch.setattr(Reader, "timed", timed)
    monkeypatch.setattr(Reader, "device", torch.device("cpu"))
    for on_cpu, times in ((True, 1), (False, 2)):
        asked.clear()
        monkeypatch.setattr(Reader, "on_cpu", on_cpu)
        assert Reader(SimpleNamespace(config=config)).once(100) == times
        assert {tuple(ids.shape) for ids in asked} == {(1, 100)}
        assert int(asked[0].max()) < 9


def test_the_rows_tell_mean_percentile_and_worst() -> None:
    each = [float(n) for n in range(1, 101)]
    found = apart(each, 1.0, 2.0, 4.0)
    assert (found.rows, found.kl, found.worst, found.nll_ratio) == (100, 50.5, 100.0, 0.5)
    assert found.high == pytest.approx(99.01)
    assert found.figures["high"] == found.high
    assert apart(each, 1.0).figures["nll_ratio"] is None, "no text, no ratio; JSON has no NaN"


def test_texts_far_apart_have_a_ratio() -> None:
    """Beyond all floats it is infinite, in JSON text; and 0 the other way round."""
    far = apart([1.0], 0.0, 800.0, 1.0)
    assert (far.perplexity_ratio, apart([1.0], 0.0, 1.0, 800.0).perplexity_ratio) == (math.inf, 0.0)
    assert json.loads(to_json({"ratio": far.perplexity_ratio})) == {"ratio": "inf"}
    assert apart([1.0], 0.0, math.inf, 1.0).perplexity_ratio == math.inf
    assert math.isnan(apart([1.0], 0.0).perplexity_ratio)


def test_pooled_weighs_by_rows() -> None:
    found = pooled([apart([1.0], 0.0, 4.0, 2.0), apart([0.05, 0.05, 0.5], 1.0, 0.0, 2.0)])
    assert (found.rows, found.worst, found.agreement) == (4, 1.0, 0.75)
    assert found.kl == pytest.approx(0.4)
    assert found.perplexity_ratio == pytest.approx(math.exp(-1.0))


# One prompt.


@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config, GemmaConfig, Phi3Config])
def test_a_full_mask_changes_nothing(config: Any) -> None:
    one = Comparison.of(model_of(config(**SMALL)), prompt_of(150), SIZES)
    found = one.run(Contender("dense", sp.build("dense")))
    assert found.error == ""
    assert found.fidelity is not None
    every, inside = found.fidelity.end, found.fidelity.inside
    assert (every.rows, every.agreement, found.fidelity.parted) == (5 + 5 + 7, 1.0, None)
    assert (inside.rows, inside.agreement) == (144, 1.0)
    assert max(every.worst, inside.worst) < 1e-6  # float32 log-probabilities
    assert found.fidelity.tail.perplexity_ratio == pytest.approx(1.0, abs=1e-4)
    assert found.density == 1.0
    assert all(abs(each - 1) < 1e-5 for layer in found.layers for each in (*layer.recalls, *layer.last))
    assert found.extra_bytes is None
    assert found.seconds > 0


def test_figures_are_those_of_the_model_run_by_hand(model: LlamaForCausalLM) -> None:
    """Every distribution once more, from one forward of the whole text each time."""
    prompt, contender = prompt_of(570, 1), streaming()
    one = Comparison.of(model, prompt, SIZES)
    found = one.run(contender)
    ids = torch.tensor([[*prompt.ids, *one.continuation.tolist()]])
    end = len(prompt.ids) - SIZES.tail
    with torch.inference_mode():
        dense = model(ids).logits[0].double()
        with attach(model, contender.pipeline, gate=None, tail=0):
            first = model(ids[:, :end], past_key_values=None, use_cache=True)
        behind = model(ids[:, end:], past_key_values=first.past_key_values).logits[0].double()
    p = dense.log_softmax(-1)
    q = torch.cat([first.logits[0].double(), behind]).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    assert found.fidelity is not None
    rows = torch.arange(end - APART)
    inside = found.fidelity.inside
    assert inside.rows == end - APART
    assert inside.kl == pytest.approx(float(kl[rows].mean()), rel=1e-3, abs=1e-6)
    assert inside.high == pytest.approx(float(kl[rows].quantile(0.99)), rel=1e-3, abs=1e-6)
    surprises = -q[rows].gather(1, ids[0, rows + 1, None]).mean(), -p[rows].gather(1, ids[0, rows + 1, None]).mean()
    assert inside.nll_ratio == pytest.approx(float(surprises[0] / surprises[1]), rel=1e-4)
    spans = {
        "last": slice(end - SIZES.last, end),
        "tail": slice(end, end + SIZES.tail - 1),
        "greedy": slice(end + SIZES.tail - 1, end + SIZES.tail - 1 + SIZES.greedy),
    }
    for name, span in spans.items():
        part = getattr(found.fidelity, name)
        assert part.rows == span.stop - span.start
        assert part.kl == pytest.approx(float(kl[span].mean()), rel=1e-3, abs=1e-6)
        assert part.worst == pytest.approx(float(kl[span].max()), rel=1e-3, abs=1e-6)
        assert part.agreement == float((p[span].argmax(-1) == q[span].argmax(-1)).double().mean())
    for name in ("last", "tail"):
        span = spans[name]
        text = ids[0, span.start + 1 : span.stop + 1]
        surprise = -q[span].gather(1, text[:, None]).mean()
        assert getattr(found.fidelity, name).surprise == pytest.approx(float(surprise), rel=1e-4)
    greedy = q[spans["greedy"]].argmax(-1) != one.continuation
    assert found.fidelity.parted == (int(greedy.nonzero()[0]) if greedy.any() else None)
    assert found.fidelity.end.kl > 1e-4


@pytest.mark.parametrize("pictured", [None, (1, 2)])
def test_outcomes_hold_no_mask(model: LlamaForCausalLM, pictured: tuple[int, int] | None) -> None:
    """A mask holds the lists of all heads where the model computes: those of every setting and prompt do not fit."""
    lists: list[weakref.ref[Tensor]] = []

    class Watched:
        def unsupported(self, call: sp.AttentionCall) -> None:
            return None

        def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
            tiles = IndexLists.from_map(torch.ones(call.geometry.map_shape(64, 64)).bool().tril())
            lists.append(weakref.ref(tiles.indices))
            return sp.Plan(sp.SparseMask(call.geometry, 64, 64, tiles))

    contender = Contender("watched", sp.Pipeline(Watched()), dense_tail=0)
    found = Comparison.of(model, prompt_of(560, 2), SIZES, pictured=pictured).run(contender)
    gc.collect()
    assert found.error == ""
    assert lists
    assert not any(one() is not None for one in lists)
    assert (found.mask is None) == (pictured is None)
    assert [layer.index for layer in found.layers if layer.lowest] == ([] if pictured is None else [0, 1])


@pytest.mark.parametrize("lowest", [0, 4])
def test_of_many_layers_the_masks_of_those_that_keep_least_are_sketched(lowest: int) -> None:
    watch = comparison.LayerWatch(8, 4, pictured=(0, 0), lowest=lowest)
    call = sp.AttentionCall(*(torch.randn(1, 1, 128, 8) for _ in range(3)))
    windows = (16, 112, 48, 96, 32, 80, 64)
    for layer, window in enumerate(windows):
        watch(evolve(call, layer=layer), sp.build("streaming", sink=0, window=window, block=16).run(call))
    watch.sketch()
    least = sorted(windows)[:lowest]
    assert least == sorted(windows[layer] for layer, one in watch.found.items() if one.lowest is not None)


def test_recall_is_that_of_the_layers_calls(model: LlamaForCausalLM) -> None:
    prompt, contender = prompt_of(560, 2), streaming()
    found = Comparison.of(model, prompt, SIZES, pictured=(1, 2)).run(contender)
    kept: dict[int, Any] = {}

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        kept[call.layer] = call, result

    pipeline = contender.pipeline
    assert pipeline is not None
    with torch.inference_mode(), attach(model, pipeline, gate=None, observe=observe, tail=0):
        model(torch.tensor([prompt.ids[: -SIZES.tail]]))
    for layer in found.layers:
        call, result = kept[layer.index]
        assert layer.recalls == pytest.approx(sp.recall(call, result, rows=9)[0].mean(-1).tolist(), rel=1e-5)
        assert layer.last == pytest.approx(sp.recall(call, result, rows=range(549, 554))[0].mean(-1).tolist(), rel=1e-5)
        assert layer.row_lowest == pytest.approx(sp.recall(call, result, rows=9)[0].amin(-1).tolist(), rel=1e-5)
        assert layer.density == pytest.approx(result.density)
        assert layer.lowest is not None
        head, sketch = layer.lowest
        assert min(layer.recalls[head], layer.last[head]) == min(*layer.recalls, *layer.last)
        assert sketch.density == pytest.approx(result.mask.head(0, head).density)
    assert found.mask is not None
    shares = kept[1][1].mask.shade(128)[0, 2]
    torch.testing.assert_close(found.mask.shares, shares, rtol=0, atol=0, equal_nan=True)


def test_contenders_have_the_tail_that_attach_gives(model: LlamaForCausalLM) -> None:
    one, bare = Comparison.of(model, prompt_of(560, 2), SIZES), streaming()
    found = [one.run(evolve(bare, dense_tail=rows)) for rows in (0, 64)] + [one.run(Contender("d", bare.pipeline))]
    assert [min(min(layer.last) for layer in each.layers) > 0.9999 for each in found] == [False, True, True]
    density = [each.layers[0].density for each in found]
    assert density[0] < density[1] <= density[2]


def test_nothing_of_a_run_stays(model: LlamaForCausalLM) -> None:
    seen: list[weakref.ref[Any]] = []

    class Spy(Reader):
        def prefill(self, ids: torch.Tensor, cache: Any = None) -> tuple[Rows, Any]:
            rows, cache = super().prefill(ids, cache)
            assert rows.hidden.shape == (150 - SIZES.tail, SMALL["hidden_size"])
            gc.collect()
            assert not [ref for ref in seen if ref() is not None], "an earlier cache is still alive"
            seen.append(weakref.ref(cache))
            return rows, cache

    one = Comparison.of(model, prompt_of(150), SIZES)
    spied = evolve(one, reader=Spy(model))
    for _ in range(3):
        assert spied.run(streaming()).error == ""
    assert len(seen) == 3


def test_a_run_verifies_the_model_once(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def noted(*given: Any, verify: bool = True, **more: Any) -> Any:
        asked.append(verify)
        return attach(*given, verify=verify, **more)

    monkeypatch.setattr(comparison, "attach", noted)
    assert Comparison.of(model, prompt_of(150), SIZES).run(streaming()).error == ""
    assert asked == [True, False]


def test_a_method_that_fails_ends_alone(model: LlamaForCausalLM) -> None:
    class Raises:
        def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
            raise ZeroDivisionError("by zero")

    one = Comparison.of(model, prompt_of(150), SIZES)
    broken = one.run(Contender("raises", sp.Pipeline(Raises())))
    assert "by zero" in broken.error
    assert broken.fidelity is None
    assert one.run(streaming()).error == ""


def test_an_output_that_overflows_is_an_error_and_keeps_nothing(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Overflows(ReferenceExecutor):
        def execute(self, call: sp.AttentionCall, plan: sp.Plan) -> sp.Result:
            found = super().execute(call, plan)
            return evolve(found, out=found.out * torch.nan, lse=found.lse * torch.nan)

    def unverified(*given: Any, **more: Any) -> Any:
        return attach(*given, **{**more, "verify": False})  # which finds what always overflows

    monkeypatch.setattr(comparison, "attach", unverified)
    made = evolve(sp.build("streaming", sink=16, window=64), executor=Overflows())
    found = Comparison.of(model, prompt_of(150), SIZES).run(Contender("overflows", made))
    assert "are NaN" in found.error
    assert found.fidelity is None
    watch = comparison.LayerWatch(8, 8)
    with torch.inference_mode(), attach(model, made, gate=None, verify=False, observe=watch):
        model(torch.tensor([prompt_of(150).ids]))
    assert [set(layer.recalls) for layer in watch.found.values()] == [{0.0}] * model.config.num_hidden_layers


def test_layers_that_run_dense_say_why(model: LlamaForCausalLM) -> None:
    class Even:
        def unsupported(self, call: sp.AttentionCall) -> str | None:
            return "odd layers are not honoured" if call.layer % 2 else None

        def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
            return sp.Plan(sp.SparseMask.full(call))

    found = Comparison.of(model, prompt_of(150), SIZES).run(Contender("even", sp.Pipeline(Even())))
    assert [layer.reason for layer in found.layers] == ["", "Even: odd layers are not honoured"]
    assert found.layers[1].density == 1.0


def test_a_short_prompt_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(sp.ParameterError, match="has 11 tokens: pass one of more than 11"):
        Comparison.of(model, prompt_of(11), SIZES)


def test_sizes_are_checked() -> None:
    every: list[dict[str, Any]] = [{"tail": 1}, {"last": 0}, {"greedy": 0}, {"rows": 0}, {"repeats": 0}]
    for wrong in every:
        with pytest.raises(sp.ParameterError, match=next(iter(wrong))):
            Sizes(**wrong)


# Several prompts.


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.steps: list[tuple[str, int, int]] = []

    @contextmanager
    def contender(self, name: str) -> Iterator[Progress]:
        self.names.append(name)
        yield lambda what, done, of: self.steps.append((what, done, of))


def test_outcomes_come_one_by_one(model: LlamaForCausalLM) -> None:
    heard, prompts = Heard(), [prompt_of(150, 3), prompt_of(190, 4)]
    found = list(outcomes(model, prompts, [streaming(), streaming(200)], SIZES, heard))
    assert [(one.prompt, one.contender.name) for one in found[:3]] == [
        ("drawn 3", "stock"), ("drawn 3", "streaming"), ("drawn 3", "streaming"),
    ]  # fmt: skip
    assert heard.names[:2] == ["dense, prompt 1 of 2", "streaming, prompt 1 of 2"]
    assert ("prefill", 2, 2) in heard.steps
    assert [one.tokens for one in found] == [144] * 3 + [184] * 3


@pytest.mark.parametrize(
    ("contenders", "beside"), [(1, [None, 2.0]), (2, [None, 1.0, 2.0]), (4, [None, 1.0, 2.0, 2.0, 3.0])]
)
def test_one_stock_prefill_stands_beside_those_right_around_it(
    model: LlamaForCausalLM, contenders: int, beside: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([2.0, 3.0])
    monkeypatch.setattr(Reader, "clock", lambda self, ids, sizes, seconds: (1.0, None))
    monkeypatch.setattr(Reader, "timed", lambda self, ids: (next(seconds), None))
    monkeypatch.setattr(Reader, "once", lambda self, tokens: 0.0)
    sizes = evolve(SIZES, beside=True)
    assert beside == [
        one.beside for one in outcomes(model, [prompt_of(150)], [streaming()] * contenders, sizes, Heard())
    ]


def test_a_summary_is_over_all_prompts(model: LlamaForCausalLM) -> None:
    found = list(outcomes(model, [prompt_of(550, 5), prompt_of(590, 6)], [streaming()], SIZES, Heard()))
    stock, sparse = summaries(found, SIZES.greedy)
    facts = [one.fidelity for one in found if one.fidelity is not None]
    assert (stock.prompts, sparse.prompts, stock.inside, stock.end) == (2, 2, None, None)
    for name in ("inside", "end"):
        every, summed = pooled([getattr(fact, name) for fact in facts]), getattr(sparse, name)
        assert torch.equal(summed.each, every.each)
        assert summed.agreement == every.agreement
    kept = [layer.rows for one in found if one.fidelity for layer in one.layers]
    each = torch.cat([rows.flatten() for rows in kept if rows is not None]).sort().values
    assert (sparse.row_lowest, sparse.row_p1) == (float(each[0]), float(each[len(each) // 100]))
    assert sparse.row_lowest <= sparse.row_p1 <= sparse.lowest
    parted = sorted(7 if fact.parted is None else fact.parted for fact in facts)
    assert sparse.parted == sum(parted) / 2
    recalls = [each for one in found if one.fidelity for layer in one.layers for each in layer.recalls]
    assert sparse.recall == pytest.approx(sum(recalls) / len(recalls))
    assert sparse.lowest == min(recalls)
    assert sparse.p5 == pytest.approx(float(torch.tensor(recalls, dtype=torch.float64).quantile(0.05)))
    assert sparse.seconds == sum(one.seconds for one in found if one.fidelity)


def test_rows_of_one_layer_and_of_all() -> None:
    rows = torch.ones(2, 150, dtype=torch.float64)
    rows[0, :2], rows[1, :3] = torch.nan, torch.tensor([0.03125, 0.5, 0.75])
    other = Layer(1, 0.5, (1.0,), rows=torch.tensor([[0.25, 1.0], [torch.nan] * 2], dtype=torch.float64))
    layers = (Layer(0, 0.5, (1.0, 0.99), rows=rows), other, Layer(2, 1.0, (1.0,), reason="why"))
    assert [one.row_lowest for one in layers] == [(1.0, 0.03125), (0.25, 1.0), ()]
    made = Outcome(Contender("x"), "a", layers=layers)
    summary = Summary.of([made], 4)
    assert (summary.row_p1, summary.row_lowest) == (0.75, 0.03125), "the fourth and the first of 300"
    none = Summary.of([evolve(made, layers=(Layer(0, 1.0, (1.0,), rows=rows[:, :0]), layers[2]))], 4)
    assert (none.row_p1, none.row_lowest) == (1.0, 1.0)


def test_a_summary_of_failures() -> None:
    found = [Outcome(Contender("x"), "a", error="no"), Outcome(Contender("x"), "b", error="never")]
    summary = Summary.of(found, 4)
    assert (summary.prompts, summary.failed, summary.inside) == (0, {"a": "no", "b": "never"}, None)


def test_fidelity_pools_its_parts() -> None:
    last, tail, greedy = apart([0.0, 0.2], 1.0), apart([0.4], 0.0), apart([0.0], 1.0)
    assert Fidelity(apart([9.0], 0.0), last, tail, greedy, None).end.kl == pytest.approx(0.15)


# Prompts.


def test_text_files_and_folders(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    (tmp_path / "b.txt").write_text("one two three four five six seven")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a b c d e f g h"}\n\n{"prompt": "x"}\n')
    (tmp_path / "skipped.bin").write_bytes(b"\xff")
    found = load(tmp_path, tokenizer)
    assert [prompt.name for prompt in found] == ["a.jsonl:1", "a.jsonl:3", "b.txt"]
    whole = found[2].ids
    assert list(whole) == tokenizer("one two three four five six seven")["input_ids"]
    assert load(tmp_path / "b.txt", tokenizer, 4)[0].ids == whole[:4]
    first = found[0].ids
    assert load(tmp_path / "a.jsonl", tokenizer, 5)[0].ids == (*first[:2], *first[-3:])


def test_chat_messages_go_through_the_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "where is it"}]}))
    with pytest.raises(sp.ParameterError, match=r"chat\.jsonl:1 has messages, but the tokenizer has no chat template"):
        load(path, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} [assistant]"
    expected = tokenizer("[user] where is it [assistant]", add_special_tokens=False)["input_ids"]
    assert list(load(path, tokenizer)[0].ids) == expected
    tokenizer.chat_template = "{{ raise_exception('no user') }}"
    with pytest.raises(sp.ParameterError, match="the chat template refuses the messages"):
        load(path, tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"\xff\xfe\xfa", "a.txt is not a text file: pass one in UTF-8"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b"{", "a.jsonl:1 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1 is nested too deeply"),
        ("a.jsonl", b'{"prompt": "x", "prompt": "y"}', "a.jsonl:1 has the key 'prompt' twice"),
        ("a.jsonl", b'{"prompt": "x"}\n[1]', "a.jsonl:2 is '\\[1\\]': pass an object with either"),
        ("a.jsonl", b'{"prompt": "x", "messages": []}', "pass an object with either"),
        ("a.jsonl", b'{"text": "x"}', "pass an object with either"),
        ("a.jsonl", b'{"prompt": 3}', "prompt is 3: pass a string"),
        ("a.jsonl", b'{"prompt": ""}', "prompt is '': pass a string"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(sp.ParameterError, match=words):
        load(tmp_path / name, load_tokenizer())


def test_no_such_prompts(tmp_path: Path) -> None:
    with pytest.raises(sp.ParameterError, match="there is no file or folder"):
        load(tmp_path / "gone", load_tokenizer())
    with pytest.raises(sp.ParameterError, match="holds no file that ends in"):
        load(tmp_path, load_tokenizer())
