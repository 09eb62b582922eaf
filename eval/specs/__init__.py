"""The JSON specs: their types, and how they are read."""
