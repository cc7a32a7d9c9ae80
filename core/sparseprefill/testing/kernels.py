"""Contract checks for an attention kernel of one's own, by its record: `check_kernel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError, StageError, printed, told
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention.record import PORTABLE
from sparseprefill.kernels.family.chips import capability
from sparseprefill.kernels.family.choose import afresh, choose, failures, objected
from sparseprefill.kernels.family.record import Family, Job, Launched, Wanted
from sparseprefill.mask.mask import SparseMask
from sparseprefill.pages import Pages
from sparseprefill.plan import EXACT, Carry, Plan, Result
from sparseprefill.registry import default_registry
from sparseprefill.testing.cases import describe
from sparseprefill.testing.contracts import Report
from sparseprefill.testing.inputs import tensors
from sparseprefill.testing.rotary import FLOATS
from sparseprefill.testing.trial import BreachError, NotApplicableError
from sparseprefill.testing.truth import attention, difference

PAGE = 16
"""Tokens of a page."""
UNWRITTEN = 12288.0
"""In outputs before each launch: finite, since rows with a NaN would be computed again; exact in every dtype."""


@frozen(eq=False)
class Case:
    """A call with a mask, and the kernel that is tried on them. known: it, and who stands behind it."""

    family: Family
    known: tuple[Family, ...]
    call: AttentionCall
    mask: SparseMask

    @property
    def executor(self) -> TritonExecutor:
        """In the first precision that the kernel has."""
        return TritonExecutor(kernels=self.known, precision=self.family.features.precisions[0])

    @property
    def exact(self) -> TritonExecutor:
        """In the call's precision."""
        return TritonExecutor(kernels=self.known)

    def choice(self, call: AttentionCall, mask: SparseMask, **wanted: Any) -> None:
        """NotApplicableError with the kernel's reason where it does not serve; BreachError where asking it fails."""
        found = choose(call, mask, Wanted(precision=self.family.features.precisions[0], **wanted), self.known)
        self.sound()
        if found.family is not self.family:
            raise NotApplicableError(found.reason)

    def sound(self) -> None:
        """BreachError where the kernel failed in whatever it was asked, and another stood in for it."""
        for error in failures(self.family):
            raise BreachError(f"it was asked and failed: {type(error).__name__}: {told(error)}")

    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        """By the kernel and no other."""
        self.choice(call, plan.mask, carry=plan.carry is not None, skips=plan.skip_below is not None)
        result = self.executor.execute(call, plan)
        self.served(result)
        return result

    def served(self, result: Result) -> None:
        """BreachError where another kernel computed the result, since this one failed."""
        if [kernel.name for kernel in result.kernels] != [self.family.name]:
            raise BreachError(f"it was chosen and failed: {result.kernels[0].reason}")

    def agree(self, what: str, expected: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> None:
        """BreachError where output or LSE differ by more than the dtype explains."""
        for name, want, got in zip(("output", "LSE"), expected, found, strict=True):
            wrong = difference(want, got, self.call.q.dtype)
            if wrong is not None:
                raise BreachError(f"{what}: {name}: {wrong}")


def softmax_over_the_mask(case: Case) -> None:
    """Output and LSE are those of plain attention over the mask's pairs."""
    if case.family.features.precisions[0] != EXACT:
        raise NotApplicableError("its precision is reduced")
    result = case.execute(case.call, Plan(case.mask))
    case.agree("", attention(case.call, case.mask.to_dense()), (result.out, result.lse))


def rounding_is_told(case: Case) -> None:
    """A reduced precision says how far each head is from the call's, and stays within the bound by that."""
    if case.family.features.precisions[0] == EXACT:
        raise NotApplicableError("its precision is the call's")
    rounded = case.execute(case.call, Plan(case.mask)).rounded
    if rounded is None:
        raise BreachError("no errors came with the result")
    if rounded.errors.shape != case.call.q.shape[:2] or not bool(rounded.errors.isfinite().all()):
        raise BreachError(f"errors are {rounded.errors.tolist()}, not one number for each head")


def unselected_nan(case: Case) -> None:
    """NaN in a key that the mask leaves out of some rows reaches the other rows alone."""
    key = case.call.kv_len // 2
    k, v = case.call.k.clone(), case.call.v.clone()
    v[:, :, key] = torch.nan
    call = evolve(case.call, k=k, v=v)
    result = case.execute(call, Plan(case.mask))
    seen = case.mask.to_dense()[..., key]
    if not torch.equal(result.out.isnan().any(-1), seen):
        raise BreachError(f"NaN of key {key} is not in those rows that see it, and in no others")


def reasons_stay(case: Case) -> None:
    """An objection is a text, and the same again; it changes nothing."""
    wanted = Wanted(precision=case.family.features.precisions[0])
    try:
        found = [objected(case.family, case.call, case.mask, wanted) for _ in range(2)]
    except StageError as wrong:
        raise BreachError(str(wrong)) from wrong
    if found[0] != found[1]:
        raise BreachError(f"objection() gave {found[0]!r} and {found[1]!r} of the same call: return the same again")


def resumed(case: Case) -> None:
    """Attention over part of a mask, resumed over the rest, is attention over both."""
    first = SparseMask.from_rules(case.call.geometry, (case.mask.tile_q, case.mask.tile_k), sink=1)
    rest = case.mask - first
    state = case.exact.accumulate(case.call, Plan(first))
    case.sound()
    result = case.execute(case.call, Plan(rest, Carry(state, first)))
    case.agree("resumed", attention(case.call, (first | rest).to_dense()), (result.out, result.lse))


def left_in_progress(case: Case) -> None:
    """A softmax left unnormalised ends as the normalised one."""
    case.choice(case.call, case.mask, state=True)
    out, lse = case.exact.accumulate(case.call, Plan(case.mask)).finish(case.call.sinks)
    case.sound()
    case.agree("left in progress", attention(case.call, case.mask.to_dense()), (out.to(case.call.q.dtype), lse))


def votes_leave_out_nothing_at_zero(case: Case) -> None:
    """With a threshold of 0 every step is computed, and the count of pairs that were left out says so."""
    below = torch.zeros(case.call.q.shape[0], dtype=torch.float32, device=case.call.q.device)
    result = case.execute(case.call, Plan(case.mask, skip_below=below))
    if result.skipped is None or bool(result.skipped.pairs.any()):
        raise BreachError("pairs were left out, or not counted, although the threshold is 0")
    case.agree("threshold 0", attention(case.call, case.mask.to_dense()), (result.out, result.lse))


def pages_are_tensors(case: Case) -> None:
    """Keys and values in pages give what they give as tensors."""
    call = paged(case.call)
    result = case.execute(call, Plan(case.mask))
    case.agree("pages", attention(case.call, case.mask.to_dense()), (result.out, result.lse))


def together_is_alone(case: Case) -> None:
    """Requests that share a launch get what each gets by itself."""
    one = paged(case.call)
    if one.starts is not None or one.lengths is not None:
        raise NotApplicableError("requests are not padded")
    case.choice(one, case.mask, together=True)
    rows = torch.cat([one.q, one.q.flip(2)], 2).transpose(1, 2).contiguous().transpose(1, 2)
    calls = [evolve(one, q=part) for part in rows.split(one.q.shape[2], 2)]
    for call, result in zip(calls, case.executor.execute_many(calls, [Plan(case.mask)] * 2), strict=True):
        case.served(result)
        case.agree("together", attention(evolve(case.call, q=call.q), case.mask.to_dense()), (result.out, result.lse))


LAWS: Mapping[str, Callable[[Case], None]] = {
    "output == softmax over the mask": softmax_over_the_mask,
    "rounding is told": rounding_is_told,
    "NaN of an unselected key stays out": unselected_nan,
    "an objection is a reason, and stays": reasons_stay,
    "resumed == whole": resumed,
    "left in progress == whole": left_in_progress,
    "nothing is left out at threshold 0": votes_leave_out_nothing_at_zero,
    "pages == tensors": pages_are_tensors,
    "together == alone": together_is_alone,
}
"""Laws that every kernel keeps, by name; a law that needs a feature is tried where the record has it."""


def check_kernel(
    kernel: str | Family, *, calls: Iterable[AttentionCall] | None = None, device: torch.device | str | None = None
) -> Report:
    """Every law of a kernel, on calls that its record allows; the portable kernel stands behind it.

    kernel: its record, or its registered name. calls: in place of small ones for each of the record's dtypes and head
    dimensions. device: by default the GPU, and without one the CPU, for which set TRITON_INTERPRET=1 before anything is
    imported. Raises AssertionError with the kernel, the law and the call; and where the kernel served no call at all,
    with its reasons; ParameterError for what is no kernel. Before each launch outputs hold one number, so that rows
    that are not written are found.
    """
    family = default_registry().find("kernel", kernel) if isinstance(kernel, str) else kernel
    if not isinstance(family, Family):
        raise ParameterError(f"kernel is {printed(kernel)}: pass a Family, or the name of a registered one")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    family = _in_front(family, place)
    family = evolve(family, launch=partial(_spoilt, family.launch))
    cases: dict[str, int] = {}
    skipped: dict[str, str] = {}
    known = (family,) if family.name == PORTABLE.name else (family, PORTABLE)
    with afresh():
        for call in _calls(family, place) if calls is None else calls:
            reason = TritonExecutor(kernels=known).unsupported(call)
            for mask in () if reason else _masks(call):
                for name, law in LAWS.items():
                    try:
                        law(Case(family, known, call, mask))
                    except NotApplicableError as why:
                        skipped.setdefault(name, str(why))
                    except BreachError as breach:
                        text = f"{family.name}: law '{name}' is broken on {describe(call)}: {breach}"
                        raise AssertionError(text) from breach
                    else:
                        cases[name] = cases.get(name, 0) + 1
            if reason:
                skipped.setdefault("every law", reason)
    if not cases.keys() - {"an objection is a reason, and stays"}:
        raise AssertionError(f"{family.name}: it served no call; {'; '.join(dict.fromkeys(skipped.values()))}")
    return Report(family.name, cases, {law: reason for law, reason in skipped.items() if law not in cases})


def _in_front(family: Family, device: torch.device) -> Family:
    """The record, before the portable kernel on a chip where it stands behind it."""
    own, last = (one.place(capability(device)) for one in (family, PORTABLE))
    return evolve(family, rank=last + 1) if own is not None and last is not None and own < last else family


def _spoilt(launch: Callable[[Job], Launched], job: Job) -> Launched:
    """Whatever a kernel's launch gives, over outputs that hold a number which is none of attention's."""
    outputs = job.arguments.outputs
    for x in (outputs.out, outputs.lse, *outputs.state):
        if x is not None:
            x.fill_(UNWRITTEN)
    return launch(job)


def _calls(family: Family, device: torch.device) -> Iterator[AttentionCall]:
    """Rows behind a cache for each type and dimension, and with the first of both groups of heads, a batch, a scale and
    whatever else the record allows.

    bfloat16 is left out in the interpreter.
    """
    features, place = family.features, dict[str, Any](device=device)
    types = [x for x in (torch.float16, torch.bfloat16, torch.float32) if x in features.dtypes]
    types = types if device.type == "cuda" else [x for x in types if x != torch.bfloat16]
    dims = sorted(features.dims)
    for dtype in types:
        for dim, values in dims if dtype == types[0] else dims[:1]:
            yield _call(140, 230, dtype=dtype, dim=dim, values=values, **place)
    if types:
        one: dict[str, Any] = {"dtype": types[0], "dim": dims[0][0], "values": dims[0][1], **place}
        for batch in (1, 2):  # apart, since a kernel may refuse a batch
            yield _call(130, 150, heads=4, kv_heads=2, batch=batch, scale=0.3, **one)
    lengths = torch.tensor([160, 97], dtype=torch.int32, device=device)
    sinks = torch.tensor([1.0, -2.0], dtype=torch.float32, device=device)
    fields: dict[str, Any] = {"window": 70, "softcap": 5.0, "sinks": sinks, "padding": lengths}
    for name, value in fields.items():
        if getattr(features, name) and types:
            more = {"lengths" if name == "padding" else name: value}
            yield _call(160, 160, dtype=types[0], dim=dims[0][0], values=dims[0][1], **place, **more)


def _call(
    q_len: int,
    kv_len: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    values: int,
    heads: int = 2,
    kv_heads: int = 1,
    batch: int = 1,
    **fields: Any,
) -> AttentionCall:
    batch = len(fields["lengths"]) if "lengths" in fields else batch
    sizes: dict[str, Any] = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    q, k, _ = tensors("stripes", head_dim=dim, **sizes, **place)
    _, _, v = tensors("random", head_dim=values, **sizes, **place)
    return AttentionCall(q, k, v, **fields)


def _masks(call: AttentionCall) -> Iterator[SparseMask]:
    """Tiles, of which each head has others; columns of one and of 16 keys beside them."""
    tile = (128, 128)
    g = call.geometry
    shape = (g.batch, g.heads, g.tile_rows(128), g.tile_columns(128))
    source = torch.Generator("cpu").manual_seed(call.kv_len)
    tiles = SparseMask.from_tiles(call, (torch.rand(shape, generator=source, **FLOATS) < 0.5).to(call.q.device), tile)
    yield tiles
    for width in (1, 16):
        if call.geometry.window is not None or call.softcap is not None:
            return
        keep = torch.rand(g.batch, g.heads, 1, -(-call.kv_len // width), generator=source, **FLOATS) < 0.2
        yield tiles | SparseMask.from_stripes(call, keep.to(call.q.device), 64, tile, width=width, diagonal=False)


def paged(call: AttentionCall) -> AttentionCall:
    """The call with its keys and values in pages, in an order of their own; NotApplicableError for a padded batch."""
    if call.q.shape[0] > 1:
        raise NotApplicableError("pages hold one request")
    count = -(-call.kv_len // PAGE)
    table = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(call.q.device)
    behind = (0, 0, 0, count * PAGE - call.kv_len)
    made = []
    for x in (call.k, call.v):
        rows = torch.nn.functional.pad(x[0], behind, value=torch.nan).transpose(0, 1)
        cache = torch.empty(count, PAGE, *rows.shape[1:], dtype=x.dtype, device=x.device)
        cache[table] = rows.reshape(count, PAGE, *rows.shape[1:])
        made.append(cache)
    pages = Pages(made[0], made[1], table.to(torch.int32), call.kv_len)
    return evolve(call, k=pages, v=pages)
