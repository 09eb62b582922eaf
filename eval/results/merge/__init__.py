"""Several finished runs of one text as one."""
