"""Text -> tokens -> windows."""
