"""The checkpoint as a GGUF file, which llama.cpp reads, and with a mix of quantized types the server too."""
