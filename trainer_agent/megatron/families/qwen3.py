"""Qwen3 (dense): norms on queries and keys, head_dim independent of the hidden size."""

from trainer_agent.megatron.families.decoder import DenseFamily

QWEN3 = DenseFamily(
    model_type="qwen3", qk_norm=True, head_dim=128, refused_flags=("attention_bias", "use_sliding_window")
)
