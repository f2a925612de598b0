"""What one step is, method by method. Trainers hold roles and never import each other, engines or models."""
