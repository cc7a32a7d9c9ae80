"""Training of the embedded model; nothing here is needed to use it."""
