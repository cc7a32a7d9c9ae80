"""Statistics that estimators share: pooled and sampled attention, selection, distances."""
