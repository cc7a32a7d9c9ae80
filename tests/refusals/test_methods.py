"""What methods refuse: names and parameters of `build`, tables that do not fit, and declarations of methods.

Values that no parameter of their type takes are in `helpers.bad_inputs`, for every parameter.
"""

from __future__ import annotations

import json
import math
from typing import Any, cast

import torch
from attrs import asdict, evolve, frozen
from sparseprefill.plugins.share_prefill.table import ClusterTable

import sparseprefill as sp
from helpers.build import make
from helpers.refusals import Refusal, over, parameter_error, refused, stage_error, unknown_method, unsupported
from helpers.registry_plugins import Config, method
from helpers.stubs import Observe
from sparseprefill.method import Method
from sparseprefill.profiles.identity import ModelIdentity

TINY = ModelIdentity(name="tiny", architecture="Tiny", layers=2, heads=2, kv_heads=1, head_dim=8, digest="0123")
MODEL = asdict(TINY)
CLUSTERS = ClusterTable(clusters=(((0, 0), (1, 0)),), noise=((0, 1), (1, 1)), model=TINY)


def anchors(**fields: Any) -> dict[str, Any]:
    """The parameters of kascade with a table, good but for these fields."""
    good = {"schema": "sparseprefill.anchors", "version": 1, "anchors": [0], "maps": {"1": [0, 1]}}
    return {"anchors": {**good, **fields}}


def clusters(**fields: Any) -> dict[str, Any]:
    """The parameters of share-prefill with a table, good but for these fields."""
    return {"clusters": {**json.loads(CLUSTERS.to_json()), **fields}}


# What `build` refuses: a method, parameters, and the words.
PARAMETERS: list[tuple[str, dict[str, Any], str]] = [
    ("dense", {"block": 0}, "block is 0: pass an integer from 1 to 8192"),
    ("dense", {"block": -16}, "block is -16: pass an integer from 1 to 8192"),
    ("dense", {"block": 2.0}, "block is 2.0: pass an integer from 1 to 8192"),
    *((name, {"block": 8320}, "block is 8320: pass an integer from 1 to 8192") for name in ("dense", "rowmax", "bfla")),
    ("streaming", {"sink": -1}, "sink is -1: pass an integer >= 0"),
    ("streaming", {"windw": 3}, r"streaming has no parameter 'windw'; did you mean 'window'\? Known: block"),
    ("streaming", {"self": 1}, "streaming has no parameter 'self'"),
    ("vertical-slash", {"gamma": 1.5}, "gamma is 1.5: pass a number from 0 to 1"),
    ("anchor-attention", {"init_tokens": "128"}, "init_tokens is '128'"),
    ("anchor-attention", {"use_anchor": 1}, "use_anchor is 1: pass True or False"),
    ("bfla", {"block": 100, "group": 64}, "group is 64: block 100"),
    ("bfla", {"block": 64, "group": 64}, "tile is 128: block 64"),
    ("bfla", {"score_norm": "max"}, "score_norm is 'max': pass 'sum' or 'mean'"),
    ("bfla", {"seed": 2**63}, "seed is"),
    ("flexprefill", {"coverage": "map"}, "coverage is 'map': pass 'row' or 'global'"),
    ("flexprefill", {"max_budget": 512}, "max_budget is 512: pass at least min_budget, 1024, or None"),
    ("rowmax", {"block": 100, "every": 8}, "block is 100: pass a multiple of every, 8"),
    ("rowmax", {"every": 3}, "block is 128: pass a multiple of every, 3"),
    ("rowmax", {"every": 0}, "every is 0: pass an integer >= 1"),
    ("rowmax", {"eps": 1.5}, r"eps is 1\.5: pass a number from 0 to 1"),
    ("rowmax", {"union": "all"}, "union is 'all': pass 'head' or 'group'"),
    ("rowmax", {"precision": "int4"}, "precision is 'int4': pass 'auto' or 'exact' or 'fp8'"),
    ("rowmax", {"sink": 1}, "sink is 1: pass True or False"),
    ("sample-attention", {"alpha_c": 1.5}, "alpha_c is 1.5: pass a number from 0 to 1"),
    ("sample-attention", {"chunk_n": 0}, "chunk_n is 0: pass an integer >= 1"),
    ("sample-attention", {"block": 16.0}, "block is 16.0"),
    ("sample-attention", {"extend": "all"}, "extend is 'all': pass 'chunk' or 'union'"),
    ("skip-softmax", {"skip_below": -1}, "skip_below is -1: pass a number from 0"),
    ("star-attention", {"block_size": 0}, "block_size is 0: pass an integer >= 1"),
    ("star-attention", {"anchor_length": -1}, "anchor_length is -1: pass an integer >= 0"),
    ("star-attention", {"context_length": 1.5}, "context_length is 1.5: pass a number of tokens"),
    ("star-attention", {"inner": 3}, "inner is 3: pass a method's name"),
    (
        "star-attention",
        {"inner": {"method": "dense", "parameters": {"block": 0}}},
        "inner.parameters.block is 0",
    ),
    (
        "star-attention",
        {"inner": {"method": "streaming", "refiners": [{"name": "skip-softmax", "below": 20.0}]}},
        "inner: streaming skips tiles while its plan is executed",
    ),
    ("xattention", {"block": 100}, "block is 100: pass a multiple of stride, 16"),
    ("share-prefill", {"gamma": 2}, "gamma"),
    ("share-prefill", {"inner": 3}, "inner is 3: pass a method's name"),
    ("share-prefill", {"inner": sp.SparseMask}, "inner is .*SparseMask"),
    (
        "share-prefill",
        {"inner": {"method": "streaming", "parameters": {"sink": -1}}},
        "inner.parameters.sink is -1",
    ),
    (
        "share-prefill",
        {"inner": evolve(sp.build("streaming"), observers=(Observe(),))},
        r"inner: streaming remembers .*\(Observe\), and some of the heads it would see here ran another pattern",
    ),
    ("share-prefill", {"inner": "share-prefill"}, r"inner: share-prefill remembers"),
    ("share-prefill", {"inner": sp.build("share-prefill").estimator}, "inner is a Share itself"),
    ("kascade", {"anchors": []}, "anchors is empty"),
    ("kascade", {"anchors": [2, 0]}, r"anchors is \[2, 0\]: pass ascending"),
    ("kascade", {"anchors": [0, "1"]}, r"anchors\[1\] is \'1\': pass an integer from 0"),
    ("kascade", {"anchors": 3}, "anchors is 3: pass a path"),
    ("kascade", {"anchors": "nowhere.json"}, "anchors is 'nowhere.json': No such file"),
    ("kascade", anchors(version=2), "version is 2"),
    ("kascade", anchors(more=2), "more is unknown"),
    ("kascade", anchors(maps=[1]), "maps is"),
    ("kascade", anchors(maps={"x": [1]}), "the key 'x'"),
    ("kascade", anchors(maps={"01": [1]}), "the key '01'"),
    ("kascade", anchors(maps={"0": [1]}), r"maps\[0\] is of a layer that follows no anchor"),
    ("kascade", anchors(maps={"1": []}), r"maps\[1\] is \[\]"),
    ("kascade", anchors(model=MODEL, anchors=[0, 9]), "layer 9 does not exist"),
    ("kascade", anchors(model={**MODEL, "kv_heads": 2}, maps={"1": [0, 2]}), r"maps\[1\] is \[0, 2\]"),
    ("share-prefill", clusters(schema="other"), "schema is 'other'"),
    ("share-prefill", clusters(version=2), "version is 2"),
    ("share-prefill", clusters(model={"name": "x"}), "model.architecture is missing"),
    ("share-prefill", clusters(model={**MODEL, "name": 3}), "model.name is 3"),
    ("share-prefill", clusters(clusters=[[[0, 0], [1, 7]]]), r"clusters\[0\]: layer 1, head 7 does not exist"),
    ("share-prefill", clusters(clusters=[[[0, 0]]]), "layer 1, head 0 is neither in a cluster"),
    ("share-prefill", clusters(noise=[[0, 0], [0, 1], [1, 1]]), r"noise: layer 0, head 0 is in clusters\[0\] already"),
    ("share-prefill", clusters(clusters=[[[0, 0], [1, math.nan]]]), r"clusters\[0\]\[1\]\[1\] is nan"),
    ("share-prefill", clusters(clusters=[[[0, 0], [1, 0]], []]), r"clusters\[1\] is empty"),
    ("share-prefill", clusters(clusters=None), "clusters is None"),
    ("share-prefill", clusters(noise=3), "noise is 3"),
    ("share-prefill", clusters(made=3), "made is 3"),
    ("share-prefill", clusters(more=3), "more is unknown"),
    ("share-prefill", {"clusters": {(0, 0): math.nan}}, r"clusters\[\(0, 0\)\] is nan"),
    ("share-prefill", {"clusters": {(0, "a"): 1}}, r"\(0, 'a'\)"),
    ("share-prefill", {"clusters": 7}, "clusters is int"),
    ("share-prefill", {"clusters": "nowhere.json"}, "nowhere.json.*No such file"),
]

OF_ANOTHER_MODEL = "another model: model.digest is '0123.*sparseprefill cluster"
SHARED = sp.build("share-prefill", clusters=CLUSTERS)
WIDE = sp.AttentionCall(*(torch.zeros(1, heads, 40, 16) for heads in (2, 1, 1)))
CALLS = [
    unsupported("model.heads is 2 .tiny., the call has 4", SHARED.run, make(heads=4)),
    unsupported("model.kv_heads is 1 .tiny., the call has 2", SHARED.run, make(kv_heads=2)),
    unsupported("model.layers is 2 .tiny., the call is of layer 2", SHARED.run, make(layer=2)),
    unsupported(
        "model.head_dim is 8 .tiny., the call has 16",
        SHARED.run,
        WIDE,
    ),
    parameter_error(OF_ANOTHER_MODEL, SHARED.check_model, evolve(TINY, digest="other")),
    unsupported("sparseprefill cluster --model PATH", sp.build("share-prefill").run, make()),
    unsupported("sparseprefill anchors --model PATH", sp.build("kascade").run, make()),
    unsupported("sliding window", sp.build("kascade", anchors=[0]).run, make(window=8)),
    unsupported("sliding window", sp.build("star-attention", inner="dense").run, make(window=8)),
    unsupported(r"AnchorEstimator: a sliding window \(5 keys\)", sp.build("anchor-attention").run, make(window=5)),
    unsupported(
        r"precision='fp8' needs .* not torch.float64 on cpu: pass 'auto'",
        *(sp.build("rowmax", precision="fp8").run, make(dtype=torch.float64)),
    ),
]

NAMES = [
    unknown_method(
        r"'anchor-atention'; did you mean 'anchor-attention'.*\? Known: .*dense", sp.build, "anchor-atention"
    ),
    refused(LookupError, r"'zzz'\. Known: ", sp.build, "zzz"),
    *(
        unknown_method(r"name is .*: pass the name of a method.*Known: .*dense", sp.build, name)
        for name in cast(tuple[Any, ...], (["dense"], None, {}, 3))
    ),
    parameter_error("streaming has no parameter 'self'", sp.default_registry().build, "streaming", self=1),
    unknown_method("inner.method: .*'anchor-attention'", sp.build, "star-attention", inner="anchor-atention"),
    unknown_method("inner.method: .*'xattention'", sp.build, "share-prefill", inner="xatention"),
]


@frozen(kw_only=True)
class Bounded:
    size: int = 1

    def __attrs_post_init__(self) -> None:
        if self.size > 9:
            raise ValueError("too large")


@frozen(kw_only=True)
class WithRecall:
    recall: float = 0.5


def building(answer: Any) -> Method:
    """A method whose build returns the answer, or raises it."""

    def build(config: Config) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return method("mine", build=build)


DECLARATIONS = [
    *(
        parameter_error(r"Method\.name is .*lower-case words joined by hyphens", method, name)
        for name in ("Mine", "My-Method", "my_method", "", "-a", "-x", "x-", "a b", 3, None)
    ),
    *(
        parameter_error(r"Method\.config is .*attrs class", method, "mine", config=config)
        for config in (int, dict, Config(), None)
    ),
    parameter_error(
        r"^Method\.config has the field recall, the name of every method", method, "mine", config=WithRecall
    ),
    *(
        parameter_error(rf"Method\.{name} is .*: pass a table of parameters by name", method, "mine", **{name: value})
        for name in ("full", "small", "search")
        for value in (3, True, None, "block", ["size"], {"size"})
        if (name, value) != ("full", None)  # no parameters are known
    ),
    *(
        parameter_error(rf"Method\.{name} names .*, which Config does not have", method, "mine", **{name: value})
        for name in ("full", "small", "search")
        for value in ({"sise": [1]}, {3: [1]})
    ),
    *(
        parameter_error(
            r"Method\.search\['size'\] is .*: pass a list of values", method, "mine", search={"size": value}
        )
        for value in (3, "12", None, {1, 2})
    ),
    *(
        parameter_error(rf"Method\.{name} is 3: pass .*{words}", method, "mine", **{name: 3})
        for name, words in (("summary", "one line of text"), ("paper", "a title or a link"))
    ),
    parameter_error(r"mine\(size=10\): too large", method("mine", config=Bounded).pipeline, size=10),
    parameter_error(r"alpha\(size=0\)", method("alpha").pipeline, size=0),
    parameter_error(
        r"alpha has no parameter 'sise'; did you mean 'size'\? Known: share, size",
        method("alpha").configure,
        {"sise": 1},
    ),
    stage_error(r"mine: Method\.build\(\) raised KeyError: 'lost'", building(KeyError("lost")).pipeline),
    stage_error(r"mine: Method\.build\(\) returned NoneType: it must return Pipeline", building(None).pipeline),
    stage_error(r"mine: Method\.build\(\) returned int: it must return Pipeline", building(1).pipeline),
    stage_error(r"mine: Method\.build\(\) returned Config: it must return Pipeline", building(Config()).pipeline),
    parameter_error("size is even", building(sp.ParameterError("size is even")).pipeline),
]


@over([parameter_error(words, sp.build, name, **parameters) for name, parameters, words in PARAMETERS])
def test_parameters(refusal: Refusal) -> None:
    refusal.check()


@over([*CALLS, *NAMES, *DECLARATIONS])
def test_refused(refusal: Refusal) -> None:
    refusal.check()
