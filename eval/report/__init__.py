"""The report of ``--html``, and the worst tokens of each model, which results.json holds too."""
