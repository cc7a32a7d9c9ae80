"""Which seeds of tasks are for what, so that no table comes from tasks that something was chosen on.

Training makes its own text and uses none of these: its values, keys and places come from another generator.
"""

TUNING = 1_000
"""First seed of the tasks that settings of methods are chosen on (`python -m experiments.frontier`, run in tests)."""

SELECTION = 1_000_000
"""First seed of the tasks at the end of a training run: they compare recipes and pick the run that ships."""

TABLES = 2_000_000
"""First seed of the tasks of published tables: those of the demo, and of `evaluate`."""
