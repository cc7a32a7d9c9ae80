"""Pipelines behind a gate: what they compute below break-even, what they say, and where a gate comes from."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers import tables
from helpers.build import int32, make
from helpers.tables import from_length
from sparseprefill.breakeven import gate as breakeven_gate
from sparseprefill.breakeven.gate import NOTHING_KNOWN, RULES, AutoGate, gate_of
from sparseprefill.breakeven.points import DeviceKind, pairs
from sparseprefill.breakeven.table import BELOW, BreakEven, Verdict
from sparseprefill.executors.dense import attend, dense
from sparseprefill.testing import attention

SMALL: dict[str, Any] = {"sink": 4, "window": 16, "block": 8}
SHAPE: dict[str, Any] = {"heads": 2, "kv_heads": 1}


def table(least: int = 128) -> BreakEven:
    return from_length(least, **SHAPE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "table.json"
    file.write_text(table().to_json(), encoding="utf-8")
    return file


class Never:
    """Finds no call worth it."""

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        return Verdict(False, 2.0, f"never {method}")


NEVER = Never()


def test_below_break_even_the_result_is_dense_and_says_why() -> None:
    pipeline, call = sp.build("streaming", gate=table(), **SMALL), make(60)
    result, truth = pipeline.run(call), sp.build("dense", block=8).run(call)
    assert BELOW == result.dense
    assert (1.0, False) == (result.density, result.parts is not None)
    assert torch.equal(truth.mask.to_dense(), result.mask.to_dense())
    torch.testing.assert_close(result.out, truth.out)
    torch.testing.assert_close(result.lse, truth.lse)
    torch.testing.assert_close(pipeline(call.q, call.k, call.v), truth.out)


def test_above_break_even_the_method_runs() -> None:
    pipeline, call = sp.build("streaming", gate=table(), **SMALL), make(140)
    assert isinstance(pipeline, sp.Route)
    result = pipeline.run(call)
    assert "" == result.dense
    assert torch.equal(sp.build("streaming", **SMALL).run(call).out, result.out)
    assert pipeline.worth(call)
    assert not pipeline.worth(make(60))


def test_a_dense_call_meets_no_stage_and_only_the_gates_word_is_remembered() -> None:
    memory, call = sp.Memory(), make(60, window=5)
    refusing = sp.build("anchor-attention")
    assert refusing.unsupported(call)
    result = sp.gated(refusing, NEVER).run(call, memory)
    assert ("never anchor-attention", 1) == (result.dense, len(memory))


class FromKeys:
    """Finds calls worth it from so many keys on; asked: the sizes of those that it was asked about."""

    def __init__(self, least: int, ratio: Callable[[int], float | None] = lambda keys: None) -> None:
        self.least, self.ratio, self.asked = least, ratio, list[tuple[int, int]]()

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        self.asked.append((call.q.shape[2], call.kv_len))
        worth = call.kv_len >= self.least
        return Verdict(worth, self.ratio(call.kv_len), "" if worth else "too short")


def chunk(first: int, last: int, prompt: int | torch.Tensor | None = None) -> sp.AttentionCall:
    """Tokens `first` to `last` of a prompt, in sizes alone, where a tensor of its length is."""
    x = torch.zeros((), device=prompt.device if isinstance(prompt, torch.Tensor) else "cpu")
    q, k = x.expand(1, 2, last - first, 8), x.expand(1, 1, last, 8)
    return sp.AttentionCall(q, k, k, prompt_lengths=prompt)


def test_a_prompt_is_judged_once_by_the_steps_that_it_will_take() -> None:
    gate, memory = FromKeys(8000), sp.Memory()
    route = sp.gated(sp.build("streaming", **SMALL), gate)
    assert "too short" == route.choose(chunk(0, 4096)).dense  # by itself
    gate.asked.clear()
    for first, last in ((0, 4096), (4096, 8192), (8192, 12000), (12000, 14000)):
        assert "" == route.choose(chunk(first, last, 14000), memory).dense
    assert [(4096, 4096), (4096, 8192), (4096, 12288), (1712, 14000)] == gate.asked


def test_where_most_pairs_gain_nothing_the_whole_prompt_is_dense() -> None:
    gate, memory = FromKeys(8001), sp.Memory()
    route = sp.gated(sp.build("streaming", **SMALL), gate)
    reasons = [
        route.choose(chunk(first, last, 8100), memory).dense for first, last in ((0, 4000), (4000, 8000), (8000, 8100))
    ]
    assert 3 * ["too short (a prompt of 8,100 tokens, judged as a whole)"] == reasons
    assert route.choose(chunk(8000, 8100)).dense == ""  # by itself it would run sparse


@pytest.mark.parametrize(("late", "worth"), [(0.5, True), (0.9, False)])
def test_predicted_times_of_the_steps_add_up(late: float, worth: bool) -> None:
    """Half of the keys first, at twice dense's time: a quarter of the pairs, so 0.5 and three quarters of `late`."""
    gate = FromKeys(8000, lambda keys: 2.0 if keys < 8000 else late)
    route = sp.gated(sp.build("streaming", **SMALL), gate)
    assert worth == (not route.choose(chunk(0, 4096, 8192), sp.Memory()).gated)


@pytest.mark.parametrize("prompt", [None, int32(9000).to("meta")], ids=["unknown", "on the device"])
def test_a_prompt_of_unknown_length_goes_on_as_it_began(prompt: torch.Tensor | None) -> None:
    gate, memory = FromKeys(4000), sp.Memory()
    route = sp.gated(sp.build("streaming", **SMALL), gate)
    assert "too short" == route.choose(chunk(0, 3000, prompt), memory).dense
    for first, last in ((3000, 6000), (6000, 9000)):
        reason = route.choose(chunk(first, last, prompt), memory).dense
        assert "too short (judged by the prompt's first chunk)" == reason
    assert [(3000, 3000)] == gate.asked
    assert "" == route.choose(chunk(6000, 9000, prompt), sp.Memory()).dense  # another request


def test_a_short_beginning_binds_nothing() -> None:
    """Such as a system prompt that was computed alone, before a long document."""
    gate, memory = FromKeys(4000), sp.Memory()
    route = sp.gated(sp.build("streaming", **SMALL), gate)
    assert "too short" == route.choose(chunk(0, 1000), memory).dense
    assert route.choose(chunk(1000, 7999), memory).dense.startswith("too short")  # it is more than an eighth
    for layer in range(2):
        assert "" == route.choose(evolve(chunk(1000, 8000), layer=layer), memory).dense
    assert [(1000, 1000), (7000, 8000)] == gate.asked
    assert "" == route.choose(chunk(8000, 8100), memory).dense  # goes on as that began


class Long:
    """Finds calls of 500 rows or more worth it, from 8,000 keys on."""

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        worth = call.kv_len >= 8000 and call.q.shape[2] >= 500
        return Verdict(worth, reason="" if worth else "too short")


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize(
    ("prompt", "cuts", "worth"),
    [
        (10674, (0, 24, 7835, 9692), True),  # from token 24 on, three steps would gain nothing
        (10674, (900, 930, 7835, 9692), True),
        (8200, (0, 24, 700), False),  # from token 700 on, one step would
    ],
    ids=["sparse", "behind a short prefix", "dense"],
)
def test_a_prompt_of_known_length_is_judged_once_however_short_its_beginning(
    prompt: int, cuts: tuple[int, ...], worth: bool, tensor: bool
) -> None:
    route, memory = sp.gated(sp.build("streaming", **SMALL), Long()), sp.Memory()
    told = int32(prompt) if tensor else prompt
    found = [
        not route.choose(evolve(chunk(first, last, told), layer=layer), memory).gated
        for first, last in zip(cuts, (*cuts[1:], prompt), strict=True)
        for layer in range(2)
    ]
    assert 2 * len(cuts) * [worth] == found


def test_the_longest_prompt_of_a_batch_counts() -> None:
    gate = FromKeys(8000)
    route, x = sp.gated(sp.build("streaming", **SMALL), gate), torch.zeros(()).expand(2, 1, 100, 8)
    assert "" == route.choose(sp.AttentionCall(x, x, x, prompt_lengths=int32(100, 16000)), sp.Memory(), 16000).dense
    assert [(16000, 16000)] == gate.asked


def test_tokens_behind_a_known_prompt_are_judged_anew_behind_a_short_one() -> None:
    """Such as a preempted request's own answer, computed again."""
    route, memory = sp.gated(sp.build("streaming", **SMALL), FromKeys(4000)), sp.Memory()
    assert "too short" == route.choose(chunk(0, 117, 117), memory).dense
    assert "" == route.choose(chunk(117, 8000, 117), memory).dense
    assert "" == route.choose(chunk(8000, 9000, 117), memory).dense


@pytest.mark.parametrize(
    ("least", "reason"), [(800, ""), (1000, "too short (a prompt of 900 tokens, judged as a whole)")]
)
def test_a_first_chunk_too_short_to_be_asked_about_is_no_prefix(least: int, reason: str) -> None:
    """What others of its step left of it is an eighth of the prompt, and more."""
    gate, memory = FromKeys(least), sp.Memory()
    route = sp.gated(sp.build("streaming", **SMALL), gate)
    for first, last in ((117, 500), (500, 900)):
        assert reason == route.choose(chunk(first, last, 900), memory, 8192, begin=0).dense
    assert [(900, 900)] == gate.asked


def test_a_prompt_of_unknown_length_is_judged_from_where_the_gate_is_asked() -> None:
    gate = FromKeys(700)
    route = sp.gated(sp.build("streaming", **SMALL), gate)
    assert "" == route.choose(chunk(117, 900), sp.Memory(), 8192, begin=0).dense
    reason = route.choose(chunk(117, 600), sp.Memory(), 8192, begin=0).dense
    assert "too short (483 tokens, judged behind the 117 before them)" == reason
    assert [(783, 900), (483, 600)] == gate.asked


@pytest.mark.parametrize("prompt", [None, 7000, 20000])
def test_a_reason_behind_a_cache_names_the_tokens_judged_and_those_before_them(prompt: int | None) -> None:
    """That those were computed dense nobody knows."""
    memory, route = sp.Memory(), sp.gated(sp.build("streaming", **SMALL), NEVER)
    judged = (prompt or 7000) - 800
    reason = f"never streaming ({judged:,} tokens, judged behind the 800 before them)"
    assert reason == route.choose(chunk(800, 7000, prompt), memory, 8192).dense
    assert reason == route.choose(chunk(7000, 7100, prompt), memory, 8192).dense
    before = "as a prompt of 8,000 tokens would have been"
    for begin, memory in ((None, sp.Memory()), (8000, sp.Memory())):
        for first, last in ((8100 if begin else 8000, 9000), (9000, 10000)):
            reason = route.choose(chunk(first, last, prompt), memory, 8192, begin).dense
            assert f"never streaming (judged for the 8,000 tokens before it: dense, {before})" == reason


def test_a_reason_behind_a_short_beginning_does_not_say_that_the_first_chunk_decided() -> None:
    memory, route = sp.Memory(), sp.gated(sp.build("streaming", **SMALL), NEVER)
    reasons = [route.choose(chunk(*ends), memory).dense for ends in ((0, 1000), (1000, 2000), (2000, 16000))]
    assert ["", " (judged by the prompt's first chunk)", " (14,000 tokens, judged behind the 2,000 before them)"] == [
        one.removeprefix("never streaming") for one in reasons
    ]
    assert reasons[-1] == route.choose(chunk(16000, 17000), memory).dense


@pytest.mark.parametrize(("step", "worth"), [(0, True), (8000, True), (4000, False)])
def test_behind_what_another_request_ran_dense_nothing_runs_sparse(step: int, worth: bool) -> None:
    """Such as a long turn of a conversation whose turns before it were computed in steps that gain nothing."""
    gate = FromKeys(8000, lambda keys: 0.5 if keys >= 8000 else 4.0)
    route = sp.gated(sp.build("streaming", **SMALL), gate)
    choice = route.choose(chunk(8000, 20000), sp.Memory(), step)
    assert worth == (not choice.gated)
    assert worth == ("too short (judged for the 8,000 tokens before it" not in choice.dense)
    assert "" == route.choose(chunk(8000, 64000), sp.Memory(), step).dense  # an eighth binds nothing
    assert "" == route.choose(chunk(2000, 10000, 64000), sp.Memory(), 8000).dense  # nor of the prompt to come
    memory = sp.Memory()  # of one request, whose own beginning is known
    assert "" == route.choose(chunk(0, 8000, 20000), memory, 20000).dense
    assert "" == route.choose(chunk(8000, 20000, 20000), memory, step).dense


@pytest.mark.parametrize(("told", "each"), [(0, 2048), (6000, 6000)], ids=["unknown", "told by the host"])
def test_a_short_first_chunk_shares_its_step(told: int, each: int) -> None:
    gate = FromKeys(8000)
    assert "" == sp.gated(sp.build("streaming", **SMALL), gate).choose(chunk(0, 37, 16384), sp.Memory(), told).dense
    assert [(each, each), (each, 2 * each)] == gate.asked[:2]
    assert 16384 == gate.asked[-1][1]


@given(
    q_len=st.integers(1, 40),
    past=st.integers(0, 30),
    behind=st.integers(0, 9),
    group=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([None, 0.3]),
)
def test_dense_attention_is_exact_at_any_place(
    q_len: int, past: int, behind: int, group: int, dtype: torch.dtype, scale: float | None
) -> None:
    kv_len = past + q_len + behind
    call = make(q_len, kv_len, heads=4, kv_heads=4 // group, dtype=dtype, scale=scale, q_offset=past)
    found = attend(call)
    assert found is not None
    truth = attention(call, sp.SparseMask.full(call).to_dense())
    torch.testing.assert_close(found[0].double(), truth[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1].double(), truth[1], atol=1e-5, rtol=1e-4)
    assert (dtype, dtype) == (found[0].dtype, found[1].dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 7},
        {"softcap": 3.0},
        {"starts": int32(2, 0), "batch": 2},
        {"lengths": int32(30, 9), "batch": 2},
        {"sinks": torch.tensor([0.5, -1.0])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_torch_has_no_kernel_for_runs_through_the_executor(options: dict[str, Any]) -> None:
    call = make(40, **options)
    assert attend(call) is None
    expected = evolve(sp.build("dense"), executor=sp.ReferenceExecutor()).run(call)
    found = dense(call, sp.ReferenceExecutor())
    assert torch.equal(expected.out, found.out)
    assert torch.equal(expected.lse, found.lse)


def test_values_of_another_width_run_through_the_executor() -> None:
    q, k, v = torch.randn(1, 2, 9, 8), torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 4)
    call = sp.AttentionCall(q, k, v)
    assert attend(call) is None
    assert (1, 2, 9, 4) == dense(call, sp.ReferenceExecutor()).out.shape


def test_a_gate_is_put_on_changed_and_taken_off(path: Path) -> None:
    plain = sp.build("streaming", **SMALL)
    assert plain is sp.gated(plain, None)
    assert plain is sp.gated(plain, False)
    gated = sp.gated(plain, path)
    assert isinstance(gated, sp.Route)
    assert (table(), "streaming") == (gated.gate, gated.name)
    again = sp.gated(gated, NEVER)
    assert isinstance(again, sp.Route)
    assert again.gate is NEVER
    off = sp.gated(again, None)
    assert off is plain
    assert (1, None, 1) == (off.grain, gated.grain, gated.method_grain)
    wider = gated.each(lambda one: evolve(one, refiners=(sp.LocalBand(2),)))
    assert "" != wider.run(make(60)).dense
    assert [(sp.LocalBand(2),)] == [one.refiners for one in wider.known]


def test_the_name_of_a_pipeline_is_what_the_table_knows() -> None:
    found = tables.table(tables.whole({256: 4.0, 1024: 4.0}, **SHAPE))
    call = make(600)
    assert sp.gated(sp.build("streaming", **SMALL), found).run(call).dense
    named = evolve(sp.build("streaming", **SMALL), name="mine")
    assert not sp.gated(named, found).run(call).dense  # judged by the executor alone


HOPPER = DeviceKind(type="cuda", capability=(9, 0))


def of_sizes(rows: int, keys: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> sp.AttentionCall:
    """A call of 32 / 8 heads of 128, without memory for them."""
    q, k = (
        torch.empty(1, heads, 1, 128, device=device, dtype=dtype).expand(-1, -1, n, -1)
        for heads, n in ((32, rows), (8, keys))
    )
    return sp.AttentionCall(q, k, k)


def test_auto_without_a_table_goes_by_a_cautious_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(breakeven_gate.TABLE, raising=False)
    monkeypatch.setattr(breakeven_gate, "shipped", lambda device: None)
    gate = gate_of("auto")
    assert isinstance(gate, AutoGate)
    assert "" == str(gate)
    short, long = (gate.judge(of_sizes(n, n), "streaming") for n in (8192, 65536))
    assert (False, True) == (short.worth, long.worth)
    for verdict in (short, long):
        assert verdict.reason.startswith("no break-even table for cpu: ")
        assert "by the built-in rule (sparse from" in verdict.reason
    assert str(gate).startswith("the built-in rule (sparse from")
    assert Verdict(True) == gate.judge(make(60, window=8), "streaming")
    assert gate.judge(of_sizes(8192, 8192), "streaming").reason == sp.gated(
        sp.build("streaming"), gate
    ).choose(of_sizes(8192, 8192)).dense  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_rule_asks_for_a_long_call_with_much_to_do(device: str) -> None:
    rule = RULES.get(device, NOTHING_KNOWN)

    def worth(rows: int, keys: int) -> bool:
        return rule.judge(of_sizes(rows, keys), "no table").worth

    assert not worth(rule.keys - 1, rule.keys - 1)
    assert worth(rule.keys, rule.keys)
    assert not worth(16, 8 * rule.keys)
    assert worth(2048, 32 * rule.keys)


def test_nothing_is_worth_it_on_a_device_of_which_nothing_is_known() -> None:
    gate = AutoGate()
    verdict = gate.judge(of_sizes(1 << 20, 1 << 20, "meta"), "streaming")
    assert not verdict.worth
    assert (
        "no break-even table for meta: dense by the built-in rule (nothing is known about such devices"
        in verdict.reason
    )


def test_what_the_users_table_has_no_figures_for_is_left_to_the_rule(path: Path) -> None:
    gate = AutoGate(sp.BreakEven.load(path))
    verdict = gate.judge(of_sizes(64, 64, dtype=torch.float64), "streaming")
    assert not verdict.worth
    assert "the break-even table of test (cpu) has no figures for float64: dense by the built-in rule" in verdict.reason
    assert str(gate).startswith("break-even table of test (cpu); the built-in rule")


def test_every_shipped_method_is_faster_where_the_rule_lets_an_unknown_gpu_run_sparse() -> None:
    """By the figures of the one GPU that was measured; most others take longer for dense attention."""
    table, rule = breakeven_gate.shipped(HOPPER), RULES["cuda"]
    assert table is not None
    seen = 0
    for shape in table.shapes:
        for point in shape.points:
            work = shape.heads * shape.head_dim * pairs(point.queries, point.keys)
            if point.keys < rule.keys or rule.work is None or work < rule.work:
                continue
            for name, one in point.methods.items():
                seen += 1
                assert one.seconds < 0.95 * point.dense, (str(shape), point.queries, point.keys, name)
    assert seen > 50


def test_auto_takes_the_table_of_the_environment(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setenv(breakeven_gate.TABLE, str(path))
    gate = gate_of("auto")
    assert gate is not None
    assert not gate.judge(make(60), "streaming").worth
    assert "break-even table of test (cpu)" == str(gate)
    monkeypatch.setenv(breakeven_gate.TABLE, " ")
    assert gate_of("auto") is None
    monkeypatch.setenv(breakeven_gate.TABLE, str(path.with_name("none.json")))
    with pytest.raises(sp.ParameterError, match=r"SPARSEPREFILL_BREAKEVEN: break-even table .*none.json"):
        gate_of("auto")


def test_auto_leaves_a_table_of_another_device_alone(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    facts = json.loads(path.read_text())
    facts["device"] |= {"type": "cuda", "capability": [9, 0]}
    path.write_text(json.dumps(facts), encoding="utf-8")
    monkeypatch.setenv(breakeven_gate.TABLE, str(path))
    monkeypatch.setattr(breakeven_gate, "shipped", lambda device: None)
    gate = gate_of("auto")
    assert gate is not None
    assert "no break-even table for cpu" in gate.judge(make(60), "streaming").reason


def test_a_shipped_table_is_found_by_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(breakeven_gate, "files", lambda _: tmp_path)
    cpu = DeviceKind(type="cpu")
    assert breakeven_gate.shipped(HOPPER) is None
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "breakeven-cuda-9.0.json").write_text(table().to_json(), encoding="utf-8")
    assert table() == breakeven_gate.shipped(HOPPER)
    assert breakeven_gate.shipped(DeviceKind(type="cuda", capability=(8, 0))) is None
    assert breakeven_gate.shipped(cpu) is None
    (tmp_path / "tables" / "breakeven-cpu.json").write_text(table().to_json(), encoding="utf-8")
    assert table() == breakeven_gate.shipped(cpu)


def test_a_cpu_has_a_table_in_float32_and_the_rule_for_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(breakeven_gate.TABLE, raising=False)
    gate = AutoGate()
    short, long = (gate.judge(of_sizes(n, n), "bfla") for n in (256, 65536))
    assert (False, True) == (short.worth, long.worth)
    assert None not in (short.ratio, long.ratio)
    assert str(gate).startswith("break-even table of ")
    half = gate.judge(of_sizes(8192, 8192, dtype=torch.bfloat16), "bfla")
    assert not half.worth
    assert "has no figures for bfloat16: dense by the built-in rule" in half.reason


def test_a_configuration_names_its_gate(path: Path) -> None:
    config = path.with_name("pipeline.json")
    config.write_text(json.dumps({"method": "streaming", "parameters": SMALL, "gate": path.name}), encoding="utf-8")
    found = sp.from_config(config)
    assert isinstance(found, sp.Route)
    assert table() == found.gate
    assert isinstance(sp.from_config({"method": "streaming", "gate": "auto"}), sp.Route)
    assert isinstance(sp.from_config({"method": "streaming", "gate": False}), sp.Pipeline)


def test_a_new_name_of_all_pipelines_is_the_routes_too() -> None:
    route = sp.Route.of(sp.build("streaming"))
    assert "new" == route.each(lambda one: evolve(one, name="new")).name
    assert "streaming" == route.each(lambda one: evolve(one, workspace=None)).name
    names = iter(("one", "other"))
    two = evolve(route, name="both", pipelines=route.pipelines * 2)
    assert "both" == two.each(lambda one: evolve(one, name=next(names))).name
    assert "both" == two.each(lambda one: one).name


class Pays:
    """Predicts times in two parts: for each call, and for each pair of a dense one. A step of few pairs is no gain."""

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        work = pairs(call.q.shape[2], call.kv_len)
        ratio = 0.25 + 100_000 / work
        return Verdict(ratio <= 0.95, ratio, "slow")


def test_the_shortest_prompt_that_runs_sparse_is_told() -> None:
    route, call = sp.gated(sp.build("streaming", **SMALL), Pays()), make(16)
    whole = route.least(call, 1 << 16)
    assert whole is not None
    assert 530 < whole < 565  # 100,000 / 0.7 pairs
    steps = route.least(call, 1 << 16, 128)
    assert steps is not None
    for tokens, chunk in ((whole, 0), (steps, 128)):
        begun = (make(min(n, chunk or n), prompt_lengths=n) for n in (tokens, tokens * 29 // 30))
        told = [route.choose(one, sp.Memory(), chunk).dense for one in begun]
        assert "" == told[0]
        assert told[1]
    assert steps > 2 * whole
    assert route.least(call, whole // 2) is None
    assert route.least(call, steps // 2, 128) is None


def test_without_a_gate_the_shortest_prompt_may_run_sparse() -> None:
    assert 1 <= (sp.Route.of(sp.build("streaming", **SMALL)).least(make(16), 4096) or 0) <= 8
