"""What single models of SGLang need, a file for each."""
