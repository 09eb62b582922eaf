"""The pictures of a run of several texts."""

from eval.plots.texts.dumbbell import draw, write_all

__all__ = ["draw", "write_all"]
