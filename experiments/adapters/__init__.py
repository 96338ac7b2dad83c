"""Adapters of frozen backbones beside heads and full fine-tuning."""
