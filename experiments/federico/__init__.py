"""The experiments of the paper FedeRiCo (Sui et al., 2022)."""
