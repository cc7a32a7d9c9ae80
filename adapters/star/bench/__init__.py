"""Times of Star Attention, ring attention and dense attention on the GPUs of torchrun."""
