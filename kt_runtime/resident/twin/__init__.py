"""The model as training differentiates it: Hugging Face modules over the engine's tensors, with LoRA."""
