"""Runs on Flower: clients on nodes with their own data, and the same numbers as the simulation."""
