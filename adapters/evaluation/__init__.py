"""What a sparse prefill does to a model: its distributions, its attention and its speed, against its own dense one."""
