"""The stages that bench/gpu/check.py runs on a GPU: `python -m bench.gpu.NAME OUT`."""
