"""Jobs over several processes that talk through gloo: one server with torch and transformers loaded forks them all."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from attrs import frozen

TESTS = Path(__file__).parents[1]
Job = Callable[..., Any]


@frozen
class Outcome:
    """What a process returned; `error` with the type of what it raised, "gone" where it ended without a word."""

    value: Any = None
    error: str = ""
    seconds: float = 0.0


@cache
def _server() -> Any:
    """The fork server: imports are paid once."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama", "distributed.preload"])
    return context


def run(job: Job, size: int, *arguments: Any, seconds: float = 120.0, stopped: Sequence[int] = ()) -> list[Outcome]:
    """``job(rank, *arguments)`` on `size` processes of one default group; what came of each.

    stopped: ranks that are not waited for, as they stop themselves; all processes are gone afterwards.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    context, processes, ends = _server(), [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, rank, size, store.port, job, arguments), daemon=True)
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
                found[rank] = Outcome(*pickle.loads(end.recv_bytes()))
            except EOFError:
                found[rank] = Outcome(error="gone")
    for rank in waited.values():
        found[rank] = Outcome(error="hangs")
    for process in processes:
        process.kill()
        process.join()
    return found


def _work(end: Connection, rank: int, size: int, port: int, job: Job, arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    began = time.monotonic()
    try:
        answer = (job(rank, *arguments), "", time.monotonic() - began)
    except Exception as error:
        answer = (None, f"{type(error).__name__}: {error}", time.monotonic() - began)
    end.send_bytes(pickle.dumps(answer))
    end.close()
    os._exit(0)  # collectives that others never joined would hold up an orderly end
