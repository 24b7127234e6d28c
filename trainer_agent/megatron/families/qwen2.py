"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from trainer_agent.megatron.families.decoder import DecoderFamily

QWEN2 = DecoderFamily(model_type="qwen2", qkv_bias=True, refused_flags=("use_sliding_window",))
