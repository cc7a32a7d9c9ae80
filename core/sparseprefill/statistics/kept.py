"""The name by which plugins import `kept`."""

from sparseprefill.mask.kept import kept as kept
