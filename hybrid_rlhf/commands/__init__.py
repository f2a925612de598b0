"""Commands beside the stages: doctor, qualify, init, export, label."""
