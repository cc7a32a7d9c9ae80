"""Device code of the identification: pool, score, compact. `identify_triton` launches it."""
