"""The parts of `hybrid-rlhf qualify`: each checks one thing on a card and yields rows for the page."""
