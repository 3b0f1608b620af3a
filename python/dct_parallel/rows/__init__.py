"""Compressed rows between the parts of a model: activations forward, gradients backward.

Read the files in this order: `packing`, `codecs`, `transfer`, `row_format`, `quantizing`,
`all_to_all`, `all_gather`, `reduce_scatter`. `packing` selects the largest entries of rows,
`codecs` converts rows to bytes, and `transfer` contains the common parts of all exchanges.
"""
