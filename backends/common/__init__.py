"""Used by every engine: errors, messages, options, files, packages, machine."""
