"""The driver: specs, windows, scores, statistics, and every way to show them."""

__version__ = "0.2.0"
