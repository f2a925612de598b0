"""Reports of a run: terminal output, plots, pages, alarms, trackers."""
