"""Openings for short stories. HELD_OUT is for the judge alone; PPO never sees it."""

HELD_OUT = [
    "Once upon a time, there was a",
    "One day, a little girl named Lily",
    "Tom and his sister went to the",
    "The big dog ran to the",
    "It was a rainy day and Ben",
    "In a small house near the forest lived",
    "Mia found a strange box in",
    "The old man looked at the boy and",
]

SUBJECTS = [
    "A boy named Tim", "A girl named Sue", "The little cat", "A small bird", "Two friends, Sam and Anna,",
    "The king of the land", "A brave rabbit", "The teacher", "Max the bear", "An old woman", "The farmer and his son",
    "Lucy and her mom", "A shy mouse", "The red truck", "A big frog", "Jack", "The twins", "A tiny ant",
]
ACTIONS = [
    "wanted to", "went to the park to", "saw a", "was playing with", "lost a", "found a", "asked for a", "heard a",
    "had a", "ran away from", "made a", "looked for", "climbed", "did not like", "shared a", "woke up and",
]
PLACES = ["", "One morning, ", "At night, ", "In the garden, ", "After lunch, ", "On a cold day, "]


def training() -> list[str]:
    """Every combination of place, subject and action: 1,728 openings, none of them held out."""
    return [f"{place}{_inside(subject) if place else subject} {action}"
            for place in PLACES for subject in SUBJECTS for action in ACTIONS]


def _inside(subject: str) -> str:
    """The subject as it reads inside a sentence: a name keeps its capital, an article does not."""
    article = subject.split()[0] in ("A", "An", "The", "Two")
    return subject[0].lower() + subject[1:] if article else subject
