"""The studio: a local web page for data, runs, chat with models, and export."""
