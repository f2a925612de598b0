"""Models as they come from Hugging Face: loading, saving, adapters, and the pieces training needs of them."""
