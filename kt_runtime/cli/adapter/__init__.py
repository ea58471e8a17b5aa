"""`kt-runtime adapter` and `export`: list, load, roll back; PEFT, GGUF and merged checkpoints."""
