"""Prefill and decode over HTTP, compared with the machine's limits, Hugging Face and llama.cpp."""
