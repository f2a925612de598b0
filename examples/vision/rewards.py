"""The reward of the example: 1 for the right colour and nothing else."""


def colour(completions, answer, **_columns):
    """Capitals and a full stop, as larger models write them, are no fault."""
    texts = [said[-1]["content"].strip().rstrip(".").lower() for said in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]
