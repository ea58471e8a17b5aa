"""The names that KTransformers' placement rules may use, as data: none of them is ever imported.

KTransformers' loader imports any dotted path that a rule names, so a rule file can run code. Here a fixed table has the
67 replacement classes, 38 matched classes and all operators of the 77 rule files that KTransformers shipped (its
repository's `archive/`, 2026-08); any other name is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

OPERATORS = "ktransformers.operators."
MODELS = "ktransformers.models."

EXPERTS, LINEAR, DETAIL, NPU, XPU = "experts", "linear", "detail", "npu", "xpu"


def _classes(kind: str, module: str, names: str) -> dict[str, str]:
    return {f"{OPERATORS}{module}.{name}": kind for name in names.split()}


REPLACEMENTS: Mapping[str, str] = {
    "default": DETAIL,
    **_classes(EXPERTS, "experts", "KTransformersExperts KTransformersExpertsV2 KGlm4Experts KSmallthinkerExperts"),
    **_classes(LINEAR, "linear", "KTransformersLinear"),
    **_classes(DETAIL, "attention", "KDeepseekV2Attention KLlamaAttention KQwen3MoeAttention"),
    **_classes(XPU, "attention", "KQwen3MoeAttentionIPEXLLM"),
    **_classes(
        DETAIL,
        "balance_serve_attention",
        "flashinfer_attn KQwen2MoeAttention KQwen3MoeAttention KGlm4MoeAttention KQwen3NextAttention "
        "KQwen3NextGatedDeltaNet KSmallthinkerAttention",
    ),
    **_classes(
        DETAIL,
        "experts",
        "KDeepseekV2MoE KDeepseekV3MoE KDeepseekV3MoEV2 KQwen2MoeSparseMoeBlock KQwen2MoeSparseMoeBlockV2 "
        "KQwen3MoeSparseMoeBlock KQwen3MoeSparseMoeBlockV2 KQwen3NextSparseMoeBlockV2 KMistralSparseMoEBlock "
        "KGlm4MoeMoE KSmallthinkerMoeBlock",
    ),
    **_classes(DETAIL, "gate", "KMoEGate"),
    **_classes(XPU, "gate", "KMoEGateIPEXLLM"),
    **_classes(
        DETAIL,
        "layernorm",
        "RMSNorm KQwen2MoeRMSNorm KQwen3MoeRMSNorm KGlm4MoeRMSNorm KQwen3NextRMSNorm KSmallthinkerRMSNorm",
    ),
    **_classes(XPU, "layernorm", "KDeepseekRMSNormIPEXLLM"),
    **_classes(DETAIL, "mlp", "kDeepseekV3MLP KQwen2MoeMLP KGlm4MoeMLP KSmallthinkerDenseMlpBlock"),
    **_classes(DETAIL, "models", "KDeepseekV2Model KQwen2MoeModel KQwen3MoeModel KLlamaModel"),
    **_classes(
        DETAIL,
        "RoPE",
        "RotaryEmbedding RotaryEmbeddingV2 RotaryEmbeddingV3 RotaryEmbeddingV4 YarnRotaryEmbedding "
        "YarnRotaryEmbeddingV3 KQwen3MoeRotaryEmbedding KGlm4MoeRotaryEmbedding KSmallthinkerRotaryEmbedding",
    ),
    **_classes(
        NPU,
        "ascend.ascend_attention",
        "KDeepseekV2AttentionW8A8A2 KDeepseekV2AttentionW8A8A2Serve KQwen3MoeAttentionW8A8A2Serve",
    ),
    **_classes(
        NPU,
        "ascend.ascend_experts",
        "KDeepseekV3MoEW8A8 KTransformersExpertsW8A8 KExpertsCPUW8A8 KQwen3MoeSparseMoeBlockW8A8",
    ),
    **_classes(NPU, "ascend.ascend_gate", "KDeepseekV3GateA2"),
    **_classes(NPU, "ascend.ascend_layernorm", "KDeepseekV3RMSNormW8A8 KQwen3MoeRMSNormW8A8"),
    **_classes(NPU, "ascend.ascend_linear", "KTransformersLinearW8A8A2"),
    **_classes(NPU, "ascend.ascend_mlp", "KDeepseekV3MLPW8A8A2V1 KDeepseekV3MLPW8A8A2V2"),
}


def _matched(module: str, names: str) -> list[str]:
    return [f"{module}.{name}" for name in names.split()]


MATCHED: frozenset[str] = frozenset(
    [
        "torch.nn.Linear",
        *_matched(f"{OPERATORS}experts", "KExpertsCPU"),
        *_matched(f"{MODELS}modeling_deepseek", "DeepseekV2MoE DeepseekV2RMSNorm DeepseekV2YarnRotaryEmbedding"),
        *_matched(
            f"{MODELS}modeling_deepseek_v3",
            "DeepseekV3MLP DeepseekV3MoE DeepseekV3RMSNorm DeepseekV3RotaryEmbedding MoEGate",
        ),
        *_matched(f"{MODELS}modeling_glm4_moe", "Glm4MoeMLP Glm4MoeMoE Glm4MoeRMSNorm Glm4MoeRotaryEmbedding"),
        *_matched(f"{MODELS}modeling_llama", "LlamaModel LlamaRotaryEmbedding"),
        *_matched(f"{MODELS}modeling_mixtral", "MixtralRotaryEmbedding MixtralSparseMoeBlock"),
        *_matched(
            f"{MODELS}modeling_qwen2_moe",
            "Qwen2MoeMLP Qwen2MoeRMSNorm Qwen2MoeRotaryEmbedding Qwen2MoeSparseMoeBlock",
        ),
        *_matched(f"{MODELS}modeling_qwen3_moe", "Qwen3MoeMLP Qwen3MoeRMSNorm Qwen3MoeSparseMoeBlock"),
        *_matched(
            f"{MODELS}modeling_qwen3_next",
            "Qwen3NextAttention Qwen3NextGatedDeltaNet Qwen3NextMLP Qwen3NextRMSNorm Qwen3NextRotaryEmbedding "
            "Qwen3NextSparseMoeBlock",
        ),
        *_matched(
            f"{MODELS}modeling_smallthinker",
            "SmallthinkerDenseMlpBlock SmallthinkerMoeBlock SmallthinkerRMSNorm SmallthinkerRotaryEmbedding",
        ),
        *_matched(
            "transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeMLP Qwen3MoeRMSNorm Qwen3MoeSparseMoeBlock"
        ),
    ]
)

CPU_EXPERTS = ("KExpertsCPU", "KSFTExpertsCPU")
OPS: Mapping[str, str] = {
    **dict.fromkeys(CPU_EXPERTS, DETAIL),
    "KExpertsTorch": DETAIL,
    "KExpertsMarlin": "experts on the GPU in some layers have no equivalent: all routed experts are on the CPU",
    "KExpertsCPUW8A8": NPU,
    **dict.fromkeys(
        ("KLinearMarlin", "VLinearMarlin", "KLinearFP8"),
        "the format of attention and shared weights is the checkpoint's",
    ),
    "KLinearTorch": DETAIL,
    **dict.fromkeys(
        ("KLinearCPUInfer", "KLinearQ8"), "linear layers on the CPU have no equivalent: they are on the server's device"
    ),
    "KLinearIPEXLLM": XPU,
    "KLinearTorchW8A8A2": NPU,
}
"""What an operator means here: an unsupported platform, an ignored detail of the old engine, or the text of a note."""

BACKENDS: Mapping[str, str | None] = {"AMXInt8": "int8", "AMXBF16": "bf16", "llamafile": None}
"""The expert format that a backend asks for; None: the checkpoint's."""
