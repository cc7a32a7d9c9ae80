"""Recall at work in vLLM's host: its metrics, its report, and the kernels that are compiled for it. No engine."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import logging
import sys
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from sparseprefill.adapters.serving import tally
from sparseprefill.adapters.serving import warm as warming
from sparseprefill.adapters.serving.model import Model
from sparseprefill.adapters.serving.runtime import NOT_COUNTED
from sparseprefill.adapters.serving.tally import DENSITIES, OWNER, RECALLS, ROW_RECALLS, Owner, Tally
from sparseprefill.adapters.session import ledger
from sparseprefill.adapters.session import session as sessions
from sparseprefill.adapters.session.kinds import Code, Why
from sparseprefill.adapters.session.session import Prefill
from sparseprefill.adapters.session.watch import CallRecall
from sparseprefill.adapters.vllm import runtime as module
from sparseprefill.adapters.vllm.runtime import Runtime
from sparseprefill.adapters.vllm.worker import ReportExtension

import sparseprefill as sp
from helpers.build import make
from kernels.caches import paged
from sparseprefill.metrics import SPREAD, watched_recall
from sparseprefill.profiles.identity import ModelIdentity

from ..serving.test_warm import LAYERS, SIZES, pages

CALL = make(300, heads=4, kv_heads=2)
METHOD = {"method": "streaming", "parameters": {"sink": 16, "window": 16, "block": 16}, "gate": False, "tail": 0}


class Metric:
    """In the place of prometheus_client's, whose library comes with vLLM."""

    def __init__(
        self, name: str, about: str, labels: list[str], buckets: tuple[float, ...] = (), multiprocess_mode: str = ""
    ) -> None:
        assert multiprocess_mode in ("", "max"), "else a process is a label"
        assert name.startswith("sparseprefill:")
        assert about
        self.name, self.names, self.buckets = name, labels, buckets
        self.seen: dict[str, list[float]] = {}
        MADE[name] = self

    def labels(self, **given: str) -> Any:
        assert self.names == list(given)
        *owner, profile = (given[name] for name in OWNER)
        assert ["served", "streaming", "1"] == owner
        key = ",".join(text for name, text in given.items() if name not in OWNER)
        values = self.seen.setdefault(f"{profile}: {key}" if profile else key, [])
        if self.buckets:
            return SimpleNamespace(observe=values.append)
        return SimpleNamespace(inc=lambda amount=1: values.append(amount), set=values.append)


MADE: dict[str, Metric] = {}


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, Metric]:
    """What is told, by metric and label."""
    fake = ModuleType("prometheus_client")
    fake.Counter = fake.Histogram = fake.Gauge = Metric  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prometheus_client", fake)
    MADE.clear()
    # What the process keeps of the real library stays: it takes each name once.
    monkeypatch.setattr(tally, "_metrics", cache(tally._metrics.__wrapped__))
    return MADE


def runtime(monkeypatch: pytest.MonkeyPatch, layers: int = 3, **table: Any) -> Runtime:
    """As the engine makes it, of a model of so many layers."""
    whole = ModelIdentity(name="m", architecture="M", layers=layers, heads=4, kv_heads=2, head_dim=8, digest="d")
    monkeypatch.setattr(module, "_model", lambda *_: Model(whole, whole, "M", "STOCK", 0))
    monkeypatch.setattr(module, "show", lambda *_: None)
    model, parallel = SimpleNamespace(served_model_name=["served", "other"]), SimpleNamespace(rank=1)
    given = {"additional_config": {"sparseprefill": {**METHOD, **table}}}
    return module.make_runtime(SimpleNamespace(**given, model_config=model, parallel_config=parallel), "STOCK")


def test_heads_are_told_by_class_of_layers(metrics: dict[str, Metric], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = runtime(monkeypatch, layers=8, recall_every=2, strict_recall=0.99)
    result = sp.build("streaming", sink=16, window=16, block=16).run(CALL)
    rows = watched_recall(CALL, result).kept[0]
    kept = rows[:, :SPREAD].mean(-1)
    for _ in range(3):
        prefill = Prefill()
        for layer in (0, 1, 7):
            mine.session.run(attrs.evolve(CALL, layer=layer), prefill)
    found = metrics["sparseprefill:recall"].seen
    assert ["0-1", "6-7"] == list(found)
    assert (4 * 2 * 2, 4 * 2) == (len(found["0-1"]), len(found["6-7"]))
    assert found["6-7"][:4] == pytest.approx(kept.tolist(), abs=1e-5)
    first, lowest = metrics["sparseprefill:row_p1"].seen, metrics["sparseprefill:row_lowest"].seen
    assert {"0-1": 4, "6-7": 2} == {name: len(each) for name, each in lowest.items()}, "one a call"
    assert lowest["6-7"] == pytest.approx([float(rows.min())] * 2, abs=1e-5)
    assert first["6-7"] == pytest.approx([float(rows[:, :SPREAD].min())] * 2, abs=0.005), "of 68 rows"
    assert {"0-1": [1] * 4, "6-7": [1] * 2} == metrics["sparseprefill:low_recall_calls"].seen
    calls = metrics["sparseprefill:prefill_calls"].seen
    assert {"0-1,sparse": [1] * 6, "6-7,sparse": [1] * 3} == calls
    densities = metrics["sparseprefill:density"].seen
    assert (2 * 2, 2) == (len(densities["0-1"]), len(densities["6-7"]))
    assert densities["6-7"] == pytest.approx([result.density] * 2, abs=1e-6)
    report = mine.report()
    assert (3, 2, 0.99) == (report.prefills, report.measured_prefills, report.strict_recall)
    assert "recall below 0.99: 6 of 6 calls" in str(report)


def test_profiles_of_one_method_are_counted_apart(metrics: dict[str, Metric], monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"method": "streaming", "parameters": {"sink": 16, "window": 32, "block": 16}, "gate": False}
    mine = runtime(monkeypatch, profiles={"wide": wide})
    for served in mine.every:
        served.tally.chunk(300, 300).settle()
        served.session.run(CALL, Prefill())
        served.session.read_recall()
    assert {"0,sparse": [1], "wide: 0,sparse": [1]} == metrics["sparseprefill:prefill_calls"].seen
    for name in ("density", "recall", "row_p1", "row_lowest"):
        assert {"0", "wide: 0"} == set(metrics[f"sparseprefill:{name}"].seen)
    assert {"dense", "wide: dense"} == set(metrics["sparseprefill:prefill_chunks"].seen)


def test_dense_chunks_tell_their_reason(metrics: dict[str, Metric], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = runtime(monkeypatch)
    for tokens, code, why in (
        *((100, Code.SHORT, "fewer than 128 tokens"), (90, Code.SHORT, "fewer than 256 tokens")),
        (500, Code.ERROR, "other"),
    ):
        mine.tally.dense(tokens, Why(code, why))
    mine.tally.sparse(700, 900, 3)
    assert {"short,fewer than N tokens": [1, 1], "error,other": [1]} == metrics["sparseprefill:dense_chunks"].seen
    assert {"dense": [1] * 3, "sparse": [1]} == metrics["sparseprefill:prefill_chunks"].seen


class From:
    """A gate that lets prompts of so many tokens run sparse."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def judge(self, call: sp.AttentionCall, method: str) -> sp.Verdict:
        return sp.Verdict(call.kv_len >= self.tokens, reason="short")


@pytest.mark.parametrize(("gate", "told"), [(None, "none"), (From(1), "1"), (From(9999), "never")])
def test_it_is_told_what_runs(
    gate: From | None, told: str, metrics: dict[str, Metric], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method and the profile are labels of every metric."""
    table = {"method": "streaming", "parameters": METHOD["parameters"], "gate": False}
    mine = runtime(monkeypatch, profiles={"other": table})
    if gate is not None:
        mine.session.route = attrs.evolve(mine.session.route, gate=gate)
        mine.tally.gate = "unknown"
    mine.requests.chunk = 256
    mine.expect([(i, None) for i in range(8)])
    mine.foretell(CALL, 512, "max_num_batched_tokens")
    mine.inform()
    version = sp.__version__
    assert {f"{told},256,{version}": [1], f"other: none,256,{version}": [1]} == metrics["sparseprefill:info"].seen


def test_it_is_told_where_nothing_runs(metrics: dict[str, Metric], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = runtime(monkeypatch)
    mine.requests.chunk = 256
    mine.expect([(0, "a window"), (1, "a window")])
    assert {f"none,256,{sp.__version__}": [1]} == metrics["sparseprefill:info"].seen


def test_a_density_that_was_not_counted_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that can count nothing, as while a CUDA graph is captured; else masks too large to keep are counted
    at once."""
    monkeypatch.setattr(sessions, "KEPT_BYTES", 0)
    for captured, noted in ((False, {}), (True, {NOT_COUNTED: 2})):
        monkeypatch.setattr(ledger, "recording", lambda captured=captured: captured)
        mine = runtime(monkeypatch, recall_every=0)
        prefill = Prefill()
        for layer in (0, 1):
            mine.session.run(attrs.evolve(CALL, layer=layer), prefill)
        mine.session.decline(2, "why", (1, 300, 300))
        report = mine.report()
        assert noted == report.notes
        assert bool(noted) == (report.density is None) == ("not counted" in str(report))


def test_nothing_is_told_where_nothing_is_measured(metrics: dict[str, Metric], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = runtime(monkeypatch, recall_every=0)
    mine.session.run(CALL, Prefill())
    assert {} == metrics["sparseprefill:recall"].seen == metrics["sparseprefill:density"].seen
    assert mine.report().recall is None


def test_every_call_tells_its_density_once_where_all_are_measured(
    metrics: dict[str, Metric], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = runtime(monkeypatch, measure=True, recall_every=1)
    for _ in range(2):
        mine.session.run(CALL, Prefill())
    density = sp.build("streaming", sink=16, window=16, block=16).run(CALL).density
    assert {"0": pytest.approx([density] * 2)} == metrics["sparseprefill:density"].seen
    pairs = metrics["sparseprefill:pairs"].seen
    assert density == pytest.approx(sum(pairs["0,computed"]) / sum(pairs["0,causal"]))


def test_keys_in_pages_and_the_prompts_own_tail(metrics: dict[str, Metric], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a backend gives them: chunks behind a cache, whose prompt's end is known. The tail is the last chunk's."""
    mine, prefill, kept = runtime(monkeypatch, tail=40), Prefill(), []
    monkeypatch.setattr(mine.session, "_observe", lambda call, result: kept.append(watched_recall(call, result).kept))
    for end in (150, 300):
        q, k, v = CALL.q[:, :, end - 150 : end], CALL.k[:, :, :end], CALL.v[:, :, :end]
        mine.session.run(paged(sp.AttentionCall(q, k, v, prompt_lengths=300), 16), prefill)
    wanted = [head for one in kept for head in one[0, :, :SPREAD].mean(-1).tolist()]
    assert pytest.approx(wanted, abs=1e-5) == metrics["sparseprefill:recall"].seen["0"]
    assert float(kept[1][..., SPREAD:].min()) > 0.999 > float(kept[0][..., SPREAD:].max())


@pytest.mark.parametrize(
    ("layers", "classes"),
    [
        (32, ["0-7"] * 8 + ["8-15"] * 8 + ["16-23"] * 8 + ["24-31"] * 8),
        (6, ["0", "1-2", "1-2", "3", "4-5", "4-5"]),
        (3, ["0", "1", "2"]),
        (1, ["0"]),
        (0, []),
    ],
)
def test_classes_of_layers(layers: int, classes: list[str]) -> None:
    made = Tally(layers=layers)
    assert classes == [made.layer_class(layer) for layer in range(layers)]
    assert ["other", "other"] == [made.layer_class(layer) for layer in (-1, layers)]


def test_a_step_passes_on_what_has_arrived(metrics: dict[str, Metric], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = runtime(monkeypatch)
    there: list[bool] = []
    monkeypatch.setattr("sparseprefill.adapters.session.watch._Coming.arrived", property(lambda _: bool(there)))
    mine.session.run(CALL, Prefill())
    assert "sparseprefill:recall" in metrics
    mine.prefills(object(), [], lambda names: {})
    assert {} == metrics["sparseprefill:recall"].seen
    there.append(True)
    mine.prefills(object(), [], lambda names: {})
    assert ["0"] == list(metrics["sparseprefill:recall"].seen)


@pytest.mark.usefixtures("metrics")
def test_a_worker_tells_it_as_data(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    mine = runtime(monkeypatch, strict_recall=0.99)
    with caplog.at_level(logging.WARNING):
        for layer in range(2):
            mine.session.run(attrs.evolve(CALL, layer=layer), Prefill())
    assert 1 == len(caplog.records)
    monkeypatch.setattr("sparseprefill.adapters.vllm.worker.existing", lambda _: mine)
    found = ReportExtension().sparseprefill_report()
    report = mine.report()
    assert (report.recall, report.least_recall) == (found["recall"], found["least_recall"])
    assert (report.row_p1, report.row_lowest) == (found["row_p1"], found["row_lowest"])
    assert report.row_lowest is not None
    layer = found["layers"][0]["recall"]
    assert (report.row_p1, report.row_lowest) == ((layer["row_p1"], 0), (layer["row_lowest"], 0))
    assert (1, 1) == (found["layers"][0]["recall"]["calls"], found["layers"][0]["recall"]["low_calls"])
    assert None is found["layers"][1]["recall"], "of the second prefill"
    assert "recall below 0.99: 1 of 1 calls" in found["text"]


@pytest.mark.parametrize("recall", [True, False])
def test_kernels_for_it_are_compiled_at_start(recall: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(warming, "watched_recall", lambda call, result: seen.append(call.layer))
    pipeline = sp.build("streaming", sink=16, window=16, block=16)
    warming.warm(pipeline, LAYERS, SIZES, pages, recall=recall)
    assert (len(seen) > 0) == recall


def test_prometheus_takes_them() -> None:
    """With its own library, where there is one."""
    client = pytest.importorskip("prometheus_client")
    whose = {"model_name": "mine", "method": "streaming", "worker": "0.1", "profile": ""}

    def counted(bound: str, name: str = "recall") -> float:
        labels = {**whose, "layers": "16-23", "le": bound}
        return float(client.REGISTRY.get_sample_value(f"sparseprefill:{name}_bucket", labels) or 0.0)

    made = Tally(layers=32, owner=Owner("mine", "streaming", "0.1"))
    made.recall(CallRecall(20, 0, (0.93, 1.0, 0.2), (), row_p1=0.15, row_lowest=0.02, low=True))
    assert {"0.1": 0, "0.2": 1} == {bound: counted(bound, "row_p1") for bound in ("0.1", "0.2")}
    assert {"0.01": 0, "0.03": 1} == {bound: counted(bound, "row_lowest") for bound in ("0.01", "0.03")}
    assert {"0.9": 1, "0.95": 2, "1.0": 3} == {bound: counted(bound) for bound in ("0.9", "0.95", "1.0")}
    low = client.REGISTRY.get_sample_value("sparseprefill:low_recall_calls_total", {**whose, "layers": "16-23"})
    assert 1 == low


def test_metrics_that_cannot_be_kept_end_nothing(
    metrics: dict[str, Metric], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError("/nowhere/counter_1.db")

    sys.modules["prometheus_client"].Counter = gone  # type: ignore[attr-defined]
    mine = runtime(monkeypatch)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert isinstance(mine.session.run(CALL, Prefill()), sp.Result)
    assert ["sparseprefill: no metrics: FileNotFoundError: /nowhere/counter_1.db"] == caplog.messages
    assert {} == metrics


def test_bounds_ascend() -> None:
    for bounds in (RECALLS, ROW_RECALLS, DENSITIES):
        assert sorted(set(bounds)) == list(bounds)
        assert 1.0 == bounds[-1]
        assert torch.tensor(bounds).min() > 0
