"""The effect of a sparse prefill on a model: distributions, attention and speed against its own dense one."""
