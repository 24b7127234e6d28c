"""Qwen3 (dense): norms on queries and keys, head_dim independent of the hidden size."""

from trainer_agent.megatron.families.decoder import DecoderFamily

QWEN3 = DecoderFamily(
    model_type="qwen3", qk_norm=True, head_dim=128, refused_flags=("attention_bias", "use_sliding_window")
)
