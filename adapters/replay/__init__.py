"""A replay of agents' turns against a running server that speaks OpenAI's completions API."""
