"""How long tests wait for other processes. Every such number of seconds goes through `patient`.

On a machine that is busy with other things set SPARSEPREFILL_TEST_PATIENCE to a factor, such as 3.
"""

from __future__ import annotations

import math
import os

VARIABLE = "SPARSEPREFILL_TEST_PATIENCE"


def factor(text: str) -> float:
    """The factor that the variable's text stands for."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise ValueError(f"{VARIABLE} is {text!r}: pass a positive number, such as 3")
    return found


PATIENCE = factor(os.environ.get(VARIABLE, "1"))


def patient(seconds: float) -> float:
    """So many seconds on a machine that has nothing else to do; more where the variable says so."""
    return seconds * PATIENCE
