"""What a person reads of a run: the terminal, plots, pages, alarms, trackers."""
