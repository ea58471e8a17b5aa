"""One quantized GGUF file that the server and llama.cpp both read."""
