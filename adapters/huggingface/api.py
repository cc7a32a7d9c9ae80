"""attach(): the front door."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import fields

from sparseprefill.breakeven.gate import AUTO, GateChoice
from sparseprefill.errors import AttachError, ParameterError, UnknownMethodError, extra, printed
from sparseprefill.pipeline import Pipeline
from sparseprefill.profiles.profile import Profile
from sparseprefill.refiners.recall import Recall
from sparseprefill.registry import default_registry
from sparseprefill.route import Route, gated
from sparseprefill.structure import parsed

from ..session.defaults import MIN_QUERY, TAIL
from ..session.options import HostOptions
from ..session.session import Observe, Session, check_flag
from ..session.watch import RECALL_EVERY

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .handle import Handle

VARIABLE = "SPARSEPREFILL"
DEFAULT = "rowmax"
log = logging.getLogger(__name__)


def attach(
    model: torch.nn.Module,
    method: str | Pipeline | Route | None = None,
    *,
    strict: bool = False,
    min_query: int = MIN_QUERY,
    layers: Iterable[int] | None = None,
    verify: bool = True,
    measure: bool = False,
    observe: Observe | None = None,
    profile: str | Path | Profile | None = None,
    gate: GateChoice = AUTO,
    tail: int = TAIL,
    recall: Recall = None,
    recall_every: int = RECALL_EVERY,
    strict_recall: float | None = None,
    skip_unread: bool = False,
    replace: bool = False,
    **parameters: Any,
) -> Handle:
    """Run the model's prefill through a sparse method, until the handle is detached.

    method: a registered name, with its `parameters`, or a Pipeline; may be left out with a `profile`. Used as a context
    manager the handle detaches by itself. Decoding behind a cache, and everything that the method or the adapter cannot
    honour, stays with the model's own attention; ``handle.report()`` says what and why.

    strict: raise where a prefill call would fall back to dense. min_query: query rows (tokens of one forward) from
    which a call is prefill; drafts that `generate` checks are decoding whatever their length, those of a loop of your
    own in ``with handle.decoding():``. layers: indices of the layers to run sparse, from 0; None for all. verify:
    compare the model with itself under a full mask first. measure: count the density of every call at once, at the
    price of a host sync. observe: called as ``observe(call, result)`` after every sparse layer.
    profile: a file that ``sparseprefill fit`` wrote for this model; the length of each call chooses method
    and parameters, `parameters` go over them.
    gate: judges each prompt by the sizes of its first chunk, so that one too small for the method runs dense. "auto":
    the break-even table that fits the device, if there is one; or the path of a table, a BreakEven or Gate, None for no
    gate.
    tail: last query rows of each forward that get every key, whatever the method selects, in whole query tiles, for
    there a question stands that block methods pool away; a Pipeline given gets it, too. 0 leaves the method as it is.
    recall: how much of the attention mass of sampled query rows every head keeps, such as 0.95; what the method leaves
    out of that is added before it runs. Or a `RecallFloor`, with options of its own; None for none.
    recall_every: of how many prefills one is measured, the first among them: what its sparse layers keep of sampled
    query rows, for the report; nothing waits for it. 0 for none. strict_recall: where a head of a measured call keeps
    less, the call is counted, and the first is logged as a warning, with layer and head; None for neither.
    skip_unread: compute no rows of the last layer's attention that nobody reads: those before the ones that
    `logits_to_keep` names, as `generate` does for a prompt. Exact; `verify` compares it with the stock model.
    replace: detach the model first if it is attached, as when a notebook's cell runs again; if attaching fails, it
    stays attached as it was.

    Where nothing of the model can ever run sparse (every layer would stay dense), attach refuses; where nothing may, as
    far as can be told (only sliding windows, a `min_query` or a break-even table beyond the model's length), it warns.
    It can tell from the run that `verify` asks for.

    Raises AttachError if the model cannot be attached or nothing can run sparse, UnknownMethodError or ParameterError
    for a wrong method, layers that the model has not, a profile or a table of another model, or a break-even table
    that cannot be read; ImportError without transformers.
    """
    check_flag("verify", verify)
    check_flag("replace", replace)
    options = HostOptions(
        min_query=min_query,
        layers=layers,
        strict=strict,
        measure=measure,
        tail=tail,
        recall_every=recall_every,
        strict_recall=strict_recall,
        skip_unread=skip_unread,
    )
    session = _session(method, options, observe, profile, gate, recall, parameters)
    decoder = _decoder_of(model)
    from .handle import replacing
    from .inspection import check
    from .switch import STAR, attaching, settle
    from .versions import warn_of_untested

    warn_of_untested()
    with replacing(decoder) if replace else nullcontext(), attaching(decoder):
        check(decoder, STAR)
        settle(model)
        return _bound(model, decoder, session, verify=verify, skip_unread=skip_unread)


def _session(
    method: str | Pipeline | Route | None,
    options: HostOptions,
    observe: Observe | None,
    profile: str | Path | Profile | None,
    gate: GateChoice,
    recall: Recall,
    parameters: dict[str, Any],
) -> Session:
    profile = None if profile is None else Profile.load(profile)
    try:
        given = Route.of(_pipeline(method, profile, parameters)).with_recall(recall)
    except ParameterError as error:
        raise _with_options(error, parameters) from error.__cause__
    # A route's own gate goes before "auto"; any other choice goes before a route's own.
    route = given if gate == AUTO and given.gate is not None else Route.of(gated(given, gate))
    return Session(route, options, observe=observe)


def register(method: str | Pipeline | Route | None = None, **options: Any) -> None:
    """Let models be attached by the name of their attention implementation: ``attn_implementation="sparseprefill"``.

    A model under that name is attached as its first forward begins, as by ``attach(model, method, **options)``. Its
    handle is ``handle_of(model)``; ``model.set_attn_implementation("sdpa")`` detaches it.

    method, options: arguments of `attach`. Without any, those of the environment variable SPARSEPREFILL: the name of a
    method, or a table in JSON such as ``{"method": "rowmax", "tail": 64}``; without that, rowmax at its defaults.
    Another call changes what models get whose first forward, or whose next choice of the name, comes later.

    Raises UnknownMethodError or ParameterError for what `attach` would refuse, and says where the variable is at fault.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text and method is None and not options:
        try:
            table = parsed(text, remedy="give the name of a method, or a table") if text[0] == "{" else {"method": text}
            register(**{"method": None, "tail": TAIL, **table})
        except (ParameterError, UnknownMethodError) as error:
            raise type(error)(f"{VARIABLE} of the environment: {error}") from error
        return
    if method is None and options.get("profile") is None:
        method = DEFAULT
    _check(method, options)
    _need_transformers()
    from .by_name import serve

    serve(partial(attach, method=method, **options))


def _check(method: str | Pipeline | Route | None, options: dict[str, Any]) -> None:
    """Raise what `attach` would for its arguments, whatever the model."""
    try:
        bound = signature(attach).bind(None, method, **options)
    except TypeError as error:
        raise ParameterError(f"options are {printed(sorted(options))}: pass arguments of attach ({error})") from error
    bound.apply_defaults()
    found = bound.arguments
    for name in ("verify", "replace"):
        check_flag(name, found[name])
    names = [one.name for one in fields(HostOptions)]
    rest = {name: found[name] for name in ("observe", "profile", "gate", "recall", "parameters")}
    _session(method, HostOptions(**{name: found[name] for name in names}), **rest)


def handle_of(model: torch.nn.Module) -> Handle | None:
    """The handle by which a model is attached, or was by the name of its implementation; None without one.

    Raises AttachError for what is no model that could be attached; ImportError without transformers.
    """
    decoder = _decoder_of(model)
    from .by_name import handle_by_name
    from .handle import handles_of

    return next(reversed(handles_of(decoder)), None) or handle_by_name(decoder)


def _decoder_of(model: torch.nn.Module) -> PreTrainedModel:
    """The model's decoder; one that was attached by a name, and has got another, is detached first."""
    _need_transformers()
    from .handle import handles_of
    from .inspection import find_decoder

    decoder = find_decoder(model)
    for one in handles_of(decoder):
        if one.overruled:
            one.detach()
    return decoder


def _with_options(error: ParameterError, parameters: Iterable[str]) -> ParameterError:
    """The error; where it speaks of a parameter that is nearly called like an option of `attach`, with that."""
    options = [name for name, one in signature(attach).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name in parameters:
        close = get_close_matches(name, options, n=1)
        if close and f"has no parameter {name!r}" in str(error):
            return ParameterError(f"{error}. Or did you mean {close[0]!r}, an option of attach?")
    return error


def detach(model: torch.nn.Module) -> Handle | None:
    """Restore a model that is attached, where its handle is lost.

    Returns the handle, whose report can still be read, or None if the model is not attached. Raises AttachError for
    what is no model that could be; ImportError without transformers.
    """
    decoder = _decoder_of(model)
    from .handle import handles_of

    found = handles_of(decoder)
    for handle in found:
        handle.detach()
    return found[-1] if found else None


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "transformers":
            raise
        raise ImportError(f"attaching needs transformers: {extra('hf')}") from error


def _bound(
    model: torch.nn.Module, decoder: PreTrainedModel, session: Session, *, verify: bool, skip_unread: bool
) -> Handle:
    """Attach by this session what can be attached."""
    from . import unread
    from .dry_run import compare_unread, dry_run
    from .handle import Handle
    from .identity import identity
    from .inspection import trained_length
    from .state import Place

    route = session.route
    if route.asks_model:
        route.check_model(identity(decoder))
    seen = None
    if verify:
        findings = dry_run(model, decoder, route)
        seen = findings.layers
        session.expect(seen)
        _check_layers(session, findings.layers, "attention layers")
        if session.strict:
            _check_strict(session, findings.dense)
        session.start(type(model).__name__, findings.kinds, windows=findings.windows, trained=trained_length(decoder))
        if findings.note:
            session.note(findings.note)
        if findings.alone:
            log.warning("%s: %s", route.name, findings.note)
        if findings.repeated:
            session.note("layer indices repeat within a forward: methods that remember by layer mix them up")
    else:
        _check_layers(session, sorted(Place.all_of(decoder)), "layers")
    last = None
    if skip_unread:
        last = unread.check(model, decoder, seen)
        if verify:
            compare_unread(model, decoder, route, last)
    handle = Handle(decoder, session, last=last, model=model)
    handle.bind()
    return handle


def _pipeline(
    method: str | Pipeline | Route | None, profile: Profile | None, parameters: dict[str, Any]
) -> Pipeline | Route:
    if isinstance(method, str) or (method is None and profile is not None):
        made: Pipeline | Route = default_registry().build(method, profile=profile, **parameters)
        return made
    if not isinstance(method, Pipeline | Route):
        raise ParameterError(f"method is {printed(method)}: pass the name of a method, or a Pipeline")
    if profile is not None:
        raise ParameterError("a Pipeline is already built: pass a profile with the name of a method")
    if parameters:
        given = ", ".join(sorted(parameters))
        raise ParameterError(f"a Pipeline is already built: pass parameters ({given}) with the name of a method")
    return method


def _check_layers(session: Session, known: Sequence[int], kind: str) -> None:
    unknown = sorted((session.layers or frozenset()) - set(known))
    if unknown:
        shown = ", ".join(map(str, known)) or "without an index: leave layers out"
        raise ParameterError(f"layers names {', '.join(map(str, unknown))}: the model's {kind} are {shown}")


def _check_strict(session: Session, dense: dict[int, tuple[str, ...]]) -> None:
    chosen = {i: why for i, why in dense.items() if session.layers is None or i in session.layers}
    if chosen:
        shown = "; ".join(f"layer {i}: {', '.join(why)}" for i, why in sorted(chosen.items()))
        raise AttachError(f"strict: these layers would fall back to dense: {shown}")
