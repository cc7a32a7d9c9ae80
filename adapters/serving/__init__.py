"""Parts that the adapters of inference servers share; it imports none of them."""
