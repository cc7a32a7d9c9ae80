"""Products of flattened token groups, as BFLA and XAttention score blocks."""
