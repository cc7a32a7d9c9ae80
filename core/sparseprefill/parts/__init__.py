"""Long calls in parts: how a call is cut, how much memory a stage holds, and the record of what ran."""
