"""Recipes: a Config, a build, a call of fit. They choose and wire; loops and tensors live in the library."""
