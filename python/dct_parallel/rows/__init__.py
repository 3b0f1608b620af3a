"""Compressed rows between the parts of a model: activations forward, gradients backward.

Read the files in this order: `packing`, `transfer`, `codecs`, `quantizing`,
`all_to_all`, `all_gather`, `reduce_scatter`. `packing` selects the largest entries of rows,
`transfer` contains the common parts of all exchanges, and `codecs` converts rows to bytes.
"""
