"""The experiments of the paper pFedMB (Mori et al., 2022)."""
