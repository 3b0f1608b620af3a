"""Adapters for the HF Trainer and Lightning. Each module imports its framework."""
