"""A vLLM server that somebody else runs, asked for log-probabilities over HTTP."""
