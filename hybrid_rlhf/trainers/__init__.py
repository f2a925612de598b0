"""The step of each method. Trainers use roles and never import each other, engines or models."""
