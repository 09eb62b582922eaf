"""The engine vLLM, scored inside its own workers."""
