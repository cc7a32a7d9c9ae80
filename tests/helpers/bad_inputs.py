"""Bad inputs to the public API: `python -m helpers.bad_inputs` (from tests/) prints how many gave an error of ours.

Each is a place (function and field) with a value that cannot be right there: of another type, not a number, beyond any
size, or an object that cannot be printed. An error is ours where it is a SparsePrefillError; it is a good one where its
message names the field and says what would do.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import NOTHING, evolve, fields, frozen
from sparseprefill.adapters.session.session import Session
from sparseprefill.plugins.kascade import TABLE as ANCHORS
from sparseprefill.plugins.share_prefill import TABLE as CLUSTERS

import sparseprefill as sp
from helpers.build import make
from helpers.sessions import session
from sparseprefill import structure
from sparseprefill.breakeven.gate import shipped
from sparseprefill.breakeven.points import DeviceKind
from sparseprefill.errors import printed


class Unprintable:
    """Its repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


@frozen
class Bad:
    """One bad input: what is tried, the field (or more) that the error must name, and the function to try."""

    what: str
    field: str
    run: Callable[[], object]


@frozen
class Outcome:
    """What became of it: "ours", "vague" (ours, without field or remedy), "others" (an error of others), "accepted"."""

    bad: Bad
    kind: str
    said: str = ""


STRANGE: Mapping[str, Any] = {
    "nothing": None,
    "text": "x",
    "empty text": "",
    "bytes": b"x",
    "bool": True,
    "complex": 1j,
    "list": [],
    "table": {},
    "set": {1},
    "object": object(),
    "class": int,
    "function": len,
    "tensor": torch.ones(2, 3),
    "bool tensor": torch.ones(1, dtype=torch.bool),
    "unprintable": Unprintable(),
    "not a number": float("nan"),
    "infinity": float("inf"),
    "fraction": 1.5,
    "negative": -1,
    "very negative": -(10**400),
    "zero": 0,
    "huge": 10**400,
    "longer than Python writes": 10**6000,
    "beyond 64 bits": 1 << 63,
    "beyond any count": 10**30,
    "very negative, beyond any count": -(10**30),
}
LARGE = ("huge", "longer than Python writes", "beyond 64 bits", "beyond any count")
"""Whole numbers for which no device has room."""


def strange(*right: str) -> Iterator[tuple[str, Any]]:
    """All strange values but those of these names, which are right."""
    assert set(right) <= set(STRANGE), right
    return ((name, value) for name, value in STRANGE.items() if name not in right)


INTEGER = ("zero",)
NUMBER = ("zero", "fraction")
CALL = make(20, batch=2, heads=2)
Q, K = CALL.q, CALL.k


def calls() -> Iterator[Bad]:
    """AttentionCall, field by field, made in both ways."""
    right: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(("q", "k", "v"), ()),
        **dict.fromkeys(("window", "starts", "lengths", "sinks"), ("nothing",)),
        "scale": ("nothing", "fraction", "beyond 64 bits", "beyond any count"),
        "softcap": ("nothing", "fraction", "beyond 64 bits", "beyond any count"),
        "q_offset": ("nothing", "zero"),
        "layer": ("zero", "negative"),
        "first_head": ("zero",),
    }
    right["window"] = ("nothing", *LARGE)
    given: dict[str, Any] = {"q": Q, "k": K, "v": K}
    for field, fine in right.items():
        for name, value in strange(*fine):
            yield Bad(f"AttentionCall({field}={name})", field, partial(sp.AttentionCall, **{**given, field: value}))
    pipeline = sp.build("streaming")
    call_it: Callable[..., Any] = pipeline
    for field in ("starts", "lengths"):
        for far in (torch.tensor([0, 999]), torch.tensor([21, 0]), torch.tensor([0, 2**31 - 1])):
            wrong = {**given, field: far.to(torch.int32)}
            yield Bad(f"AttentionCall({field}={far.tolist()}) of 20 keys", field, partial(sp.AttentionCall, **wrong))
    for name, value in strange():
        yield Bad(f"call.keys_at({name})", "index", partial(CALL.keys_at, value))
    for far in (torch.tensor([[-1], [0]]), torch.tensor([[0], [20]]), torch.tensor([0, 1])):
        yield Bad(f"call.values_at({far.tolist()})", "index", partial(CALL.values_at, far))
    for name in ("bogus", "softcaps", "self", ""):
        yield Bad(f"pipeline({name}=1)", name, partial(call_it, Q, K, K, **{name: 1}))
    for name, value in strange():
        yield Bad(f"pipeline.run({name})", "call", partial(pipeline.run, value))
        if name != "nothing":
            yield Bad(f"pipeline.run(call, {name})", "memory", partial(pipeline.run, CALL, value))


CACHE, TABLE = torch.zeros(4, 16, 2, 8), torch.tensor([3, 0, 1], dtype=torch.int32)
EIGHT = CACHE.to(torch.float8_e4m3fn)


def pages() -> Iterator[Bad]:
    """Pages, field by field, and calls of what is none."""
    given: dict[str, Any] = {"k": CACHE, "v": CACHE, "table": TABLE, "length": 40}
    right = {"k_scale": ("nothing",), "v_scale": ("nothing",), "copies": ("bool",)}
    for field in (*given, "dtype", "k_scale", "v_scale", "copies"):
        for name, value in strange(*right.get(field, ())):
            yield Bad(f"Pages({field}={name})", field, partial(sp.Pages, **{**given, field: value}))
    for field, value in (("dtype", "float32"), ("dtype", torch.int32), ("dtype", torch.float8_e5m2)):
        yield Bad(f"Pages({field}={value})", field, partial(sp.Pages, **{**given, field: value}))
    for scale in ("k_scale", "v_scale"):
        yield Bad(f"Pages({scale}) of float32", scale, partial(sp.Pages, **{**given, scale: torch.ones(1)}))
        two = {**given, "k": EIGHT, "v": EIGHT, "dtype": torch.float32, scale: torch.ones(2)}
        yield Bad(f"Pages({scale} of two)", scale, partial(sp.Pages, **two))
    for entries in ([3, -1, 1], [3, 0, 4], [-1, 0, 1], [3, 0, -(2**31)], [2**31 - 1, 0, 1], [3, 0]):
        wrong = {**given, "table": torch.tensor(entries, dtype=torch.int32)}
        yield Bad(f"Pages(table={entries})", "table", partial(sp.Pages, **wrong))
    good = sp.Pages(**given)
    for index in ([-1], [40], [60], [0, 39, 47], [[0]], 0):
        for verb in (good.keys_at, good.values_at):
            yield Bad(f"pages.{verb.__name__}({index})", "index", partial(verb, torch.tensor(index)))
    of_pages: Any = sp.AttentionCall.of_pages
    for name, value in (*strange(), ("keys", K)):
        yield Bad(f"of_pages(q, {name})", "pages", partial(of_pages, Q[:1], value))


def masks() -> Iterator[Bad]:
    """SparseMask's constructors, verbs and checks; plans and carries."""
    mask = sp.SparseMask.full(CALL, 8)
    keep = torch.ones(1, dtype=torch.bool)
    tiles: dict[str, Callable[[Any], object]] = {
        "empty": lambda tile: sp.SparseMask.empty(CALL, tile),
        "full": lambda tile: sp.SparseMask.full(CALL, tile),
        "from_tiles": lambda tile: sp.SparseMask.from_tiles(CALL, keep, tile),
        "from_stripes": lambda tile: sp.SparseMask.from_stripes(CALL, keep, 1, tile),
        "from_rules": lambda tile: sp.SparseMask.from_rules(CALL, tile, sink=1),
    }
    for cells in (4097, 10**9):
        yield Bad(f"mask.picture(cells={cells})", "cells", partial(mask.picture, cells=cells))
    for verb, made in tiles.items():
        for name, value in strange():
            yield Bad(f"SparseMask.{verb}(tile={name})", "tile", partial(made, value))
            yield Bad(f"SparseMask.{verb}(tile=(8, {name}))", "tile", partial(made, (8, value)))
    for name, value in strange():
        yield Bad(f"SparseMask.full({name})", "mask", partial(sp.SparseMask.full, value))
        yield Bad(
            f"SparseMask.from_stripes(group={name})", "group", partial(sp.SparseMask.from_stripes, CALL, keep, value)
        )
        stripes = partial(sp.SparseMask.from_stripes, CALL, keep, 1, 8)
        yield Bad(f"SparseMask.from_stripes(width={name})", "stripe_width", partial(stripes, width=value))
        yield Bad(f"mask.shade({name})", "cells", partial(mask.shade, value))
        yield Bad(f"mask.picture(cells={name})", "cells", partial(mask.picture, cells=value))
        yield Bad(f"Plan({name})", "mask", partial(sp.Plan, value)) if name != "function" else BAD_PROBE
        if name != "nothing":
            yield Bad(f"Plan(carry={name})", "carry", partial(sp.Plan, mask, value))
            yield Bad(f"Plan(probe={name})", "probe", partial(sp.Plan, mask, probe=value))
            yield Bad(f"Plan(priority={name})", "priority", partial(sp.Plan, mask, priority=value))
            yield Bad(f"Plan(skip_below={name})", "skip_below", partial(sp.Plan, mask, skip_below=value))
        if name != "table":
            yield Bad(f"Plan(notes={name})", "notes", partial(sp.Plan, mask, notes=value))
        for part in ("m", "l", "acc"):
            state = {
                "m": torch.zeros(2, 2, 20),
                "l": torch.ones(2, 2, 20),
                "acc": torch.zeros(2, 2, 20, 8),
                part: value,
            }
            yield Bad(f"SoftmaxState({part}={name})", part, partial(sp.SoftmaxState, **state))
        first = torch.zeros(2, 3, 1, dtype=torch.int64)
        ranges = partial(sp.SparseMask.from_ranges, CALL, first, first)
        if name != "zero":
            yield Bad(f"SparseMask.from_ranges(width={name})", "width", partial(ranges, value, 8))
        if name not in ("zero", "nothing"):
            for rule in ("sink", "first_head") if name != "beyond 64 bits" else ("sink", "band", "first_head"):
                yield Bad(
                    f"from_rules({rule}={name})", rule, partial(sp.SparseMask.from_rules, CALL, 8, **{rule: value})
                )
        if name != "zero":
            yield Bad(f"mask.head({name}, 0)", "batch", partial(mask.head, value, 0))
            yield Bad(f"mask.head(0, {name})", "head", partial(mask.head, 0, value))
        if name != "bool tensor":
            yield Bad(f"SparseMask.from_tiles(keep={name})", "keep", partial(sp.SparseMask.from_tiles, CALL, value, 8))
            yield Bad(f"SparseMask.from_stripes(keep={name})", "keep", partial(sp.SparseMask.from_stripes, CALL, value))
        if name not in ("nothing", "list"):
            yield Bad(f"mask.to_dense({name})", "rows", partial(mask.to_dense, value))


def scores() -> Iterator[Bad]:
    """PriorityScores, field by field, and those that do not fit a call."""
    given: dict[str, Any] = {"tiles": torch.ones(1, 1, 3, 3), "tile_q": 8, "tile_k": 8, "columns": None, "rows": None}
    right = {
        "tiles": ("class", "function", "nothing"),
        "columns": ("class", "function", "nothing"),
        "rows": ("nothing",),
    }
    for field in given:
        for name, value in strange(*right.get(field, ())):
            yield Bad(f"PriorityScores({field}={name})", field, partial(sp.PriorityScores, **{**given, field: value}))
    shapes = ((1, 3, 3, 3), (3, 1, 3, 3), (1, 1, 2, 3), (1, 1, 3, 4))
    for shape in shapes:
        for field, size in (("tiles", {"tile_q": 8, "tile_k": 8}), ("columns", {"rows": 8})):
            fields: dict[str, Any] = {field: torch.ones(shape), **size}
            wrong = sp.PriorityScores(**fields)
            yield Bad(f"PriorityScores({field}={shape}).check", field, partial(wrong.check, CALL))


BAD_PROBE = Bad(
    "Plan(probe=float tensor)", "probe", lambda: sp.Plan(sp.SparseMask.full(CALL, 8), probe=torch.ones(2, 2))
)


def refiners() -> Iterator[Bad]:
    """Every parameter of every refiner and corrector that a configuration may name, by class and by configuration."""
    offered = {kind: sp.default_registry().offered(kind) for kind in ("refiner", "corrector")}
    for role, name, kind in ((role, name, kind) for role, kinds in offered.items() for name, kind in kinds.items()):
        known = [one for one in fields(kind) if one.init]
        needed = {str(one.alias): 1 for one in known if one.default is NOTHING}
        for one in known:
            for word, value in strange(*_right(one)):
                given, said = {**needed, str(one.alias): value}, f"{one.alias} is {printed(value)}"
                yield Bad(f"{kind.__name__}({one.alias}={word})", said, partial(kind, **given))
                stage = {"name": name, **given}
                table = {"method": "streaming", **({role: stage} if role == "corrector" else {"refiners": [stage]})}
                run = partial(sp.from_config, table)
                at = "corrector" if role == "corrector" else "refiners[0]"
                yield Bad(f"from_config({name}.{one.alias}={word})", f"{at}.{said}", run)


def methods() -> Iterator[Bad]:
    """Every parameter of every method, by `build` and by configuration; names that are none."""
    for name, method in sp.default_registry().methods().items():
        for one in fields(method.config):
            if not one.init:
                continue
            field = str(one.alias)
            for word, value in strange(*_right(one)):
                said = field if field in TABLED else f"{field} is {printed(value)}"
                yield Bad(f"build({name}, {field}={word})", said, partial(sp.build, name, **{field: value}))
        for field in ("bogus", "", "self"):
            yield Bad(f"build({name}, {field}=1)", field, partial(sp.build, name, **{field: 1}))
    for word, value in strange():
        yield Bad(f"build({word})", "name", partial(sp.build, value))
        if word != "nothing":
            yield Bad(f"build(profile={word})", "profile", partial(sp.build, "streaming", profile=value))
            yield Bad(
                f"build(gate={word})",
                "gate" if word not in ("text", "empty text") else "table",
                partial(sp.build, "streaming", gate=value),
            )


TABLED = ("anchors", "clusters", "inner")
"""Parameters that take a table, of which the error names a part, or a type."""


def _right(one: Any) -> tuple[str, ...]:
    """Strange values that a parameter's own check takes: of its type, and within its bounds."""
    kind, check = str(one.type), str(getattr(one.validator, "__doc__", ""))
    right = ["nothing"] if "None" in kind or "none" in check or one.name in ("clusters", "inner") else []
    if "bool" in kind and "int" not in kind:
        return (*right, "bool")
    for name, value in STRANGE.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and one.validator is not None and ("float" in kind or isinstance(value, int)):
            try:
                one.validator(None, one, value)
            except sp.SparsePrefillError:
                continue
            right.append(name)
    return tuple(dict.fromkeys(right))


def pipelines() -> Iterator[Bad]:
    """Pipeline, Route, Session, Method, UnionEstimator."""
    streaming = sp.build("streaming")
    right: dict[str, tuple[str, ...]] = {
        **{"estimator": (), "executor": (), "refiners": ("list", "table"), "observers": ("list", "table")},
        "name": ("text", "empty text"),
        "workspace": ("nothing",),
    }
    for field, fine in right.items():
        for word, value in strange(*fine):
            run = partial(sp.Pipeline, **{"estimator": streaming.estimator, field: value})
            yield Bad(f"Pipeline({field}={word})", field, run)
    for word, value in strange():
        yield Bad(f"UnionEstimator({word})", "part 0", partial(sp.UnionEstimator, value))
        if word not in ("text", "empty text"):
            yield Bad(f"Route(name={word})", "name", partial(sp.Route, value, (streaming,)))
        yield Bad(f"Route(pipelines={word})", "pipelines", partial(sp.Route, "r", value))
        if word != "nothing":
            yield Bad(f"Route(gate={word})", "gate", partial(sp.Route, "r", (streaming,), gate=value))
            yield Bad(f"Route(profile={word})", "profile", partial(sp.Route, "r", (streaming,), profile=value))
            yield Bad(f"gated({word})", "", partial(sp.gated, streaming, value))
            yield (
                Bad(f"Session(layers={word})", "layers", partial(session, streaming, layers=value))
                if word not in ("set",)
                else BAD_LAYERS
            )
            if word not in ("class", "function"):
                yield Bad(f"Session(observe={word})", "observe", partial(Session, streaming, observe=value))
        if word not in LARGE:
            yield Bad(f"Session(min_query={word})", "min_query", partial(session, streaming, min_query=value))
        if word != "zero":
            yield Bad(f"Session(tail={word})", "tail", partial(session, streaming, tail=value))
            yield Bad(f"with_tail({word})", "tail", partial(streaming.with_tail, value))
        if word != "zero":
            yield Bad(f"Session(recall_every={word})", "recall_every", partial(session, streaming, recall_every=value))
        if word not in ("nothing", "zero"):
            wrong = partial(session, streaming, strict_recall=value)
            yield Bad(f"Session(strict_recall={word})", "strict_recall", wrong)
        yield Bad(f"Session({word})", "pipeline", partial(Session, value))
        if word != "text":
            yield Bad(f"Method(name={word})", "name", partial(_method, name=value))
        yield Bad(f"Method(config={word})", "config", partial(_method, config=value))
        if word not in ("class", "function"):
            yield Bad(f"Method(build={word})", "build", partial(_method, build=value))


BAD_LAYERS = Bad("Session(layers=['x'])", "layers", lambda: session(sp.build("streaming"), layers=["x"]))


def _method(**given: Any) -> sp.Method:
    like = sp.default_registry().get("streaming")
    return evolve(like, **given)


def executors() -> Iterator[Bad]:
    """Executors, asked without a pipeline; metrics."""
    plan = sp.Plan(sp.SparseMask.full(CALL, 8))
    result = sp.ReferenceExecutor().execute(CALL, plan)
    for executor in (sp.ReferenceExecutor(), sp.AutoExecutor()):
        kind = type(executor).__name__
        for word, value in strange():
            for verb in ("execute", "accumulate"):
                yield Bad(f"{kind}.{verb}({word}, plan)", "call", partial(getattr(executor, verb), value, plan))
                yield Bad(f"{kind}.{verb}(call, {word})", "plan", partial(getattr(executor, verb), CALL, value))
    others: dict[str, Any] = {
        "window": 5,
        "starts": torch.tensor([0, 3], dtype=torch.int32),
        "q": Q[:, :, :9],
    }
    for field, value in others.items():
        other = evolve(CALL, **{field: value})
        for one in (sp.ReferenceExecutor(), sp.CpuExecutor(), sp.AutoExecutor()):
            kind = type(one).__name__
            for verb in ("execute", "accumulate"):
                yield Bad(
                    f"{kind}.{verb}(call, plan of another {field})",
                    "plan",
                    partial(getattr(one, verb), CALL, sp.Plan(sp.SparseMask.full(other, 8))),
                )
    far = CALL.q.to("meta")
    yield Bad("output_error(x, other device)", "truth", partial(sp.output_error, CALL.q, far))
    yield Bad(
        "recall(result of another device)",
        "result",
        partial(sp.recall, CALL, evolve(result, lse=result.lse.to("meta"))),
    )
    outside: list[Any] = [[-1], [0, -20], [20], [0.5], [True]]
    for rows in outside:
        yield Bad(f"recall(rows={rows})", "rows", partial(sp.recall, CALL, result, rows))
    for word, value in strange():
        yield Bad(f"recall({word}, result)", "call", partial(sp.recall, value, result))
        yield Bad(f"recall(call, {word})", "result", partial(sp.recall, CALL, value))
        if word not in ("nothing", *LARGE):  # more rows than there are mean all
            yield Bad(f"recall(rows={word})", "rows", partial(sp.recall, CALL, result, value))
        yield Bad(f"output_error({word}, x)", "out", partial(sp.output_error, value, CALL.q))
        if word not in ("nothing", "zero"):
            yield Bad(f"AutoExecutor(precision={word})", "precision", partial(sp.AutoExecutor, precision=value))
        yield Bad(f"output_error(x, {word})", "truth", partial(sp.output_error, CALL.q, value))


def configurations() -> Iterator[Bad]:
    """from_config: each key of each table."""
    right = {
        **{"method": (), "union": (), "parameters": ("table",), "name": ("text",), "gate": ()},
        **{"refiners": ("list",), "profile": ()},
    }
    for field, fine in right.items():
        for word, value in strange(*fine):
            table = {field: value} if field == "union" else {"method": "streaming", field: value}
            yield Bad(f"from_config({field}={word})", field, partial(sp.from_config, table))
            yield Bad(f"from_config(union[0].{field}={word})", field, partial(sp.from_config, {"union": [table]}))
    for word, value in strange("text", "empty text"):
        yield Bad(f"from_config({word})", "configuration", partial(sp.from_config, value))
        yield Bad(f"from_config(key {word})", "key", partial(_keyed, value))


def _keyed(value: Any) -> object:
    try:
        table = {"method": "streaming", value: 1}
    except TypeError:  # cannot be a key at all
        raise sp.ParameterError("the key cannot be hashed: pass names") from None
    return sp.from_config(table)


def files(folder: Path) -> Iterator[Bad]:
    """The loaders: paths that are none, contents that are none, and each leaf of a good file made bad."""
    table = shipped(DeviceKind(type="cuda", capability=(9, 0)))
    assert table is not None
    small = evolve(table, shapes=(evolve(table.shapes[0], points=table.shapes[0].points[:1]),))
    model = {"name": "m", "architecture": "M", "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "digest": "0"}
    first = {"from": 0, "tokens": 1, "method": "streaming", "parameters": {"block": 16}, "dense_layers": []}
    profile = {
        **{"schema": "sparseprefill.profile", "version": 2, "methods": ["streaming"], "model": model},
        **{"break_even": None, "versions": {}, "tuned": {}, "ranges": [{**first, "measured": {}}]},
    }
    clusters = {
        **{"schema": "sparseprefill.clusters", "version": 1, "model": model, "clusters": [[[0, 0]]]},
        **{"noise": [[0, 1]], "made": {}},
    }
    layers = {
        **{"schema": "sparseprefill.anchors", "version": 1, "model": {**model, "layers": 3}},
        **{"anchors": [0, 2], "maps": {"1": [0]}, "made": {}},
    }
    loaders: dict[str, tuple[Callable[[Any], object], Any]] = {
        "BreakEven.load": (sp.BreakEven.load, json.loads(small.to_json())),
        "Profile.load": (sp.Profile.load, profile),
        "clusters.load": (CLUSTERS.read, clusters),
        "anchors.load": (ANCHORS.read, layers),
    }
    texts = {
        **{
            "nothing": b"",
            "no JSON": b"{",
            "a list": b"[]",
            "a number": b"1",
            "null": b"null",
            "nested": b"[" * 100000,
        },
        **{"long integer": b"1" * 5000, "UTF-16": b"\xff\xfe{}", "zero byte": b"\0", "no table": b'{"a": 1}'},
        **{"key twice": b'{"schema": 1, "schema": 2}', "inner key twice": b'{"model": {"a": 1, "a": 1}}'},
    }
    endless = (_pipe(folder), Path("/dev/zero"), _large(folder))
    for name, (load, good) in loaders.items():
        for word in ("nowhere.json", "a\0b", "", "."):
            yield Bad(f"{name}({word!r})", "", partial(load, word))
        for word, content in texts.items():
            yield Bad(f"{name}(file of {word})", "", partial(load, _written(folder, content)))
        for file in endless:
            yield Bad(f"{name}({file.name})", "", partial(load, file))
        for path in _leaves(good):
            for word, value in (*strange("tensor", "bool tensor"), ("not a table", 3.5)):
                if word in ("bytes", "complex", "set", "object", "class", "function", "unprintable"):
                    continue
                if word == "zero" and "capability" in path[-2:-1]:
                    continue
                if path[-1] in FREE or word in RIGHT_IN_FILES.get(path[-1], ()):
                    continue
                text = _changed(good, path, value)
                if text is not None:
                    at = "" if word == "longer than Python writes" else _said(path, value)  # no reader gets as far
                    yield Bad(f"{name}({path}={word})", at, partial(load, _written(folder, text)))
    for suffix in (".toml", ".json"):
        for word, content in texts.items():
            if suffix == ".toml" and word == "nothing":
                continue
            yield Bad(
                f"from_config({suffix} of {word})", "", partial(sp.from_config, _written(folder, content, suffix))
            )


FREE = ("versions", "measured", "tuned", "made", "methods", "executor", "noise", "parameters", "block")
"""Parts of files that may hold more than one kind of thing; what is within them has tests of its own."""
RIGHT_IN_FILES: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(("name", "architecture", "digest", "method"), ("text", "empty text")),
    "maps": ("table",),
    **{"model": ("nothing",), "capability": ("nothing",), "type": ("text", "empty text")},
}
NUMBERS = ("dense", "seconds", "estimate", "density")


def _leaves(facts: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    if at and at[-1] in FREE:
        return
    inner = facts.items() if isinstance(facts, dict) else enumerate(facts) if isinstance(facts, list) else ()
    for key, value in inner:
        yield from _leaves(value, (*at, key))


def _said(path: tuple[Any, ...], value: Any) -> str:
    """What an error must say: the whole path and the value; of what is read by parts, the name of the whole."""
    if value in ([], {}) or path[0] in ("anchors", "clusters") or "capability" in path:
        return str([part for part in path if isinstance(part, str) and not part.isdecimal()][-1])
    where = "".join(f"[{part}]" if str(part).isdecimal() else f".{part}" for part in path).removeprefix(".")
    return f"{where} is {printed(value)}"


def _changed(good: Any, path: tuple[Any, ...], value: Any) -> bytes | None:
    copy = json.loads(json.dumps(good))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if type(inner[path[-1]]) is type(value) and inner[path[-1]] == value:
        return None
    if path[-1] in NUMBERS and value in (1.5, 3.5):
        return None  # a number of seconds
    inner[path[-1]] = value
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(copy).encode()
    finally:
        sys.set_int_max_str_digits(limit)


def _written(folder: Path, content: bytes, suffix: str = ".json") -> Path:
    path = folder / f"{len(list(folder.iterdir()))}{suffix}"
    path.write_bytes(content)
    return path


def _pipe(folder: Path) -> Path:
    """Nobody ever writes to it."""
    path = folder / "pipe.json"
    os.mkfifo(path)
    return path


def _large(folder: Path) -> Path:
    """More than any file of the library has; it takes no room."""
    path = folder / "large.json"
    with path.open("wb") as file:
        file.truncate(structure.MOST + 1)
    return path


def everything(folder: Path) -> list[Bad]:
    """All of them. folder: where files may be written."""
    made = (
        calls(),
        pages(),
        masks(),
        scores(),
        refiners(),
        methods(),
        pipelines(),
        executors(),
        configurations(),
        files(folder),
    )
    return [bad for part in made for bad in part]


def outcome(bad: Bad) -> Outcome:
    """Try one."""
    try:
        bad.run()
    except sp.SparsePrefillError as error:
        said = str(error)
        good = bad.field in said and any(word in said for word in REMEDIES)
        return Outcome(bad, "ours" if good else "vague", said)
    except Exception as error:  # whatever the library lets through is what is looked for
        try:
            return Outcome(bad, "others", f"{type(error).__name__}: {error}")
        except Exception:  # the error cannot be printed
            return Outcome(bad, "others", type(error).__name__)
    return Outcome(bad, "accepted")


REMEDIES = (
    *("pass", "use ", "give", "must ", "move ", "Known: ", "put ", "unite ", "needs it", "leave it out", "reads '"),
    *("calibrate again", "keys are names", "there is no", "there are ", "is made for", "sparseprefill "),
    *("is missing", "reads 1", "or None", "remove ", "add it to one"),
)
"""Words with which messages say what would do."""


def main() -> int:
    """Print the counts, and what was not an error of ours."""
    with tempfile.TemporaryDirectory() as folder:
        found = [outcome(bad) for bad in everything(Path(folder))]
    for one in found:
        if one.kind != "ours":
            sys.stdout.write(f"{one.kind}: {one.bad.what}  {one.said[:160]}\n")
    counts = Counter(one.kind for one in found)
    shown = ", ".join(f"{kind}: {n}" for kind, n in counts.most_common())
    sys.stdout.write(f"bad inputs tried: {len(found)}; {shown}\n")
    return 0 if set(counts) == {"ours"} else 1


if __name__ == "__main__":
    sys.exit(main())
