"""Log-probabilities from a running vLLM server, over HTTP."""
