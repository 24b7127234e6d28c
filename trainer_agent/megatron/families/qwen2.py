"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from trainer_agent.megatron.families.decoder import DenseFamily

QWEN2 = DenseFamily(model_type="qwen2", qkv_bias=True, refused_flags=("use_sliding_window",))
