"""The engines ExLlamaV2 and ExLlamaV3."""
