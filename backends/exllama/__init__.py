"""The engine ExLlamaV3."""
