"""Engines with one job each, two at a time: ``python -m adapters.sglang.engine_process JOBS``.

Not a test module. SGLang is imported once: each job runs in a copy of this process, and so does what its engine starts.
It kills its processes where one fails, the job's among them, which has a session of its own.
"""

# SGLang is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from adapters.sglang.engine import USUAL

SAMPLED = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


AT_ONCE = 2
IMPORTED = ("sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager")


def main(asked: str) -> None:
    """asked: file with the jobs. An empty file with ``.done`` behind a job's name says that it ended, in any way."""
    for name in IMPORTED:
        import_module(name)
    real = multiprocessing.set_start_method

    def forked(*_: object, **__: object) -> None:
        real("fork", force=True)

    mock.patch.object(multiprocessing, "set_start_method", forked).start()
    running: dict[int, str] = {}

    def stop(*_: object) -> None:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)

    def ended() -> None:
        pid, _ = os.waitpid(-1, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it left behind
        Path(f"{running.pop(pid)}.done").touch()

    for name, variables in json.loads(Path(asked).read_text()).items():
        if len(running) == AT_ONCE:
            ended()
        pid = os.fork()
        if not pid:
            alone(name, variables)
        running[pid] = name
    while running:
        ended()


def alone(name: str, variables: dict[str, str]) -> None:
    """A job in a session and with a log of its own; the process ends behind it."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(f"{name}.log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(variables)
    try:
        run(f"{name}.job.json", f"{name}.answer.json")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run(asked: str, answered: str) -> None:
    """Run the turns of a job: lists of requests that come at once, one that goes on with what the last one was asked
    and answered, or one that is aborted."""
    job = json.loads(Path(asked).read_text())
    given = {**USUAL, "prefill_attention_backend": "sparseprefill", **job.get("engine", {})}
    engine = import_module("sglang").Engine(model_path=job["model"], skip_tokenizer_init=True, **given)
    turns, said = list[Any](), list[int]()
    for turn in job["turns"]:
        if "abort" in turn:
            turns.append(_abort(engine, turn["abort"]))
            continue
        prompts = [[*said, *turn["follow"]]] if "follow" in turn else turn["prompts"]
        turns.append(_ask(engine, {**turn, "prompts": prompts}))
        if isinstance(turns[-1], list):
            said = [*prompts[-1], *turns[-1][-1]["tokens"]]
    states = engine.get_server_info()["internal_states"]
    found = {"turns": turns, "reports": [one for state in states for one in state.get("sparseprefill", [])]}
    Path(answered).write_text(json.dumps(found))
    engine.shutdown()


def _ask(engine: Any, turn: dict[str, Any]) -> Any:
    """turn: `prompts`, and what they ask for (`asks`, custom parameters of each). `mixed`: without log probabilities,
    which SGLang never computes while prompts share a batch with rows that decode."""
    told = not turn.get("mixed")
    asks = turn.get("asks") or [None] * len(turn["prompts"])
    params = [{**SAMPLED, **turn.get("params", {}), **({"custom_params": one} if one else {})} for one in asks]
    try:
        found = engine.generate(input_ids=turn["prompts"], sampling_params=params, return_logprob=told)
    except ValueError as error:
        return {"error": str(error)}
    return [
        {
            "tokens": one["output_ids"],
            "logprobs": [step[0] for step in one["meta_info"].get("output_token_logprobs", [])],
            "cached": one["meta_info"]["cached_tokens"],
        }
        for one in found
    ]


def _abort(engine: Any, prompt: list[int]) -> Any:
    """Abort a request while its prompt is computed; how it ended, and how many prefills were in progress after it."""

    async def attempt(rid: str, wait: float) -> Any:
        running = asyncio.ensure_future(engine.async_generate(input_ids=prompt, sampling_params=SAMPLED, rid=rid))
        await asyncio.sleep(wait)
        engine.tokenizer_manager.abort_request(rid)
        return await running

    found, ended = dict[str, Any](), dict[str, Any]()
    for n in range(8):
        found = engine.loop.run_until_complete(attempt(f"abort-{n}", 0.02 * (n + 1)))
        ended = found["meta_info"]["finish_reason"]
        if ended["type"] == "abort" and not found["output_ids"]:
            break
        prompt = [2 + (one + n) % 250 for one in prompt]  # nothing of it is in the prefix cache
    until, left = time.monotonic() + 60, None
    while left != 0 and time.monotonic() < until:  # the scheduler hears of it between two steps
        time.sleep(0.2)
        state = engine.get_server_info()["internal_states"][0].get("sparseprefill")
        left = state and state[0]["in_progress"]
    return {"ended": ended["type"], "tokens": found["output_ids"], "in_progress": left}


if __name__ == "__main__":
    main(sys.argv[1])
