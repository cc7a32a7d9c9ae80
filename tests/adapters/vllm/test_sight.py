"""What an operator sees: chunks counted once, the line in the log, alerts. No engine."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import gc
import logging
import re
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from sparseprefill.adapters.serving import runtime as serving
from sparseprefill.adapters.serving.attend import run
from sparseprefill.adapters.serving.layer import Layer
from sparseprefill.adapters.serving.pace import Pace
from sparseprefill.adapters.serving.runtime import NO_PROFILE
from sparseprefill.adapters.serving.summary import MOST_WAITING, Kind, Summary, every
from sparseprefill.adapters.serving.tally import METRICS, OWNER, PREFIX, Served, Tally
from sparseprefill.adapters.serving.tally import Owner as Whose
from sparseprefill.adapters.session.kinds import MOST, Code, Why
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.session import Session
from sparseprefill.adapters.vllm.plan import plan
from sparseprefill.adapters.vllm.runtime import UNSEEN, Runtime, interval_of_host

import sparseprefill as sp
from docs.pages import section
from helpers.patience import patient
from helpers.vllm_runners import NOTHING, RunnerV1, RunnerV2, common, runtime, stock

ALERTS = Path(__file__).parents[3] / "docs" / "examples" / "vllm" / "alerts.yaml"
PROMTOOL = shutil.which("promtool")


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_line_says_what_was_done_since_the_last() -> None:
    clock = Clock()
    summary = Summary(clock)
    assert summary.line() is None
    one = Kind("", 4000)
    for density in (0.1, 0.3):
        summary.density(one, density)
    for _ in range(2):
        summary.sparse(one, 1)
    for reason in ("fewer than 128 tokens", "fewer than 128 tokens", "too small"):
        summary.dense(reason)
    summary.step(4000, 0.3)
    summary.step(1000, 0.2)
    clock.now += 10
    assert summary.line() == (
        "prefill chunks of the last 10 s: 2 sparse, 3 dense (2x fewer than 128 tokens), mean density 0.200, "
        "10000.0 tokens/s of prefill"
    )
    assert summary.line() is None, "told"
    clock.now += 30
    summary.sparse(one, 2)
    text = "prefill chunks of the last 30 s: 1 sparse, 0 dense, density not measured"
    assert text == summary.line(), "its time is not known yet"
    summary.step(600, 2.0)
    assert summary.line() is None
    summary.dense("why")
    assert "1 dense (1x why), 300.0 tokens/s of prefill" in str(summary.line())


# Calls that are measured (profile, keys, density), chunks that are counted (profile, keys, calls), and what is said.
SAID: list[tuple[list[tuple[str, int, float]], list[tuple[str, int, int]], str]] = [
    ([("", 200, 1.0)], [("", 4096, 6)] * 27, "27 sparse, 0 dense, density not measured"),
    ([("", 200, 1.0)], [("", 200, 1), *[("", 4096, 1)] * 3], "mean density 1.000 (1 of 4 calls measured)"),
    ([("", 200, 0.5)], [("careful", 200, 6)], "1 sparse, 0 dense, profile careful: density not measured"),
    ([("careful", 200, 0.5)], [("", 200, 6)], "1 sparse, 0 dense, density not measured"),
    (
        [("", 200, 0.5), ("", 200, 0.7), ("careful", 200, 0.9)],
        [("careful", 200, 2), ("", 200, 2)],
        "2 sparse, 0 dense, mean density 0.600, profile careful: mean density 0.900 (1 of 2 calls measured)",
    ),
    ([("", 200, 0.5)] * 7, [("", 200, 6)], "1 sparse, 0 dense, mean density 0.500, "),
    ([("", 200, 0.5)] * 2, [("", 200, 1), ("", 200, 1)], "2 sparse, 0 dense, mean density 0.500, "),
]


@pytest.mark.parametrize(("measured", "chunks", "said"), SAID)
def test_a_density_is_told_of_the_calls_that_it_was_measured_on(
    measured: list[tuple[str, int, float]], chunks: list[tuple[str, int, int]], said: str
) -> None:
    summary = Summary(Clock())
    for profile, keys, density in measured:
        summary.density(Kind(profile, keys), density)
    for profile, keys, calls in chunks:
        summary.sparse(Kind(profile, keys), calls)
    assert said in f"{summary.line()}, "


def test_densities_wait_for_their_chunk() -> None:
    """Those of a step that is longer than a line's time; not of ever more kinds."""
    summary, one = Summary(Clock()), Kind("", 1)
    for _ in range(2):
        summary.density(one, 0.25)
        summary.dense("short")
        assert "density" not in str(summary.line())
    summary.sparse(one, 2)
    assert str(summary.line()).endswith("mean density 0.250")
    summary.density(one, 0.25)
    for keys in range(MOST_WAITING):
        summary.density(Kind("", 2 + keys), 0.5)
    summary.sparse(one, 1)
    assert "density not measured" in str(summary.line())


@pytest.mark.parametrize(("given", "seconds"), [(None, 10), ("2.5", 2.5), ("0", 10), ("-3", 10), ("often", 10)])
def test_it_comes_as_often_as_the_hosts(given: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOG_STATS_INTERVAL", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", given)
    assert seconds == interval_of_host()


class Owner:
    """Counts how often it is asked."""

    def __init__(self, enough: threading.Event) -> None:
        self.calls, self.enough = 0, enough

    def tell(self) -> None:
        self.calls += 1
        if self.calls >= 3:
            self.enough.set()


def test_what_no_line_asks_for_does_not_grow() -> None:
    """Of ever other lengths and words: where no line is logged, nobody empties it."""
    tally = Tally()
    for n in range(MOST_WAITING + 500):
        tally.summary.sparse(Kind("", n), 1)
        tally.dense(n, Why(Code.SHORT, f"a prompt of {n:,} tokens is {'too' * (n % 7)} short"))
        tally.fallback(0, Why(Code.ERROR, "x" * n))
    assert MOST_WAITING == len(tally.summary._calls)
    assert len(tally.summary._reasons) <= 8
    assert len(tally._children) < 2 * MOST
    assert f"{MOST_WAITING + 500} dense" in str(tally.summary.line())


def test_the_thread_ends_with_its_owner() -> None:
    enough = threading.Event()
    owner = Owner(enough)
    thread = every(0.01, owner, owner.tell)
    assert enough.wait(patient(30))
    assert thread.daemon
    del owner
    gc.collect()
    thread.join(patient(30))
    assert not thread.is_alive()


@pytest.mark.parametrize(("table", "head", "level", "begins"), [
    ({}, 0, logging.INFO, True),
    ({"log_interval": 3}, 0, logging.INFO, True),
    ({"log_interval": 0}, 0, logging.INFO, False),
    ({}, 4, logging.INFO, False),
    ({}, 0, logging.WARNING, False),
])  # fmt: skip
def test_when_the_line_is_logged(
    table: dict[str, Any],
    head: int,
    level: int,
    begins: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(serving, "every", lambda seconds, owner, tell: seen.append(seconds))
    monkeypatch.delenv("VLLM_LOG_STATS_INTERVAL", raising=False)
    mine = runtime(**table)
    mine.model = SimpleNamespace(first_head=head)  # type: ignore[assignment]
    with caplog.at_level(level, logger="sparseprefill"):
        mine.start()
    assert ([table.get("log_interval", 10)] if begins else []) == seen


@pytest.mark.parametrize(("child", "folder", "said"), [(True, None, True), (True, "/x", False), (False, None, False)])
def test_metrics_that_a_server_cannot_show_are_said_to_be_so(
    child: bool,
    folder: str | None,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    if folder is not None:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", folder)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object() if child else None)
    with caplog.at_level(logging.INFO, logger="sparseprefill"):
        runtime(log_interval=0).start()
    assert said == (UNSEEN in caplog.text)


class Told(Tally):
    """Keeps what chunks were settled as."""

    def dense(self, tokens: int, why: Why) -> None:
        SETTLED.append((tokens, why.text))

    def sparse(self, tokens: int, keys: int, calls: int) -> None:
        SETTLED.append((tokens, None))


SETTLED: list[tuple[int, str | None]] = []


@pytest.fixture
def mine() -> Runtime:
    """A runtime with a profile, whose chunks the tests see."""
    SETTLED.clear()
    plain = runtime(profiles={"all": {"method": "dense"}})
    other = Served(Session(sp.build("dense"), HostOptions(min_query=8)), Told())
    made = Runtime(plain.options, plain.session, plain.model, Told(), {"all": other})
    made.names = plain.names
    return made


def test_a_chunk_is_counted_once_when_its_step_is_over(mine: Runtime) -> None:
    batch = common([20, 20, 3], [20, 20, 3], [True, True, True])
    parts = plan(mine, batch, stock)
    plan(mine, batch, stock)  # another group of layers
    assert parts is not None
    first, second = (part.chunk for part in parts[:2])
    assert first is not None
    assert second is not None
    first.reasons[Why(Code.LAYER, "a layer that cannot")] += 1
    first.sparse = 1
    second.reasons.update({Why(Code.LAYER, "one layer"): 1, Why(Code.LAYER, "two layers"): 2})
    assert [(3, "fewer than 8 tokens")] == SETTLED
    plan(mine, common([1], [21], [False]), stock)
    assert [(20, None), (20, "two layers")] == SETTLED[1:]
    plan(mine, common([20], [20], [True]), stock)
    for _ in range(3):
        mine.tell()
    assert 3 == len(SETTLED), "it may be under way"
    plan(mine, common([1], [21], [False]), stock)
    assert [(20, "no layer can run sparse")] == SETTLED[3:]


def step(mine: Runtime, parts: Any, layer: int, reason: str | None = None) -> None:
    """One layer of a step whose requests begin with it."""
    rows, heads = sum(part.end - part.begin for part in parts), mine.model.identity
    query, output = torch.randn(rows, heads.heads, heads.head_dim), torch.empty(rows, heads.heads, heads.head_dim)

    def read(part: Any) -> Any:
        kv = torch.randn(1, heads.kv_heads, part.row.end, heads.head_dim)
        return kv, kv

    def host(part: Any, rows: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()

    run(mine, Layer(layer, 1.0, None, None, reason), parts, query, output, (), read, host, slow=False)


def lines(mine: Runtime, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the summary says now."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="sparseprefill"):
        mine.tell()
    return [re.sub(r", [0-9.]+ tokens/s.*", "", one.message.partition(" s: ")[2]) for one in caplog.records]


def test_no_time_ends_a_step_that_is_under_way(caplog: pytest.LogCaptureFixture) -> None:
    """Of three layers in two groups; the summary is due before the first, between them, and twice behind them."""
    given = runtime(gate=False)
    mine = Runtime.made(given.options, given.model, Whose())
    mine.names = given.names
    for turn in range(2):
        batch = common([20, 20], [20, 20], [True, True])
        parts, others = (plan(mine, batch, stock, layers) for layers in (2, 1))
        for layer in range(3):
            assert [] == [*lines(mine, caplog), *lines(mine, caplog)], "it is under way"
            step(mine, others if layer == 1 else parts, layer, "why" if layer == 2 else None)
        said = "mean density 1.000 (2 of 4 calls measured)" if turn == 0 else "density not measured"
        assert [f"2 sparse, 0 dense, {said}"] == lines(mine, caplog), "without another step"
        assert [] == lines(mine, caplog)
    plan(mine, common([1], [21], [False]), stock)
    assert [] == lines(mine, caplog), "counted once"


def test_a_step_that_runs_dense_is_over_with_its_last_layer_too(caplog: pytest.LogCaptureFixture) -> None:
    mine = runtime(layers=[7])
    parts = plan(mine, common([20], [20], [True]), stock, 2)
    for layer in range(2):
        assert [] == lines(mine, caplog)
        step(mine, parts, layer)
    assert ["0 sparse, 1 dense (1x not among the chosen layers)"] == lines(mine, caplog)


def test_what_is_meant_to_run_dense_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Short chunks, requests that are switched off, the gate, and layers that were not chosen; all are counted."""
    monkeypatch.delenv("SPARSEPREFILL_BREAKEVEN")
    given = runtime(method="flexprefill", layers=[0, 1])
    mine = Runtime.made(given.options, given.model, Whose())
    host = RunnerV1(mine, "a", "b", "c")
    host.requests = {"a": asking("off"), "b": NOTHING, "c": NOTHING}
    with caplog.at_level(logging.WARNING):
        for reason, warned in ((None, 0), ("why", 1), ("why", 1), ("another", 2)):
            parts = plan(mine, common([20, 3, 20], [20, 3, 20], [True] * 3), stock)
            for layer in (0, 2):
                step(mine, parts, layer, reason)
            assert warned == len([one for one in caplog.records if "runs dense" in one.message])
    reasons = [set(layer.reasons) for layer in mine.report().layers]
    assert {"why", "another"} < reasons[0]
    (gate,) = reasons[0] - {"why", "another"}
    assert "break" in gate
    assert {"not among the chosen layers"} == reasons[1]
    assert mine.report().short_forwards == mine.report().notes["the request asks for it (sparseprefill: off)"] == 4


def test_tokens_a_second_are_those_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    """However long the server waits before, between and behind them, and whatever beside them is too short."""
    given, clock = runtime(gate=False), Clock()
    mine = Runtime.made(given.options, given.model, Whose())
    mine.names, mine.pace.clock = given.names, clock
    for seconds, batch in (
        (0.5, common([20, 20], [20, 20], [True, True])),
        (1.5, common([50, 3], [50, 3], [True, True])),
        (None, common([3], [3], [True])),
        (None, common([1], [21], [False])),
    ):
        clock.now += 1000
        parts = plan(mine, batch, stock, 3)
        for layer in range(3 if seconds else 0):
            clock.now += (seconds or 0) / 3
            step(mine, parts, layer, "why" if layer == 0 else None)
    clock.now += 1000
    with caplog.at_level(logging.INFO, logger="sparseprefill"):
        mine.tell()
    *_, said = (one.message for one in caplog.records)
    assert said.endswith(f"{(40 + 53) / 2.0:.1f} tokens/s of prefill"), said


def test_a_step_that_no_layer_ends_has_no_time() -> None:
    """Such as one that fails: the next begins without its end."""
    told: list[tuple[int, float]] = []
    pace = Pace(lambda tokens, seconds: told.append((tokens, seconds)), Clock())
    pace.begin(7, 2).through()
    pace.begin(8, 1).through()
    pace.read()
    assert [(8, 0.0)] == told


class Event:
    """In the place of a GPU's, which passes when the test says so."""

    made: ClassVar[list[Event]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.there, self.at = False, float(len(self.made))
        self.made.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.there

    def elapsed_time(self, later: Event) -> float:
        assert self.there
        assert later.there
        return 1000 * (later.at - self.at)


def test_nothing_waits_for_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, float]] = []
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    pace = Pace(lambda tokens, seconds: told.append((tokens, seconds)))
    for tokens in (7, 8):
        pace.begin(tokens, 1).through()
    for passed, known in enumerate([0, 0, 1, 1, 2]):
        for one in Event.made[:passed]:
            one.there = True
        pace.read()
        assert known == len(told)
    assert [(7, 1.0), (8, 1.0)] == told
    assert 4 == len(Event.made), "two a step"


def test_every_reason_has_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it comes from decides, not its words."""
    monkeypatch.delenv("SPARSEPREFILL_BREAKEVEN")
    seen: set[tuple[Code, str]] = set()
    monkeypatch.setattr(Tally, "fallback", lambda _, layer, why: seen.add((why.code, why.text)))
    monkeypatch.setattr(Tally, "dense", lambda _, tokens, why: seen.add((why.code, why.text)))
    given = runtime(method="flexprefill", layers=[0, 1])
    mine = Runtime.made(given.options, given.model, Whose())
    host = RunnerV1(mine, "a", "b", "c", "d", "e")
    unclear = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"sparse_prefill": 1}))
    host.requests = {"a": asking("off"), "b": NOTHING, "c": NOTHING, "d": asking("fast"), "e": unclear}
    parts = plan(mine, common([20, 3, 20, 20, 20], [20, 3, 20, 20, 20], [True] * 5), stock)
    assert parts is not None
    for layer, reason in ((0, None), (2, None), (1, "a window")):
        step(mine, parts, layer, reason)
    mine = Runtime.made(runtime(gate=False).options, given.model, Whose())
    mine.names = given.names
    for error in (torch.OutOfMemoryError("no room"), ZeroDivisionError("a bug"), sp.UnsupportedCallError(["no"])):
        parts = plan(mine, common([20], [20], [True]), stock)
        assert parts is not None
        monkeypatch.setattr(mine.session, "run_many", lambda *_, error=error: [error])
        step(mine, parts, 0)
    parts[0].reason = "an image"
    step(mine, parts, 0)
    by_code: dict[Code, list[str]] = {}
    for code, text in seen:
        by_code.setdefault(code, []).append(text)
    (gate,) = by_code.pop(Code.GATE)
    (unknown,) = by_code.pop(Code.UNKNOWN)
    assert "break" in gate
    assert "looks like" in unknown
    assert {
        Code.SHORT: ["fewer than 8 tokens"],
        Code.OFF: ["the request asks for it (sparseprefill: off)"],
        Code.NO_PROFILE: [NO_PROFILE],
        Code.LAYERS: ["not among the chosen layers"],
        Code.LAYER: ["a window"],
        Code.MEMORY: ["OutOfMemoryError: no room"],
        Code.ERROR: ["ZeroDivisionError: a bug"],
        Code.UNSUPPORTED: ["UnsupportedCallError: no"],
        Code.REQUEST: ["an image"],
    } == by_code


def test_every_code_is_on_the_page() -> None:
    page = section((ALERTS.parents[2] / "vllm-operate.md").read_text(), "Metrics")
    codes = page.partition("### Codes")[2].partition("\n### ")[0]
    assert [one.value for one in Code] == re.findall(r"^\| `([a-z_]+)` \|", codes, flags=re.M)


def params(profile: object) -> Any:
    return SimpleNamespace(extra_args={"sparseprefill": profile})


def asking(profile: object) -> Any:
    return SimpleNamespace(sampling_params=params(profile), num_prompt_tokens=52)


def served(mine: Runtime, batch: Any) -> list[Any]:
    """What runs each part of a batch: a session, or None where the host does."""
    parts = plan(mine, batch, stock)
    return [] if parts is None else [None if part.served is None else part.served.session for part in parts]


def test_runner_v1_tells_what_requests_ask_for(mine: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    host = RunnerV1(mine, "a", "b", "c", "d")
    host.requests = {"a": asking("all"), "b": asking("off"), "c": asking("fast"), "d": NOTHING}
    with caplog.at_level(logging.WARNING):
        for start in (0, 20):
            batch = common([20] * 4, [start + 20] * 4, [True] * 4)
            assert [mine.profiles["all"].session, None, mine.session] == served(mine, batch)
    text = "sparseprefill is 'fast', which is not a profile of this engine. Known: all, off"
    assert [f"sparseprefill: a request runs dense: {text}"] == [one.message for one in caplog.records]
    notes = mine.report().notes
    assert [2, 2] == [notes["the request asks for it (sparseprefill: off)"], notes[NO_PROFILE]]


def test_runner_v2_tells_it_when_a_request_comes(mine: Runtime) -> None:
    host = RunnerV2(mine, "b")
    host.add("a", params("all"))
    both = [mine.profiles["all"].session, mine.session]
    assert both == served(mine, host.batch([20, 20], [20, 20], [True, True], "a", "b"))
    assert both == served(mine, host.batch([20, 20], [40, 40], [True, True], "a", "b"))
    assert both[:1] == served(mine, host.batch([20], [20], [True], "a")), "begun anew"
    host.req_states.remove("a")
    host.add("c", params("off"))
    assert host.slots["a"] == host.slots["c"]
    assert [] == served(mine, host.batch([20], [20], [True], "c")), "the slot is another's now"
    host.req_states.remove("c")
    host.add("a")
    assert both[1:] == served(mine, host.batch([20], [20], [True], "a")), "another of the name, that asks for nothing"


@pytest.mark.parametrize(
    "extra",
    [
        {"sparsprefill": "off"},
        {"sparse-prefill": "off"},
        {"SparsePrefill": "off"},
        {"sparseprefill": "all", "sparseprefill_profile": "off"},
        {"sparseprefill": None},
        {"sparseprefill": ["off"]},
        {"sparseprefill": {"profile": "off"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [RunnerV1, RunnerV2])
def test_what_no_front_end_has_refused_runs_dense(
    kind: type[RunnerV1 | RunnerV2], extra: dict[str, Any], mine: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    host = kind(mine)
    given = SimpleNamespace(extra_args=extra)
    if isinstance(host, RunnerV1):
        host.requests["a"] = SimpleNamespace(sampling_params=given, num_prompt_tokens=52)
    else:
        host.add("a", given)
    with caplog.at_level(logging.WARNING):
        for end in (20, 40):
            assert [] == served(mine, host.batch([20], [end], [True], "a"))
    assert 1 == len(caplog.records)
    ((_, why), (_, again)) = SETTLED
    assert why is not None
    assert why == again
    assert "sparseprefill" in why
    assert not any(word in why for word in ("off", "profile_", "SparseP")), "a label of metrics: no words of requests"


def test_other_arguments_are_no_business_of_ours(mine: Runtime) -> None:
    host = RunnerV2(mine)
    host.add("a", SimpleNamespace(extra_args={"kv_transfer_params": {}, "sparse": 1, "prefill": 2}))
    assert [mine.session] == served(mine, host.batch([20], [20], [True], "a"))


@pytest.mark.parametrize("kind", [RunnerV1, RunnerV2])
def test_whose_last_row_alone_is_read(kind: type[RunnerV1 | RunnerV2]) -> None:
    """Not of a prompt whose log probabilities are asked for, of a pooling model, nor where vLLM does not tell."""
    given = {
        "a": SimpleNamespace(extra_args=None, prompt_logprobs=None),
        "b": SimpleNamespace(extra_args=None, prompt_logprobs=0),
        "c": SimpleNamespace(extra_args=None),
        "d": None,
    }
    for table, alone in (({"skip_unread": True}, [True, False, False, False]), ({}, [False] * 4)):
        mine = runtime(**table)
        host = kind(mine)
        for name, params in given.items():
            if isinstance(host, RunnerV1):
                host.requests[name] = SimpleNamespace(sampling_params=params)
            else:
                host.add(name, params)
        parts = plan(mine, host.batch([20] * 4, [20] * 4, [True] * 4, *given), stock)
        assert parts is not None
        assert alone == [part.row is not None and part.row.ends_alone for part in parts]
        assert (2 if table else None) == mine.unread, "the last layer"
    assert not mine.names.ends_alone("nobody")
    assert not mine.names.ends_alone(None)


def exposed() -> dict[str, set[str]]:
    """Labels of every series of ours that Prometheus keeps."""
    found: dict[str, set[str]] = {}
    for name, (kind, _, labels, _) in METRICS.items():
        behind = {"Counter": ("_total",), "Gauge": ("",)}.get(kind, ("_bucket", "_sum", "_count"))
        for suffix in behind:
            found[PREFIX + name + suffix] = {*OWNER, *labels, *(["le"] if suffix == "_bucket" else [])}
    return found


def test_alerts_name_series_and_labels_that_there_are() -> None:
    queries, known = (
        re.findall(r"expr: (?:\|\n)?(.+?)(?=\n +(?:for|annotations):)", ALERTS.read_text(), re.S),
        exposed(),
    )
    assert len(queries) == 4
    assert {"sparseprefill:prefill_tokens_total"} == set(re.findall(r"sparseprefill:\w+", queries[0])), (
        "a long prompt is more than a short one"
    )
    for query in queries:
        uses = re.findall(r"(sparseprefill:\w+)(?:\{([^}]*)\})?", query)
        assert uses, query
        for series, chosen in uses:
            assert set(re.findall(r"(\w+)=", chosen)) <= known[series], query
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
        assert all(grouped <= known[series] for series, _ in uses), query


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, which comes with Prometheus")
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    for file in (ALERTS, Path(__file__).with_name("alerts.test.yaml")):
        shutil.copy(file, tmp_path)
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "alerts.test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
