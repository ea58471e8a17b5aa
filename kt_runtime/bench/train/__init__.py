"""Training on a real server compared with the same training by Hugging Face + PEFT."""
