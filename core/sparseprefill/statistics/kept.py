"""The names by which plugins import `kept` and `remembered`."""

from sparseprefill.mask.geometry import kept as kept
from sparseprefill.mask.geometry import remembered as remembered
