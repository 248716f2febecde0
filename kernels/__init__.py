"""Operator contracts of the `ai.dspark` domain and their implementations."""
