"""Rows at a cut of a model, compressed: activations forward, their gradients back.

Reading order: packing (a row's largest entries), codecs (rows as bytes, by those or in few bits),
autograd and quantizing (in few bits, between two modules), counts and transfer (parts of every
collective), all_to_all, all_gather.
"""
