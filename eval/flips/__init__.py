"""``compare-q flips``: compare the answers of models to the same tasks, from the samples that
lm-eval wrote.
"""
