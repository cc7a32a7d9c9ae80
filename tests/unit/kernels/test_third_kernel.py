"""A kernel of somebody else: offered by a plugin, it serves, refuses with its reason, fails, or is left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.families import chosen, know, only
from helpers.registry_plugins import Point, load
from sparseprefill.errors import MethodCollisionError, ParameterError, PluginLoadError, UnsupportedCallError
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention.record import PORTABLE
from sparseprefill.kernels.family import choose as choosing
from sparseprefill.kernels.family.known import known
from sparseprefill.kernels.family.record import Family, Features, Job, Launched, Wanted, square
from sparseprefill.kernels.hopper.record import HOPPER, HOPPER_INT8
from sparseprefill.plan import Kernel
from sparseprefill.testing import tensors
from sparseprefill.testing.kernels import check_kernel, paged

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TILES = (128, 128)


def launch(job: Job) -> Launched:
    """As a library's block-sparse kernel does it: output and LSE, and no word of NaN."""
    outputs = job.arguments.outputs
    made = sp.ReferenceExecutor().execute(evolve(job.call, q_offset=job.call.geometry.q_offset), sp.Plan(job.mask))
    outputs.out.copy_(made.out)
    outputs.lse.copy_(made.lse)
    return Launched()


def objection(call: sp.AttentionCall, mask: sp.SparseMask, wanted: Wanted) -> str | None:
    return None if (mask.tile_q, mask.tile_k) == TILES else f"tiles of {mask.tile_q} x {mask.tile_k}"


FEATURES = Features(dims=square(64))
THIRD = Family(name="third", rank=10, launch=launch, objection=objection, features=FEATURES)


def plugin(*kernels: Any) -> Any:
    class Plugin:
        @sp.hookimpl
        def sparseprefill_kernels(self) -> Any:
            return kernels

    return Plugin()


@pytest.fixture
def offered() -> Iterator[Callable[[Family], None]]:
    """Puts a kernel into the registry that executors ask, for one test."""
    registry = sp.default_registry()

    def offer(family: Family) -> None:
        registry.register(plugin(family), "somebody")

    yield offer
    registry.unregister("somebody")
    for key in [key for key in choosing.FAILED if key[0].name == "third"]:
        del choosing.FAILED[key]


def call(**more: Any) -> sp.AttentionCall:
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 150, "kv_len": 150, "head_dim": 64}
    return sp.AttentionCall(*tensors("random", dtype=torch.float16, **sizes), **more)


def run(given: sp.AttentionCall, mask: sp.SparseMask | None = None) -> sp.Result:
    return TritonExecutor().execute(given, sp.Plan(sp.SparseMask.full(given, TILES) if mask is None else mask))


def test_it_serves_as_soon_as_a_plugin_offers_it(offered: Callable[[Family], None]) -> None:
    given = call()
    assert run(given).kernels == (Kernel("portable"),)
    offered(THIRD)
    result = run(given)
    assert result.kernels == (Kernel("third"),)
    assert sp.output_error(result.out, sp.ReferenceExecutor().execute(given, result.plan).out) <= 2e-3
    sp.default_registry().unregister("somebody")
    assert run(given).kernels == (Kernel("portable"),)


@pytest.mark.parametrize(
    ("given", "tile", "reason"),
    [
        (call(), (64, 64), "tiles of 64 x 64"),
        (call(softcap=3.0), TILES, "a sliding window or softcap"),
        (call(sinks=torch.zeros(2)), TILES, "sinks"),
        (call(lengths=torch.tensor([99], dtype=torch.int32)), TILES, "padding"),
    ],
)
def test_what_it_has_against_a_call_reaches_the_result(
    given: sp.AttentionCall, tile: tuple[int, int], reason: str, offered: Callable[[Family], None]
) -> None:
    offered(THIRD)
    result = run(given, sp.SparseMask.full(given, tile))
    assert result.kernels == (Kernel("portable", f"third: {reason}"),)


def test_its_reason_reaches_a_report(offered: Callable[[Family], None]) -> None:
    offered(THIRD)
    given = call()
    pipeline = evolve(sp.build("streaming", sink=16, window=64, block=32), executor=TritonExecutor())
    assert [str(one) for one in pipeline.run(given).kernels] == ["portable (third: tiles of 32 x 32)"]


def test_needs_that_its_features_lack_are_named() -> None:
    given, other = call(), sp.AttentionCall(*(torch.zeros(1, 2, 150, 64) for _ in range(3)))
    mask = sp.SparseMask.full(given, TILES)
    columns = sp.SparseMask.from_stripes(given, torch.ones(150, dtype=torch.bool), 1, TILES, diagonal=False)
    found = [
        FEATURES.lacking(given, columns, Wanted()),
        FEATURES.lacking(given, mask, Wanted(carry=True)),
        FEATURES.lacking(given, mask, Wanted(state=True)),
        FEATURES.lacking(given, mask, Wanted(skips=True)),
        FEATURES.lacking(given, mask, Wanted(together=True)),
        FEATURES.lacking(other, mask, Wanted()),
        FEATURES.lacking(given, mask, Wanted()),
    ]
    assert found == [
        "columns of 1 keys in the mask", "a softmax to resume", "a softmax that is left unnormalised",
        "tiles that may be left out", "a shared launch", "torch.float32 with head dimension 64", None,
    ]  # fmt: skip


@pytest.mark.parametrize("error", [ImportError("no library"), ValueError("of somebody else")])
def test_one_that_cannot_be_asked_is_left_out_and_says_so(
    error: Exception, offered: Callable[[Family], None], caplog: pytest.LogCaptureFixture
) -> None:
    def raising(*_: object) -> None:
        raise error

    offered(evolve(THIRD, objection=raising))
    for given in (call(), call(scale=0.5)):
        (kernel,) = run(given).kernels
        assert kernel.reason == f"third: does not work here for any call: {type(error).__name__}: {error}"
    assert [str(error) in record.message for record in caplog.records if record.levelname == "WARNING"] == [True]


def test_one_whose_launch_fails_is_left_out_for_that_variant(
    offered: Callable[[Family], None], caplog: pytest.LogCaptureFixture
) -> None:
    def failing(job: Job) -> Launched:
        raise LookupError("no such tile")

    offered(evolve(THIRD, launch=failing))
    given = call()
    for _ in range(2):
        (kernel,) = run(given).kernels
        assert kernel.name == "portable"
        assert kernel.reason.endswith("LookupError: no such tile")
    assert len(caplog.records) == 1
    other = evolve(given, q=given.q[:, :, -100:])
    with_sinks = evolve(other, sinks=torch.zeros(2))
    assert chosen(other, sp.SparseMask.full(other, TILES)).family.name == "portable", "the same variant"
    assert "sinks" in chosen(with_sinks, sp.SparseMask.full(with_sinks, TILES)).reason


@pytest.mark.parametrize("rank", [{(8, 0): 10, (9, 0): 10}, {}])
def test_one_of_other_chips_is_left_out(rank: Any, offered: Callable[[Family], None]) -> None:
    offered(evolve(THIRD, rank=rank))
    assert run(call()).kernels == (Kernel("portable"),), "in the interpreter there is no chip to speak of"


def test_on_a_gpu_it_is_told_which_chips_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, evolve(THIRD, rank={(8, 0): 10, (9, 0): 10}), PORTABLE)
    monkeypatch.setattr(choosing, "capability", lambda _: (12, 0))
    monkeypatch.setattr(choosing, "amd", lambda _: False)
    given = call()
    q = SimpleNamespace(device=torch.device("cuda", 3), dtype=given.q.dtype, shape=(1, 2, 9, 64))
    there: Any = SimpleNamespace(q=q)
    for name in ("softcap", "sinks", "starts", "lengths", "pages"):
        setattr(there, name, None)
    there.geometry, there.value_dim = given.geometry, 64
    found = chosen(there, sp.SparseMask.full(given))
    assert found.reason == "third: needs an NVIDIA GPU of capability 8.0 or 9.0, this one has 12.0"


def test_higher_ranks_come_first_and_every_one_before_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever serves: those that would have come before it are all there, each with its reason."""
    only(monkeypatch, HOPPER_INT8, HOPPER, evolve(THIRD, name="fourth"), THIRD)
    ranks = {"hopper-int8": 40, "hopper": 30, "third": 25, "fourth": 20}
    know(monkeypatch, *(evolve(one, rank=ranks.get(one.name, 0)) for one in known()))
    plain, softcap, masks = call(), call(softcap=2.0), (TILES, (64, 64))
    for precision in ("call", "int8"):
        line = list(ranks) if precision == "int8" else list(ranks)[1:]
        for given in (plain, softcap):
            for tile in masks:
                found = chosen(given, sp.SparseMask.full(given, tile), precision=precision)
                before = [*line, "portable"][: [*line, "portable"].index(found.family.name)]
                assert [one.kernel for one in found.refused] == before
                assert all(one.reason for one in found.refused)
    served = chosen(plain, sp.SparseMask.full(plain, TILES), precision="int8")
    assert (served.family.name, served.reason) == (
        "hopper",
        "hopper-int8: head dimension 64; 128 is the one with 8 bits",
    )


def test_kernels_with_one_reason_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, THIRD, evolve(THIRD, name="fourth"))
    given = call(softcap=2.0)
    assert chosen(given, sp.SparseMask.full(given, TILES)).reason == "fourth, third: a sliding window or softcap"


def test_where_none_serves_all_reasons_are_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, THIRD)
    given = call(softcap=2.0)
    with pytest.raises(UnsupportedCallError, match="third: a sliding window or softcap"):
        run(given)
    know(monkeypatch)
    with pytest.raises(UnsupportedCallError, match="no kernel runs on this device"):
        run(given)


def test_nan_of_a_kernel_without_flags_stays_with_the_rows_that_see_it(offered: Callable[[Family], None]) -> None:
    def spoilt(job: Job) -> Launched:
        launch(job)
        job.arguments.outputs.out[:, :, 40:60] = torch.nan  # 0 * NaN of a masked product, as kernels have it
        return Launched()

    offered(evolve(THIRD, launch=spoilt))
    given = call()
    given.v[:, :, 100] = torch.nan
    result = run(given)
    assert result.kernels == (Kernel("third"),)
    assert torch.equal(result.out.isnan().any(-1), result.mask.to_dense()[..., 100])


def test_it_comes_by_entry_point_and_is_listed() -> None:
    registry = load(Point("somebody", plugin(THIRD)))
    record = next(one for one in registry.plugins() if one.name == "somebody")
    assert (record.kernels, record.methods, record.error) == (("third",), (), None)
    assert THIRD in registry.kernels()
    registry.unregister("somebody")
    assert THIRD not in registry.kernels()


def test_names_are_taken_once() -> None:
    for mine in (evolve(THIRD, name="portable"), THIRD):
        with pytest.raises(MethodCollisionError, match=f"kernel '{mine.name}' is offered by plugin '.*' of"):
            load(Point("somebody", plugin(THIRD)), Point("other", plugin(mine)))


@pytest.mark.parametrize(
    ("answer", "words"), [((7,), "offers 7: .* must return Family records"), ((THIRD, THIRD), "twice")]
)
def test_what_is_no_record_is_refused(answer: Any, words: str) -> None:
    (record,) = [one for one in load(Point("somebody", plugin(*answer))).plugins() if one.name == "somebody"]
    assert re.search(words, str(record.error))
    assert record.kernels == ()
    with pytest.raises(PluginLoadError, match=words):
        sp.Registry().register(plugin(*answer), "somebody")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "My Kernel"}, "Family.name is 'My Kernel': pass lower-case words"),
        ({"rank": "first"}, r"Family.rank is 'first': pass an integer, or a table"),
        ({"rank": {(9, 0): True}}, r"Family.rank is \{\(9, 0\): True\}"),
        ({"launch": None}, "Family.launch is None: pass a function"),
    ],
)
def test_a_record_names_what_is_wrong_with_it(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        evolve(THIRD, **fields)


def test_it_keeps_the_laws() -> None:
    report = check_kernel(THIRD)
    assert report.method == "third"
    assert set(report.cases) == {
        "output == softmax over the mask", "NaN of an unselected key stays out", "an objection is a reason, and stays",
        "pages == tensors",
    }  # fmt: skip
    assert report.skipped["together == alone"] == "third: a shared launch"


def test_one_that_stands_behind_the_portable_kernel_is_tried_in_front_of_it() -> None:
    assert check_kernel(evolve(THIRD, rank=-10)).cases == check_kernel(THIRD).cases


def test_pages_are_copied_for_it_once_it_has_no_objection(offered: Callable[[Family], None]) -> None:
    offered(THIRD)
    given = paged(call())
    assert given.pages is not None
    assert run(given, sp.SparseMask.full(given, (64, 64))).kernels == (Kernel("portable", "third: tiles of 64 x 64"),)
    assert not given.pages.gathered
    assert run(given).kernels == (Kernel("third"),)
    assert given.pages.gathered


def test_one_that_fails_gets_no_copy_of_pages_again(offered: Callable[[Family], None]) -> None:
    def failing(job: Job) -> Launched:
        raise LookupError("no such tile")

    offered(evolve(THIRD, launch=failing))
    for copied in (True, False):
        given = paged(call())
        assert given.pages is not None
        assert run(given).kernels[0].name == "portable"
        assert bool(given.pages.gathered) is copied


def scaled(job: Job) -> Launched:
    launch(job)
    job.arguments.outputs.out.mul_(1.05)
    return Launched()


def shifted(job: Job) -> Launched:
    launch(job)
    job.arguments.outputs.lse.add_(0.1)
    return Launched()


def failing(job: Job) -> Launched:
    raise LookupError("no such tile")


def misread(change: Callable[[sp.AttentionCall], sp.AttentionCall]) -> Callable[[Job], Launched]:
    """As of another call."""

    def launch_misread(job: Job) -> Launched:
        return launch(evolve(job, call=change(job.call)))

    return launch_misread


def by_remainder(one: sp.AttentionCall) -> sp.AttentionCall:
    """Head h reads KV head h % Hkv."""
    return evolve(one, k=one.k.repeat(1, one.group, 1, 1), v=one.v.repeat(1, one.group, 1, 1))


def first_head(one: sp.AttentionCall) -> sp.AttentionCall:
    return evolve(one, k=one.k[:, :1], v=one.v[:, :1])


def first_row(one: sp.AttentionCall) -> sp.AttentionCall:
    return evolve(one, k=one.k[:1].expand_as(one.k), v=one.v[:1].expand_as(one.v))


ANSWERS = iter(range(1000))
BREACHES: dict[str, tuple[dict[str, Any], str]] = {
    "output": ({"launch": scaled}, "third: law 'output == softmax over the mask' is broken on q .*: : output"),
    "lse": ({"launch": shifted}, "law 'output == softmax over the mask' is broken on q .*LSE"),
    "KV head by remainder": ({"launch": misread(by_remainder)}, r"is broken on q \[1, 4, .*k/v \[1, 2, .*output"),
    "first KV head": ({"launch": misread(first_head)}, r"is broken on q \[1, 4, .*k/v \[1, 2, .*output"),
    "first batch row": ({"launch": misread(first_row)}, r"is broken on q \[2, 4, .*output"),
    "scale": ({"launch": misread(lambda one: evolve(one, scale=None))}, "is broken on .*scale 0.3: .*output"),
    "failure": ({"launch": failing}, "it was chosen and failed: .*LookupError: no such tile"),
    "moods": ({"objection": lambda *_: f"mood {next(ANSWERS)}"}, "an objection is a reason"),
    "silence": ({"objection": lambda *_: ""}, "return None, or a reason"),
    "nobody": ({"objection": lambda *_: "never"}, "third: it served no call; third: never"),
    "rounding": ({"features": evolve(FEATURES, precisions=("int8",))}, "whose errors is None: it must be one number"),
    "votes": ({"features": evolve(FEATURES, votes=True)}, "whose voting is None: it must be"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_is_found(name: str) -> None:
    fields, words = BREACHES[name]
    with pytest.raises(AssertionError, match=words):
        check_kernel(evolve(THIRD, **fields))
    assert not [key for key in choosing.FAILED if key[0].name == "third"]
