"""From which sizes sparse attention pays: measured tables, the rule between measured sizes, gates."""
