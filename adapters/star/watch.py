"""A thread that ends a wait which the host cannot leave: with NCCL it stands in a synchronisation with the device."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .ranks import GRACE, POLL, RankError, Ranks

log = logging.getLogger(__name__)
EXIT = 70  # EX_SOFTWARE


class Watch(threading.Thread):
    """Looks after one group while a run is open (`Ranks.open`).

    Where another rank has told of a failure, or this one has made no progress for the timeout, it logs that and aborts
    NCCL in all groups of the process (with tensor parallelism the main thread may stand in the other one), so that the
    main thread comes back and raises; where that does not help it ends the process. It speaks with the others through
    the store alone, and runs because torch lets go of the interpreter's lock where it waits for the device.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(name="sparseprefill-star-watch", daemon=True)
        self._ranks = weakref.ref(ranks)

    @classmethod
    def of(cls, ranks: Ranks, device: torch.device) -> Watch | None:
        """A watch that runs, where the ranks' backend needs one."""
        if device.type != "cuda" or not ranks.streams:
            return None
        made = cls(ranks)
        made.start()
        return made

    def run(self) -> None:
        """Until the ranks are gone, or one has failed."""
        while True:
            time.sleep(POLL)
            ranks = self._ranks()
            if ranks is None:
                return
            if not ranks.open:
                continue
            try:
                ranks.hear()
                if time.monotonic() - ranks.seen > ranks.timeout:
                    ranks.lost(f"made no progress for {ranks.timeout:g} s")
            except RankError as error:
                self._end(ranks, str(error))
                return

    def _end(self, ranks: Ranks, text: str) -> None:
        log.critical("Star Attention: %s", text)
        abort: Any = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None:
            threading.Thread(target=abort, args=(None,), daemon=True).start()
        time.sleep(2 * GRACE)
        if ranks.open:  # the main thread is still in there
            os._exit(EXIT)
