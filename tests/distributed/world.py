"""Jobs over several processes that talk through gloo, or through NCCL with a GPU each.

For gloo one server with torch and transformers loaded forks them all; with CUDA a process has to start by itself. A
`World` runs job after job, since a start costs more than most jobs: `shared` keeps one of each size. A job that ends
processes, or leaves a collective open in the default group, has a world of its own: `run`.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from attrs import define, field, frozen

from helpers.patience import patient

TESTS = Path(__file__).parents[1]
Job = Callable[..., Any]


@frozen
class Outcome:
    """What a process returned; `error` with the type of what it raised, "gone" where it ended without a word,
    and "hangs" with what its threads stand in where it did not return in time.

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


@define(eq=False)
class World:
    """`size` processes of one default group. device: cpu (gloo) or cuda (NCCL; rank r on GPU r)."""

    size: int
    device: str = "cpu"
    whole: bool = field(default=True, init=False)
    """Whether every process has returned from every job."""
    _processes: list[Any] = field(factory=list, init=False)
    _ends: list[Connection] = field(factory=list, init=False)
    _store: Any = field(init=False)
    _stacks: TemporaryDirectory[str] = field(factory=TemporaryDirectory, init=False)
    """Where a process writes its stacks when it is asked to."""

    def __attrs_post_init__(self) -> None:
        from torch._C._distributed_c10d import TCPStore

        wait_for = timedelta(seconds=patient(300))
        self._store = TCPStore("127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False, timeout=wait_for)
        context: Any = _server() if self.device == "cpu" else multiprocessing.get_context("spawn")
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            given = (theirs, rank, self.size, self._store.port, self.device, self._stack(rank))
            process = context.Process(target=_work, args=given, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(mine)

    def run(self, job: Job, *arguments: Any, seconds: float = 120.0, stopped: Sequence[int] = ()) -> list[Outcome]:
        """``job(rank, *arguments)`` on every process; what came of each within so many seconds, times the patience.

        stopped: ranks that are not waited for, as they stop themselves.
        """
        for end in self._ends:
            end.send_bytes(pickle.dumps((job, arguments)))
        found = [Outcome(error="gone")] * self.size
        waited: dict[Any, int] = {self._ends[rank]: rank for rank in range(self.size) if rank not in stopped}
        until = time.monotonic() + patient(seconds)
        while waited and (ready := wait(list(waited), timeout=max(until - time.monotonic(), 0))):
            for end in cast(list[Connection], ready):
                rank = waited.pop(end)
                try:
                    value, error, spent = pickle.loads(end.recv_bytes())
                    found[rank] = Outcome(value, error, spent, time.time())
                except (EOFError, ConnectionResetError):
                    found[rank] = Outcome(error="gone", ended=time.time())
        for rank in waited.values():
            found[rank] = Outcome(error=f"hangs\n{self._stands(rank)}")
        self.whole = self.whole and not stopped and not any(outcome.error for outcome in found)
        return found

    def _stack(self, rank: int) -> Path:
        return Path(self._stacks.name) / str(rank)

    def _stands(self, rank: int) -> str:
        """What the threads of a process stand in; nothing where it does not even say that."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(patient(1))
        stack = self._stack(rank)
        return stack.read_text() if stack.exists() else ""

    def close(self) -> None:
        """End all processes, stopped ones too."""
        self.whole = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._stacks.cleanup()


_shared: dict[int, World] = {}


def shared(size: int) -> World:
    """A world that jobs share, one after the other; another one after a job that did not return everywhere."""
    if size not in _shared or not _shared[size].whole:
        if size in _shared:
            _shared[size].close()
        _shared[size] = World(size)
    return _shared[size]


def close() -> None:
    """End the worlds that are shared."""
    while _shared:
        _shared.popitem()[1].close()


def run(
    job: Job, size: int, *arguments: Any, seconds: float = 120.0, stopped: Sequence[int] = (), device: str = "cpu"
) -> list[Outcome]:
    """A job in a world of its own; see `World.run`."""
    world = World(size, device)
    try:
        return world.run(job, *arguments, seconds=seconds, stopped=stopped)
    finally:
        world.close()


def _work(end: Connection, rank: int, size: int, port: int, device: str, stack: Path) -> None:
    import torch
    from torch._C._distributed_c10d import TCPStore

    from lab.star.start import connect

    faulthandler.register(signal.SIGUSR1, stack.open("w"))
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, size, is_master=False, timeout=timedelta(seconds=patient(300)))
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    connect(here, patient(35), store=store, rank=rank, world_size=size)
    while True:
        try:
            job, arguments = pickle.loads(end.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)  # collectives that others never joined would hold up an orderly end
        began = time.monotonic()
        try:
            answer = (job(rank, *arguments), "", time.monotonic() - began)
        except Exception as error:
            answer = (None, f"{type(error).__name__}: {error}", time.monotonic() - began)
        end.send_bytes(pickle.dumps(answer))
