"""Roles of a warp-specialised kernel in Gluon that any chip may have: who draws work, who fetches keys and values, and
how they tell each other. Nothing here names a matrix instruction."""
