"""Prefill and decode over HTTP, compared with the machine's limits, SGLang, Hugging Face and llama.cpp."""
