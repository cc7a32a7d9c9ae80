"""The terminal as a host: the `sparseprefill` command.

Only this package writes to the terminal. Each command is a module with a ``register(app)``; `app.COMMANDS` lists them.
"""
