"""Mixtral: Llama with experts in every layer."""

from trainer_agent.megatron.families.decoder import DecoderFamily
from trainer_agent.megatron.families.moe import MixtralExperts

MIXTRAL = DecoderFamily(
    model_type="mixtral",
    rope_theta=1_000_000.0,
    refused_flags=("sliding_window", "router_jitter_noise"),
    experts=MixtralExperts(),
)
