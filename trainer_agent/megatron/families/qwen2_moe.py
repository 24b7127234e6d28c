"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, one of which every token passes."""

from trainer_agent.megatron.families.decoder import DecoderFamily
from trainer_agent.megatron.families.moe import QwenExperts

QWEN2_MOE = DecoderFamily(
    model_type="qwen2_moe",
    qkv_bias=True,
    qkv_bias_flag="qkv_bias",
    refused_flags=("use_sliding_window",),
    experts=QwenExperts(),
)
