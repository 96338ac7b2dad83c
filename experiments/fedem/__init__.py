"""The experiments of the paper FedEM (Marfoq et al., 2021)."""
