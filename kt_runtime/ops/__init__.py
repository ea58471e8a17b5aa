"""The arithmetic that serving and training share, each operation written once: so both compute the same numbers.

attention   scaled dot-product attention in float32, forward and backward
matmul      products that round as serving's do, and their gradients
norms       RMSNorm, and its gradient with a frozen weight
router      logits and choice of experts
mla         LoRA on the absorbed `kv_b_proj` of multi-head latent attention (MLA)

Plain tensors in, plain tensors out: this folder knows neither SGLang nor Hugging Face's modules.
"""
