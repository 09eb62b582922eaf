"""Turn texts into tokens, and tokens into windows."""
