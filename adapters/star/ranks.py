"""The ranks of one group: agreement before a run, waiting with an end, and telling of a failure.

What the ranks say to each other goes through the store of torch.distributed, which every backend has and which can be
polled, so a rank that waits hears of another's failure. Collectives carry tensors alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from sparseprefill.errors import AttachError, ParameterError, SparsePrefillError, printed
from sparseprefill.validate import is_number

POLL = 0.5  # seconds between two looks at the store while a collective is under way
GRACE = 3.0  # seconds in which the ranks that are left answer when one is missed
TIMEOUT = 120.0  # seconds that a rank waits for another, unless told otherwise
PATIENCE = 25.0  # seconds, at most the timeout, that a rank which failed waits for the others
FAILED, ASKED, REFUSED = "failed", "asked", "refused"
T = TypeVar("T")


def is_timeout(timeout: Any) -> bool:
    """True if this is a positive number of seconds."""
    return is_number(timeout) and timeout > 0


def check_timeout(timeout: Any) -> None:
    """ParameterError for what is no timeout."""
    if not is_timeout(timeout):
        raise ParameterError(f"timeout is {printed(timeout)}: pass a positive number of seconds")


class RankError(SparsePrefillError):
    """A rank failed, died or stalled, or was given other arguments. Every rank that can raises it; then end all."""


class Ranks:
    """The processes of a group (None: the default one), and what one of them has to know of the others.

    timeout: seconds that this rank waits for another in one place; more than one block takes in all layers.
    Collectives run on the backend's own devices.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise AttachError(
                "torch.distributed is not running: start with torchrun and call torch.distributed.init_process_group()"
            )
        check_timeout(timeout)
        self.group, self.rank, self.timeout = group, dist.get_rank(group), float(timeout)
        self.sent = self.begun = 0  # bytes that this rank sent, and collectives
        members = range(self.size) if group is None else dist.get_process_group_ranks(group)
        prefix = f"sparseprefill-star/{hashlib.sha256(str(list(members)).encode()).hexdigest()[:16]}"
        base: Any = dist.distributed_c10d._get_default_store()
        number = PrefixStore(prefix, base).add(f"made/{self.rank}", 1)
        self.store = PrefixStore(f"{prefix}/{number}", base)
        self.streams = "nccl" in str(dist.get_backend(group))  # whether a wait holds up the device, and not the host
        self.open = False  # whether a run is under way
        self.seen = time.monotonic()  # when this rank last came from one collective to the next
        self._met, self._failure, self._answered = 0, "", False

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self.group)

    def gather(self, x: Tensor) -> Tensor:
        """``[R, *x.shape]``: every rank's x, in the order of ranks."""
        self._count(x)
        out = x.new_empty(self.size * x.numel())
        # torch 2.13 renamed it, and warns of the old name.
        run: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self.wait(run(out, x.reshape(-1), group=self.group, async_op=True), x)
        return out.view(self.size, *x.shape)

    def swap(self, x: Tensor) -> Tensor:
        """x ``[R, ...]``: slice r goes to rank r; returns the slices that came, in the order of ranks."""
        self._count(x)
        out = torch.empty_like(x)
        self.wait(dist.all_to_all_single(out.view(-1), x.view(-1), group=self.group, async_op=True), x)
        return out

    def broadcast(self, x: Tensor) -> Any:
        """Start sending x from the first rank to the others; `wait` for the work that is returned."""
        self._count(x, sends=self.rank == 0)
        return dist.broadcast(x, group=self.group, group_src=0, async_op=True)

    def _count(self, x: Tensor, *, sends: bool = True) -> None:
        self.begun += 1
        self.sent += x.numel() * x.element_size() if sends else 0

    def wait(self, work: Any, x: Tensor) -> None:
        """Wait for a collective over x. RankError where another rank failed or does not come within `timeout`.

        With NCCL the stream waits and the host goes on: `Watch` looks after that.
        """
        self.check()
        self.seen = began = time.monotonic()
        if x.is_cuda and self.streams:
            work.wait()
            return
        while True:
            ended = work.is_completed()  # asked before: what ends as the wait runs out has not failed
            try:
                work.wait(timedelta(seconds=POLL))
                self.seen = time.monotonic()
                return
            except RuntimeError as error:
                if ended:
                    self.lost("found a connection closed", error)
            self.hear()
            if time.monotonic() - began > self.timeout:
                self.lost(f"waited {self.timeout:g} s")

    def check(self) -> None:
        """RankError if this group has failed before: its collectives are out of step."""
        if self._failure:
            raise RankError(f"{self._failure} (the group cannot go on: end all processes and start again)")

    def hear(self) -> None:
        """RankError if another rank has told of a failure. One that misses somebody is answered."""
        if self._stored(lambda: self.store.check([FAILED])):
            self._failure = str(self._stored(lambda: self.store.get(FAILED).decode()))
            raise RankError(self._failure)
        if not self._answered and self._stored(lambda: self.store.check([ASKED])):
            self._answer()

    def _answer(self) -> None:
        self._answered = True
        self.store.set(f"here/{self.rank}", str(self.begun))

    def tell(self, text: str) -> str:
        """Let the others know that this rank failed; the first failure is the one that all report."""
        with suppress(RuntimeError):
            text = self.store.compare_set(FAILED, "", text).decode() or text
        self._failure = text
        return text

    def meet(self, what: str, said: Mapping[str, Any], *, failure: str = "") -> list[dict[str, Any]]:
        """Wait for all ranks, and learn what each says (values as JSON). RankError where one does not come.

        failure: why others may be unable to come, told instead where they do not.
        """
        self.check()
        self._met += 1
        keys = [f"met/{self._met}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(dict(said), default=str))
        began, pause, patience = time.monotonic(), 0.0005, min(self.timeout, PATIENCE) if failure else self.timeout
        while not self._stored(lambda: self.store.check(keys)):
            self.hear()
            if time.monotonic() - began > patience:
                if failure:
                    raise RankError(self.tell(failure))
                self.lost(f"waited {self.timeout:g} s before {what}")
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        answers = [json.loads(x) for x in self._stored(lambda: self.store.multi_get(keys))]
        if self._met > 2:  # everybody who is here has read those of the meeting before the last
            with suppress(RuntimeError):
                self.store.delete_key(f"met/{self._met - 2}/{self.rank}")
        self.seen = time.monotonic()
        return answers

    def agree(self, what: str, read: Callable[[], tuple[T, Mapping[str, Any]]]) -> T:
        """Read this rank's arguments, and `meet`: RankError that names the first value that differs over the ranks.

        read: checks the arguments, and returns what it made of them with the values to compare; one that is missing is
        None. What it raises comes out of here once all have met, and ranks whose own arguments are right raise a
        RankError with the rank and the text.
        """
        self.check()
        said: Mapping[str, Any]
        made, error = None, None
        try:
            made, said = read()
        except Exception as raised:
            error, said = raised, {REFUSED: f"{type(raised).__name__}: {_line(raised)}"}
        answers = self.meet(what, {"the call": what, **said})
        wrong = [rank for rank, answer in enumerate(answers) if REFUSED in answer]
        if 0 < len(wrong) < self.size:
            first = answers[wrong[0]]
            told = self.tell(f"{first['the call']}: rank {wrong[0]} refuses its arguments: {first[REFUSED]}")
            if error is None:
                raise RankError(told)
        if error is not None:
            raise error
        for name in dict.fromkeys(name for answer in answers for name in answer):
            values = [answer.get(name) for answer in answers]
            if any(value != values[0] for value in values):
                texts = (text if len(text) <= 200 else f"{text[:200]}..." for text in map(repr, values))
                shown = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts))
                raise RankError(self.tell(f"{what}: {name} differs over the ranks: {shown}"))
        return cast(T, made)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside the block this rank computes or waits for others, and `Watch` looks after that."""
        self.seen, self.open = time.monotonic(), True
        try:
            yield
        finally:
            self.open = False

    @contextmanager
    def run(self, what: str) -> Iterator[None]:
        """A part of the work that all ranks do together: a failure of this rank reaches all others."""
        self.check()
        try:
            with self.busy():
                yield
                self.check()
        except RankError:
            raise
        except torch.OutOfMemoryError as error:
            told = self.tell(f"rank {self.rank} ran out of memory in {what}: {_line(error)}")
            raise RankError(told) from error
        except BaseException as error:
            told = self.tell(f"rank {self.rank} failed in {what}: {type(error).__name__}: {_line(error)}")
            if not isinstance(error, Exception):
                raise
            raise RankError(told) from error

    def lost(self, why: str, cause: BaseException | None = None) -> NoReturn:
        """Ask who is there, and raise RankError with those that are not."""
        until = time.monotonic() + GRACE
        with suppress(RuntimeError):
            self.store.set(ASKED, "")
            self._answer()
        missing = list(range(self.size))
        while missing and time.monotonic() < until:
            self.hear()
            try:
                missing = [rank for rank in missing if not self.store.check([f"here/{rank}"])]
            except RuntimeError:
                break
            time.sleep(0.1)
        who = ", ".join(map(str, missing)) or self._behind()
        raise RankError(self.tell(f"lost rank {who}: rank {self.rank} {why}")) from cause

    def _behind(self) -> str:
        """Ranks that hold up the others where all answer: those that have begun the fewest collectives."""
        try:
            counts = [int(self.store.get(f"here/{rank}")) for rank in range(self.size)]
        except RuntimeError:
            counts = [0]
        if min(counts) == max(counts):
            return "none; the network may be down"
        behind = ", ".join(str(rank) for rank, count in enumerate(counts) if count == min(counts))
        return f"{behind} (it answers, but began {min(counts)} collectives and others {max(counts)})"

    def _stored(self, ask: Callable[[], T]) -> T:
        """The answer of the store; RankError where it is gone."""
        try:
            return ask()
        except RuntimeError as error:
            self._failure = (
                f"lost the store of torch.distributed, and with it the process that holds it: {_line(error)}"
            )
            raise RankError(self._failure) from error


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
