"""Averages compressed tensors over ranks.

`settings` creates codecs, and `plan` computes sizes and bytes. `transport` and `reduce_scatter`
exchange payloads. `bucket` combines all of these for one flat tensor. `ledger` begins and ends
steps, with `results` and `optimizers`. `checkpoint` saves, checks and merges states. `all_reduce`
is for training loops without a hook.
"""

from .checkpoint import merge_states

__all__ = ["merge_states"]
