"""Export trained models for other programs: transformers folders, GGUF, Ollama, model cards."""
