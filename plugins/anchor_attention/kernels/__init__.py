"""Device code of the identification: pool, score, compact. `launch` launches it."""
