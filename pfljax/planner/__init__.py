"""Devices that are absent, and profiles: targets, compiled programs read as text, planning."""
