"""dct_dlrm: trains a recommender (DLRM) with and without compressed gradients; `dct-train --help`.

Reading order: features (what a row is), criteo and synthetic (where rows come from), dataset (a
rank's share of them), model, modes (how gradients are exchanged), loop (one run), report, launch,
train.
"""
