"""What single models of SGLang compute otherwise, one file each."""
