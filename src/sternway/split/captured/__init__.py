"""F, I and W of a module as CUDA graphs."""
