"""Qwen3-MoE: Qwen3 with experts, in all layers or some."""

from trainer_agent.megatron.families.decoder import DecoderFamily
from trainer_agent.megatron.families.moe import QwenExperts

QWEN3_MOE = DecoderFamily(
    model_type="qwen3_moe",
    qk_norm=True,
    refused_flags=("attention_bias", "use_sliding_window"),
    experts=QwenExperts(),
)
