"""kt-runtime: one resident mixture-of-experts model, served through SGLang and LoRA-trained in place."""

__version__ = "0.1.0"
