"""Processes that load and score one model each."""
