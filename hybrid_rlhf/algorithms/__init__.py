"""Pure functions on tensors, fp32 inside. They import nothing but torch and the shared tensor functions."""
