"""Parts that every host shares: a pipeline at work, the record of what happened, and its report."""
