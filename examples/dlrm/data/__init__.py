"""Loads rows: features (encoding), criteo and synthetic (sources), dataset (one rank's share)."""
