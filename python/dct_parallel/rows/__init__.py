"""Compressed rows between the parts of a model: activations forward, gradients backward.

Reading order: packing (the largest entries of a row), codecs (rows as bytes), transfer (the common
parts of all exchanges), row_format, quantizing (two modules), all_to_all, all_gather,
reduce_scatter.
"""
