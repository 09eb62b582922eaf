"""``compare-q trace``: a model answers prompts, and its answers become a text that models are scored on."""
