"""Scores that another engine's script has written into a file."""
