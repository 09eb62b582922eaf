"""The pictures of a run of several texts."""
