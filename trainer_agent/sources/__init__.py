"""Weight sources for trainers that are not Megatron: any module, any iterator."""
