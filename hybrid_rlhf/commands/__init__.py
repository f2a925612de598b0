"""Commands beside the stages: doctor, init, export."""
