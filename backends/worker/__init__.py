"""One model in a process of its own."""
