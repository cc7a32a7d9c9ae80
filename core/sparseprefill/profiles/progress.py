"""What hears of progress where something is measured: a command's bar, a test's list, or nobody."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Hears of progress: what is being done, how much of it is done, of how much."""
Steps = Callable[[int, int], None]
"""Hears of the progress of one piece of work: how much of it is done, of how much."""
