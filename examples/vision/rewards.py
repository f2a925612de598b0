"""The reward of the example: 1 for the right colour and nothing else."""


def colour(completions, answer, **_columns):
    return [float(said[-1]["content"].strip() == right) for said, right in zip(completions, answer, strict=True)]
