"""Personalized federated learning in JAX and Flax."""
