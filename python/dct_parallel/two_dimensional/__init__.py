"""Embedding tables sharded inside a group of ranks, with replicas across groups."""

from .row_wise_adagrad import MomentumScaledRowWiseAdagrad, RowWiseAdagrad

__all__ = ["MomentumScaledRowWiseAdagrad", "RowWiseAdagrad"]
