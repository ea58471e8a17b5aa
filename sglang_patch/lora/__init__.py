"""SGLang's LoRA on a CPU and on routed experts; versions installed from memory."""
