"""Llama, and models in its shape such as SmolLM2: no biases."""

from trainer_agent.megatron.families.decoder import DecoderFamily

LLAMA = DecoderFamily(model_type="llama", refused_flags=("attention_bias", "mlp_bias"))
