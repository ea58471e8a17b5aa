"""Serving and training on a machine with a GPU, compared with its limits, stock SGLang, Hugging Face and llama.cpp."""
