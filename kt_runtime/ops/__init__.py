"""The arithmetic that serving and training share. Each operation is written once, so both compute the same numbers.

attention       scaled dot-product attention in float32, forward and backward
matmul          matrix products with serving's bits, and their gradients
norms           RMSNorm, and its gradient with a frozen weight
activation      SwiGLU of dense MLPs and shared experts, and its gradient
router          logits and top-k choice of experts
grouped_router  DeepSeek's choice of experts from groups
step            the native step: a decoder stack as one call
mla             LoRA on the absorbed `kv_b_proj` of multi-head latent attention (MLA)

Inputs and results are plain tensors: this folder imports neither SGLang nor Hugging Face's modules.
"""
