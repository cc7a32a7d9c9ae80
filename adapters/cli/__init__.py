"""The terminal as a host."""
