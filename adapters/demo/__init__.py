"""The embedded model: a small Llama checkpoint and the retrieval tasks it solves.

``tasks`` makes needle-in-a-haystack prompts of four families, ``model`` loads
the shipped checkpoint.
"""
