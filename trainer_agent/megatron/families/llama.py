"""Llama 2, 3 and models in their shape (SmolLM2, Mistral checkpoints saved as Llama): no biases."""

from trainer_agent.megatron.families.decoder import DenseFamily

LLAMA = DenseFamily(model_type="llama", refused_flags=("attention_bias", "mlp_bias"))
