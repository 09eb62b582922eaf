"""report.html: one file that shows a run in a browser; its JavaScript is in `page/`."""
