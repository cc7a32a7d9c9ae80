"""Files made for one model: tuned parameters, tables that methods need, and the identity of the model."""
