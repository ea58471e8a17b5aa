"""The arithmetic that serving and training share. Each operation is written once, so both compute the same numbers.

attention   scaled dot-product attention in float32, forward and backward
matmul      matrix products with serving's rounding, and their gradients
norms       RMSNorm, and its gradient with a frozen weight
router      logits and top-k choice of experts
step        the native step: a decoder stack as one call
mla         LoRA on the absorbed `kv_b_proj` of multi-head latent attention (MLA)

Inputs and results are plain tensors: this folder imports neither SGLang nor Hugging Face's modules.
"""
