"""What turns gradients into weights: an optimizer for the embedding tables, one for the rest."""

import argparse
from collections.abc import Callable

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from dct_embeddings import MomentumScaledRowWiseAdagrad, RowWiseAdagrad

MOMENTUM = 0.9

# {name: made of parameters and a learning rate}. AdamW as torch has it: betas of 0.9 and 0.999,
# and a weight decay of 0.01.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda params, lr: SGD(params, lr, fused=True),
    "momentum": lambda params, lr: SGD(params, lr, momentum=MOMENTUM, fused=True),
    "adamw": lambda params, lr: AdamW(params, lr, fused=True),
}
SCALED = "momentum_scaled_rowwise_adagrad"
# The same for tables, of which a scaled one knows how many replicas there are.
EMBEDDING_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    # With des, gradients are sparse.
    "sgd": lambda params, lr, options: SGD(params, lr, fused=options.parallel != "des"),
    "rowwise_adagrad": lambda params, lr, options: RowWiseAdagrad(params, lr),
    SCALED: lambda params, lr, options: MomentumScaledRowWiseAdagrad(
        params, lr, scale=options.replicas, delayed=options.delayed_accumulator
    ),
}


def make_optimizers(model: nn.Module, options: argparse.Namespace) -> dict[str, Optimizer]:
    """{part of the model: its optimizer}; tables have a rate of their own, if one is given.

    Few samples of a batch touch a row of a table, so that tables want a higher one.
    """
    named = dict(model.named_parameters())
    tables = [weight for name, weight in named.items() if "tables." in name]
    others = [weight for name, weight in named.items() if "tables." not in name]
    of_tables = EMBEDDING_OPTIMIZERS[options.embedding_optimizer]
    # As groups, which may be empty: a rank may hold no table.
    return {
        "tables": of_tables([{"params": tables}], options.embedding_lr or options.lr, options),
        "mlps": OPTIMIZERS[options.optimizer]([{"params": others}], options.lr),
    }
