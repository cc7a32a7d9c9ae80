"""The name by which plugins import `kept`."""

from sparseprefill.mask.geometry import kept as kept
