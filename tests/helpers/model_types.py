"""Counts model types: `python -m helpers.model_types` (from tests/) attaches a tiny model of each in transformers.

Every type of causal language model is built with random weights, attached with the full mask, and compared with itself:
logits of a plain and of a left-padded batch, and a greedy continuation. Then it runs once with a sparse mask. A type is

- equal;
- refused, with the adapter's reason;
- not built: no rule makes it small, or its stock model does not run;
- one that differs or fails, which is a bug of ours.

`--json` prints all that is known of each type instead of the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import torch
from attrs import asdict, field, frozen

import sparseprefill as sp

from .tiny import model_of

State = Literal["equal", "refused", "not built", "differs", "failed"]
TOKENS, CONTINUED = 90, 4
TOLERANCE = 1e-4
"""Relative norm of the difference in logits, float32."""
STREAMING: dict[str, Any] = {"sink": 16, "window": 16, "block": 16}


@frozen
class Found:
    """What became of one type. error: relative norm in the logits. layers: how the layers ran under the full mask;
    sparse: the same under the sparse mask. why: the reason, where it is not equal. seconds: of all together."""

    model_type: str
    state: State
    why: str = ""
    model: str = ""
    implementation: str = ""
    error: float | None = None
    layers: dict[str, int] = field(factory=dict)
    sparse: dict[str, int] = field(factory=dict)
    seconds: float = 0.0


def model_types() -> list[str]:
    """Every type that transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def inputs_of(model: Any) -> dict[str, Any]:
    """Random text of two rows, the second left-padded, with the model's own idea of which ids are text."""
    from sparseprefill.adapters.huggingface.inspection import allowed_ids

    low, high = allowed_ids(model.config)
    ids = torch.randint(max(low, 3), high, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def outputs(model: Any) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Logits of the real tokens of a plain and of a padded batch, and a greedy continuation where there is one."""
    inputs = inputs_of(model)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    plain = model(input_ids=ids[:1], use_cache=False).logits
    padded = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logits = [plain.float(), padded[mask.bool()].float() if padded.shape[:2] == mask.shape else padded.float()]
    return logits, _continued(model, inputs)


def _continued(model: Any, inputs: dict[str, Any]) -> torch.Tensor | None:
    options = {"max_new_tokens": CONTINUED, "min_new_tokens": CONTINUED, "do_sample": False, "pad_token_id": 0}
    try:
        found: torch.Tensor = model.generate(**inputs, **options)
    except sp.SparsePrefillError:
        raise
    except Exception:  # some have no generation of their own
        return None
    return found


def modes(handle: Any) -> dict[str, int]:
    """How many layers ran how, last."""
    return dict(sorted(Counter(layer.mode for layer in handle.report().layers).items()))


def examine(model_type: str, implementation: str | None = None) -> Found:
    """Build, attach, compare."""
    from sparseprefill.adapters.huggingface import attach

    try:
        model = model_of(model_type, implementation)
        wanted, continued = outputs(model)
        if not all(bool(torch.isfinite(x).all()) for x in wanted):
            return Found(model_type, "not built", "its stock logits are not finite", type(model).__name__)
    except Exception as error:
        return Found(model_type, "not built", told(error))
    about: dict[str, Any] = {"model": type(model).__name__, "implementation": str(model.config._attn_implementation)}
    try:
        with attach(model, "dense", block=32, gate=None) as handle:
            got, goes_on = outputs(model)
            about["implementation"] = handle.report().implementation
        about["layers"] = modes(handle)
        with attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle:
            sparse, _ = outputs(model)
        about["sparse"] = modes(handle)
    except sp.AttachError as error:
        return Found(model_type, "refused", told(error, shown=False), **about)
    except Exception as error:
        return Found(model_type, "failed", told(error), **about)
    apart = max(relative(a, b) for a, b in zip(got, wanted, strict=True))
    about["error"] = apart
    if not apart <= TOLERANCE:
        return Found(model_type, "differs", f"logits differ by {apart:.2g}", **about)
    if continued is not None and not (goes_on is not None and torch.equal(continued, goes_on)):
        return Found(model_type, "differs", "another greedy continuation", **about)
    if not all(bool(torch.isfinite(x).all()) for x in sparse):
        return Found(model_type, "differs", "the sparse run's logits are not finite", **about)
    if about["sparse"].get("sparse") and max(relative(a, b) for a, b in zip(sparse, wanted, strict=True)) < 1e-6:
        return Found(model_type, "differs", "a sparse mask changes nothing: it did not reach the model", **about)
    return Found(model_type, "equal", **about)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def told(error: BaseException, *, shown: bool = True) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if shown else text


def _child(send: Any, model_type: str, implementation: str | None, memory: int) -> None:
    os.dup2(2, 1)  # what models print is no part of the table
    resource.setrlimit(resource.RLIMIT_AS, (memory << 30, memory << 30))
    start = time.perf_counter()
    found = examine(model_type, implementation)
    send.send({**asdict(found), "seconds": round(time.perf_counter() - start, 1)})


def apart(model_type: str, implementation: str | None = None, limit: float = 120.0, memory: int = 24) -> Found:
    """The same in a process of its own, which ends after `limit` seconds, or at `memory` GiB of address space."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, model_type, implementation, memory), daemon=True)
    process.start()
    send.close()
    try:
        if not receive.poll(limit):
            return Found(model_type, "not built", f"took more than {limit:g} s", seconds=limit)
        return Found(**receive.recv())
    except EOFError:
        process.join()
        return Found(model_type, "failed", f"its process ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def summary(found: Iterable[Found]) -> dict[str, int]:
    """How many types are how."""
    count = Counter(one.state for one in found)
    return {state: count[state] for state in ("equal", "refused", "not built", "differs", "failed")}


def table(found: Iterable[Found]) -> str:
    """Markdown: a row a type, the equal ones last, then the totals."""
    order = {"differs": 0, "failed": 1, "refused": 2, "not built": 3, "equal": 4}
    rows = sorted(found, key=lambda one: (order[one.state], one.model_type))
    lines = ["| type | state | full mask | sparse mask | why |", "|---|---|---|---|---|"]
    for one in rows:
        ran = (", ".join(f"{n} {mode}" for mode, n in layers.items()) for layers in (one.layers, one.sparse))
        lines.append(f"| {one.model_type} | {one.state} | {' | '.join(ran)} | {one.why.replace('|', '/')} |")
    totals = ", ".join(f"{n} {state}" for state, n in summary(rows).items())
    return "\n".join([*lines, "", f"{len(rows)} types: {totals}"])


def main(arguments: list[str] | None = None) -> int:
    """The command; exit status 1 where a type differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="types to examine; all where none is named")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a type")
    parser.add_argument("--implementation", choices=("sdpa", "eager"), help="the stock model's; its own choice else")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each type")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # processes are forked, and threads of a parent do not survive that
    from transformers import logging

    logging.set_verbosity_error()
    found = []
    for name in given.types or model_types():
        found.append(apart(name, given.implementation, given.limit))
        print(f"{name}: {found[-1].state} {found[-1].why}", file=sys.stderr, flush=True)  # noqa: T201
    print(json.dumps([asdict(one) for one in found], indent=1) if given.json else table(found))  # noqa: T201
    counts = summary(found)
    return 1 if counts["differs"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
