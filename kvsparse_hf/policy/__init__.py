"""Scores, budgets and selections: pure functions on tensors. Nothing here knows Transformers."""
