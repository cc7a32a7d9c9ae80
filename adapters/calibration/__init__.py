"""Offline measurements: break-even tables, and the search for parameters."""
