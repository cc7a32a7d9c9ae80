"""Which (query, key) pairs a call computes: geometry, lists, maps, and the mask made of them."""
