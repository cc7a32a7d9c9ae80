"""The (query, key) pairs that a call computes: geometry, lists, maps, and the mask made of them."""
