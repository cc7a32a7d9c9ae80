"""Refiners that serve any estimator: rescues, budgets, dense rows, and the union over a GQA group."""
