"""How much memory a run takes, before it is started, and settings that fit a card."""
