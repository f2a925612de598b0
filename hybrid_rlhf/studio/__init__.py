"""The studio: a local page from data to a model that one can talk to and take away."""
