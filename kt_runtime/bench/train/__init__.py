"""Training through a real server against Hugging Face + PEFT doing the same."""
