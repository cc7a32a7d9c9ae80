"""Times of one layer's attention against ring attention, on the GPUs of torchrun (from tests/).

``torchrun --nproc-per-node 4 -m lab.star --seconds 190 --json star.json``
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from sparseprefill.errors import SparsePrefillError

from .run import bench


def parser() -> ArgumentParser:
    """The options."""
    made = ArgumentParser("lab.star", description="Star Attention beside ring and dense attention.")
    made.add_argument("--tokens", type=int, nargs="+", default=[131072, 262144, 524288, 1048576])
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="a CPU tries the script out")
    made.add_argument("--seconds", type=float, default=180.0, help="start no row that may end later (180)")
    made.add_argument("--rows", default="", help="only rows whose name contains this regular expression")
    made.add_argument("--json", help="a file to which each row is added, one JSON object a line")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; a known error is one line on standard error, and exit status 1 at once."""
    given = parser().parse_args(arguments)
    try:
        bench(given)
    except (SparsePrefillError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a collective that others never joined would hold up an orderly end


if __name__ == "__main__":
    main()
