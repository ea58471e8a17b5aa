"""SGLang with attention on a device and routed experts in CPU memory."""
