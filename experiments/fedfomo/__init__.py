"""The experiments of the paper FedFomo (Zhang et al., 2021)."""
