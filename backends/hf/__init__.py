"""The engine Transformers."""
