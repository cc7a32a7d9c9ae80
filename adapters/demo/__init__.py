"""The embedded model: a small Llama checkpoint and the retrieval tasks it solves."""
