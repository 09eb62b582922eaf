"""The engine llama.cpp."""
