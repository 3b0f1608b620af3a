"""dct_dlrm: trains a recommender (DLRM) with and without compressed gradients; `dct-train --help`.

Reading order: data (where rows come from), models (what is trained), modes (how gradients are
exchanged), traffic (bytes by purpose), loop (one run), experiment (all of them), report and plot,
launch, train.
"""
