"""A kernel's records and answers: wrong ones name field, value and remedy, and another fills the same outputs."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.families import EVERY, know, only
from sparseprefill.errors import ParameterError, PluginLoadError, StageError
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention.record import PORTABLE
from sparseprefill.kernels.family.record import Family, Features, Job, Launched, Wanted, square
from sparseprefill.plan import Kernel
from sparseprefill.testing import check_kernel, tensors
from sparseprefill.testing.kernels import paged

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
FEATURES = Features(dims=square(64))
FLAGS = 2 * 2
"""Query blocks of the call below: 150 rows in tiles of 128, two heads."""


def call() -> sp.AttentionCall:
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 150, "kv_len": 150, "head_dim": 64}
    return sp.AttentionCall(*tensors("random", dtype=torch.float16, **sizes))


def mask_of(given: sp.AttentionCall) -> sp.SparseMask:
    return sp.SparseMask.full(given, 128)


def filled(job: Job) -> None:
    """The job's outputs, of plain attention; NaN of keys that a row may not see spoils it, as in many kernels."""
    given, outputs = job.call, job.arguments.outputs
    k, v = (x.repeat_interleave(2, 1).float() for x in (given.k, given.v))
    logits = (given.q.float() @ k.mT * given.softmax_scale).masked_fill(~job.mask.to_dense(), -torch.inf)
    outputs.out.copy_(logits.softmax(-1) @ v)
    outputs.lse.copy_(logits.logsumexp(-1))


class Mine:
    """A kernel that writes nonsense and answers with what it is given, or with what that makes of a job."""

    def __init__(self, answer: Any, **fields: Any) -> None:
        self.answer, self.launches = answer, 0
        self.family = Family(**{"name": "mine", "rank": 20, "features": FEATURES, "launch": self.launch, **fields})

    def launch(self, job: Job) -> Any:
        self.launches += 1
        outputs = job.arguments.outputs
        for x in (outputs.out, outputs.lse, *outputs.state):
            if x is not None:
                x.fill_(7.0)
        return self.answer(job) if callable(self.answer) and not isinstance(self.answer, type) else self.answer


def left_out(
    family: Family, reason: str, logs: pytest.LogCaptureFixture, given: sp.AttentionCall | None = None, **wanted: Any
) -> None:
    """Twice the right output, by the portable kernel, with the reason; and one warning."""
    given = call() if given is None else given
    expected = sp.ReferenceExecutor().execute(given, sp.Plan(mask_of(given)))
    for _ in range(2):
        result = TritonExecutor(**wanted).execute(given, sp.Plan(mask_of(given)))
        assert 2e-3 >= sp.output_error(result.out, expected.out)
        torch.testing.assert_close(result.lse, expected.lse, atol=1e-2, rtol=1e-2)
        assert result.rounded is None
        (kernel,) = result.kernels
        assert "portable" == kernel.name
        assert re.search(f"^{family.name}: does not work here for .*: {reason}", kernel.reason), kernel.reason
    (warning,) = [one.getMessage() for one in logs.records if one.levelname == "WARNING"]
    assert re.search(f"the kernel {family.name} does not work here .*{reason.partition(': ')[2]}", warning)


async def coroutine(job: Job) -> Launched:
    return Launched()


def generator(job: Job) -> Any:
    yield Launched()


NO_LAUNCHED: dict[str, tuple[Any, str]] = {
    "nothing": (None, "None"),
    "text": ("ok", "'ok'"),
    "flag": (True, "True"),
    "number": (0, "0"),
    "class": (Launched, "a type"),
    "dict": ({"nonfinite": None}, "a dict"),
    "outputs": (lambda job: (job.arguments.outputs.out, job.arguments.outputs.lse), "a tuple"),
    "tensor": (lambda job: job.arguments.outputs.out, r"a Tensor of torch.float16 \(1, 2, 150, 64\)"),
    "numpy": (np.zeros(3), "a numpy.ndarray"),
    "coroutine": (coroutine, "a coroutine"),
    "generator": (generator, "a generator"),
}


@pytest.mark.parametrize("name", NO_LAUNCHED)
def test_a_launch_that_gives_no_launched_is_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer, shown = NO_LAUNCHED[name]
    mine = Mine(answer)
    only(monkeypatch, mine.family)
    left_out(mine.family, rf"StageError: mine.launch\(\) returned {shown}: it must return a Launched", caplog)
    assert 1 == mine.launches


def flags(count: int = FLAGS, **more: Any) -> torch.Tensor:
    return torch.ones(count, **{"dtype": torch.int8, **more})


OWN = r"Launched.nonfinite is a Tensor of {}: pass a contiguous int8 tensor"
SIZED = (
    r"mine.launch\(\) returned a Launched whose nonfinite is a Tensor of torch.int8 {}: it must be one flag for each"
)
WRONG: dict[str, tuple[Callable[[Job], Any], str]] = {
    "one flag": (lambda job: Launched(nonfinite=flags(1)), SIZED.format(r"\(1,\) on cpu")),
    "no flags": (lambda job: Launched(nonfinite=flags(0)), SIZED.format(r"\(0,\) on cpu")),
    "many flags": (lambda job: Launched(nonfinite=flags(FLAGS + 1)), SIZED.format(r"\(5,\) on cpu")),
    "elsewhere": (lambda job: Launched(nonfinite=flags(device="meta")), SIZED.format(r"\(4,\) on meta")),
    "floats": (lambda job: Launched(nonfinite=torch.ones(FLAGS)), OWN.format(r"torch.float32 \(4,\)")),
    "bools": (lambda job: Launched(nonfinite=flags() > 0), OWN.format(r"torch.bool \(4,\)")),
    "rows of heads": (lambda job: Launched(nonfinite=flags().view(2, 2)), OWN.format(r"torch.int8 \(2, 2\)")),
    "steps": (lambda job: Launched(nonfinite=flags(8)[::2]), OWN.format(r"torch.int8 \(4,\)")),
    "expanded": (lambda job: Launched(nonfinite=flags(1).expand(FLAGS)), OWN.format(r"torch.int8 \(4,\)")),
    "sparse": (lambda job: Launched(nonfinite=flags().to_sparse()), OWN.format(r"torch.int8 \(4,\)")),
    "list": (lambda job: Launched(nonfinite=[0] * FLAGS), r"Launched.nonfinite is \[0, 0, 0, 0\]"),  # type: ignore[arg-type]
    "repaired": (lambda job: Launched(repaired="no"), "Launched.repaired is 'no': pass True or False"),  # type: ignore[arg-type]
    "voting": (lambda job: Launched(voting=(128, 64)), r"Launched.voting is \(128, 64\): pass a tuple"),  # type: ignore[arg-type]
    "errors": (lambda job: Launched(errors=torch.zeros(1, 2)), "whose errors is .*: the call's precision was asked"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_launched_of_wrong_fields_is_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer, words = WRONG[name]
    mine = Mine(answer)
    only(monkeypatch, mine.family)
    left_out(mine.family, rf"(Stage|Parameter)Error: .*{words}", caplog)
    assert 1 == mine.launches


@pytest.mark.parametrize("made", [None, flags()])
def test_flags_of_the_jobs_size_are_taken(made: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN of a key that rows may not see is in all of them until their blocks are computed again."""
    given = call()
    given.v[:, :, 100] = torch.nan

    def answer(job: Job) -> Launched:
        assert FLAGS == job.arguments.flags
        filled(job)
        assert bool(job.arguments.outputs.out.isnan().any(-1).all())
        return Launched(nonfinite=made)

    only(monkeypatch, Mine(answer).family)
    result = TritonExecutor().execute(given, sp.Plan(mask_of(given)))
    assert (Kernel("mine"),) == result.kernels
    assert torch.equal(result.mask.to_dense()[..., 100], result.out.isnan().any(-1))


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (None, "whose errors is None: it must be one number for each head"),
        (
            torch.zeros(2, 1),
            r"whose errors is a Tensor of torch.float32 \(2, 1\) on cpu: it must be one number for each",
        ),
        (torch.zeros(1, 2, device="meta"), r"\(1, 2\) on meta: it must be one number for each head"),
        (torch.zeros(1, 2, dtype=torch.float64), "Launched.errors is .*: pass a float32 tensor"),
        (torch.zeros(2), "Launched.errors is .*: pass a float32 tensor"),
    ],
)
def test_errors_of_a_reduced_precision_are_looked_at(
    errors: torch.Tensor | None, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Mine(lambda job: Launched(errors=errors), features=evolve(FEATURES, precisions=("int8",)))
    only(monkeypatch, mine.family)
    left_out(mine.family, f"(Stage|Parameter)Error: .*{words}", caplog, precision="int8")


def test_who_voted_is_told_where_steps_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Mine(Launched(), features=evolve(FEATURES, votes=True))
    only(monkeypatch, mine.family)
    given = call()
    result = TritonExecutor().execute(given, sp.Plan(mask_of(given), skip_below=torch.zeros(1)))
    (kernel,) = result.kernels
    assert "mine.launch() returned a Launched whose voting is None" in kernel.reason
    assert result.skipped is not None


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (True, "True"),
        (False, "False"),
        ("", "''"),
        ("  ", "'  '"),
        (0, "0"),
        (np.True_, "a numpy.bool_?"),
        (("a reason",), "a tuple"),
        (torch.zeros(1), r"a Tensor of torch.float32 \(1,\)"),
        (coroutine, "a coroutine"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_an_objection_that_is_no_reason_leaves_the_kernel_out(
    answer: Any, shown: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Mine(Launched(), objection=lambda call, mask, wanted: answer(call) if callable(answer) else answer)
    only(monkeypatch, mine.family)
    words = rf"StageError: mine.objection\(\) returned {shown}: it must return None, or a reason"
    left_out(mine.family, words, caplog)
    assert 0 == mine.launches


@pytest.mark.parametrize("answer", [None, "yes", 1, np.True_, torch.tensor(True)], ids=lambda one: type(one).__name__)
def test_whether_pages_are_copied_is_true_or_false(
    answer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Mine(Launched(), copied=lambda *_: answer, features=evolve(FEATURES, pages=True))
    only(monkeypatch, mine.family)
    words = r"StageError: mine.copied\(\) returned .*: it must return True or False"
    left_out(mine.family, words, caplog, paged(call()))
    assert 0 == mine.launches


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def speechless(*_: Any) -> Any:
    raise SpeechlessError


def test_an_error_without_words_is_told_by_its_type(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for fields in ({"answer": speechless}, {"answer": Launched(), "objection": speechless}):
        caplog.clear()
        mine = Mine(**fields)
        only(monkeypatch, mine.family)
        left_out(mine.family, "SpeechlessError: a SpeechlessError that cannot be printed", caplog)


def test_a_softmax_left_in_progress_is_computed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Mine(None, features=evolve(FEATURES, carry=True, state=True))
    only(monkeypatch, mine.family)
    given = call()
    out, _ = TritonExecutor().accumulate(given, sp.Plan(mask_of(given))).finish()
    expected = sp.ReferenceExecutor().execute(given, sp.Plan(mask_of(given))).out
    assert 2e-3 >= sp.output_error(out.to(given.q.dtype), expected)
    assert 1 == mine.launches


def test_of_the_last_in_line_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Mine(None)
    know(monkeypatch, mine.family)
    given = call()
    with pytest.raises(StageError, match=r"mine.launch\(\) returned None: it must return a Launched"):
        TritonExecutor().execute(given, sp.Plan(mask_of(given)))


def test_a_new_record_of_that_name_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that was mended and registered again does not answer for the one before it."""
    given = call()
    only(monkeypatch)
    for answer, name in ((None, "portable"), (Launched(), "mine")):
        know(monkeypatch, Mine(answer).family, PORTABLE)
        assert name == TritonExecutor().execute(given, sp.Plan(mask_of(given))).kernels[0].name


RECORDS: list[tuple[type, dict[str, Any], str]] = [
    (Family, {"name": ""}, "Family.name is '': pass lower-case words"),
    (Family, {"rank": float("nan")}, "Family.rank is nan: pass an integer"),
    (Family, {"rank": 10**30}, "Family.rank is 10+: pass an integer"),
    (Family, {"rank": {"9.0": 10}}, r"Family.rank is \{'9.0': 10\}: pass an integer, or a table"),
    (Family, {"rank": {(9,): 10}}, r"Family.rank is \{\(9,\): 10\}: pass an integer, or a table"),
    (Family, {"rank": {(9, 0): float("nan")}}, r"Family.rank is \{\(9, 0\): nan\}"),
    (Family, {"features": None}, "Family.features is None: pass a Features"),
    (Family, {"features": Features}, "Family.features is <class .*>: pass a Features"),
    (Family, {"objection": "never"}, "Family.objection is 'never': pass a function"),
    (Family, {"copied": False}, "Family.copied is False: pass a function"),
    (Features, {"dtypes": torch.float16}, "Features.dtypes is torch.float16: pass a frozenset of torch dtypes"),
    (Features, {"dtypes": frozenset({"float16"})}, "Features.dtypes is .*'float16'.*: pass a frozenset"),
    (Features, {"dtypes": frozenset()}, r"Features.dtypes is frozenset\(\)"),
    (Features, {"dims": 64}, "Features.dims is 64: pass a frozenset of pairs"),
    (Features, {"dims": frozenset({64})}, r"Features.dims is frozenset\(\{64\}\)"),
    (Features, {"dims": frozenset({(64, float("nan"))})}, r"Features.dims is frozenset\(\{\(64, nan\)\}\)"),
    (Features, {"widths": 16}, "Features.widths is 16: pass None for any"),
    (Features, {"widths": frozenset({0})}, r"Features.widths is frozenset\(\{0\}\)"),
    (Features, {"precisions": "int8"}, "Features.precisions is 'int8': pass a tuple"),
    (Features, {"precisions": ()}, r"Features.precisions is \(\): pass a tuple"),
    *((Features, {name: 1}, f"Features.{name} is 1: pass True or False") for name in (*EVERY, "window", "softcap")),
    (Wanted, {"precision": None}, "Wanted.precision is None: pass 'call'"),
    (Wanted, {"bound": float("nan")}, "Wanted.bound is nan: pass a number from 0"),
    *((Wanted, {name: "no"}, f"Wanted.{name} is 'no'") for name in ("skips", "carry", "state", "together")),
    (Launched, {"voting": (0, 64, 64)}, r"Launched.voting is \(0, 64, 64\): pass a tuple of three integers"),
    (Launched, {"voting": [128, 64, 64]}, r"Launched.voting is \[128, 64, 64\]"),
    (Launched, {"errors": 0.1}, "Launched.errors is 0.1: pass a float32 tensor"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "words"), RECORDS, ids=lambda one: " ".join(one) if isinstance(one, dict) else ""
)
def test_a_record_is_looked_at_when_it_is_made(kind: type, fields: dict[str, Any], words: str) -> None:
    needed = {"name": "mine", "rank": 20, "launch": filled} if kind is Family else {}
    with pytest.raises(ParameterError, match=words):
        kind(**{**needed, **fields})


def test_ranks_are_the_records_own() -> None:
    table = {(9, 0): 10}
    mine = Mine(None, rank=table).family
    table[8, 0] = 20
    assert {(9, 0): 10} == mine.rank


@pytest.mark.parametrize(
    "answer",
    [None, "mine", {"mine": Mine(None).family}, [[Mine(None).family]], Family],
    ids=lambda one: type(one).__name__,
)
def test_a_hook_that_gives_no_records_is_named(answer: Any) -> None:
    class Plugin:
        @sp.hookimpl
        def sparseprefill_kernels(self) -> Any:
            return answer

    words = r"plugin 'somebody' offers .*: sparseprefill_kernels\(\) must return Family records"
    with pytest.raises(PluginLoadError, match=words):
        sp.Registry().register(Plugin(), "somebody")


def nothing(job: Job) -> Launched:
    return Launched()


def of_states_alone(job: Job) -> Launched | None:
    """Right where the softmax is normalised, and silent elsewhere."""
    if job.wanted.state:
        return None
    filled(job)
    return Launched()


BREACHES: dict[str, tuple[dict[str, Any], str]] = {
    "no answer": ({"launch": lambda job: None}, r"mine.launch\(\) returned None"),
    "nothing is written": ({"launch": nothing}, "law 'output == softmax over the mask' is broken on .*got 12288"),
    "objection": ({"objection": lambda *_: True}, r"failed: StageError: mine.objection\(\) returned True"),
    "copied": (
        {"copied": lambda *_: None, "features": evolve(FEATURES, pages=True)},
        r"law 'pages == tensors' is broken on .*mine.copied\(\) returned None",
    ),
    "of a state": (
        {"launch": of_states_alone, "features": evolve(FEATURES, state=True)},
        r"it was asked and failed: StageError: mine.launch\(\) returned None",
    ),
}


@pytest.mark.parametrize("name", BREACHES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_check_finds_wrong_answers(name: str) -> None:
    fields, words = BREACHES[name]

    def right(job: Job) -> Launched:
        filled(job)
        return Launched()

    made: dict[str, Any] = {"name": "mine", "rank": 20, "features": FEATURES, "launch": right, **fields}
    with pytest.raises(AssertionError, match=words):
        check_kernel(Family(**made), device="cpu")


@pytest.mark.parametrize("given", [7, None, Family], ids=lambda one: type(one).__name__)
def test_a_check_of_what_is_no_kernel_says_so(given: Any) -> None:
    with pytest.raises(ParameterError, match=r"kernel is .*: pass a Family, or the name of a registered one"):
        check_kernel(given)
