"""Files made for one model: tuned parameters, clusters of heads, and the identity of the model."""
