"""Jobs over several processes that talk through gloo, or through NCCL with a GPU each.

For gloo one server with torch and transformers loaded forks them all; with CUDA a process has to start by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from attrs import frozen

TESTS = Path(__file__).parents[1]
Job = Callable[..., Any]


@frozen
class Outcome:
    """What a process returned; `error` with the type of what it raised, "gone" where it ended without a word.

    seconds: that its job took. ended: `time.time()` when it returned or was gone.
    """

    value: Any = None
    error: str = ""
    seconds: float = 0.0
    ended: float = 0.0


@cache
def _server() -> Any:
    """The fork server: imports are paid once."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama", "distributed.preload"])
    return context


def run(
    job: Job,
    size: int,
    *arguments: Any,
    seconds: float = 120.0,
    stopped: Sequence[int] = (),
    device: str = "cpu",
) -> list[Outcome]:
    """``job(rank, *arguments)`` on `size` processes of one default group; what came of each.

    stopped: ranks that are not waited for, as they stop themselves; all processes are gone afterwards. device: cpu
    (gloo) or cuda (NCCL; rank r on GPU r).
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    context: Any = _server() if device == "cpu" else multiprocessing.get_context("spawn")
    processes, ends = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        given = (theirs, rank, size, store.port, device, job, arguments)
        process = context.Process(target=_work, args=given, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(mine)
    found = [Outcome(error="gone")] * size
    waited: dict[Any, int] = {ends[rank]: rank for rank in range(size) if rank not in stopped}
    until = time.monotonic() + seconds
    while waited and (ready := wait(list(waited), timeout=max(until - time.monotonic(), 0))):
        for end in cast(list[Connection], ready):
            rank = waited.pop(end)
            try:
                value, error, spent = pickle.loads(end.recv_bytes())
                found[rank] = Outcome(value, error, spent, time.time())
            except EOFError:
                found[rank] = Outcome(error="gone", ended=time.time())
    for rank in waited.values():
        found[rank] = Outcome(error="hangs")
    for process in processes:
        process.kill()
        process.join()
    return found


def _work(end: Connection, rank: int, size: int, port: int, device: str, job: Job, arguments: tuple[Any, ...]) -> None:
    import torch
    from sparseprefill.adapters.star.start import connect
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, size, is_master=False)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    connect(here, 35, store=store, rank=rank, world_size=size)
    began = time.monotonic()
    try:
        answer = (job(rank, *arguments), "", time.monotonic() - began)
    except Exception as error:
        answer = (None, f"{type(error).__name__}: {error}", time.monotonic() - began)
    end.send_bytes(pickle.dumps(answer))
    end.close()
    os._exit(0)  # collectives that others never joined would hold up an orderly end
