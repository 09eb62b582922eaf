"""The GPU table: one base model in every format and engine, made and measured by ``python -m demo.h200``."""
