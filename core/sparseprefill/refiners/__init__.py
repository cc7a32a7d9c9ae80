"""Refiners that serve any estimator: rescues, budgets, floors, dense rows, and the union over a GQA group."""
