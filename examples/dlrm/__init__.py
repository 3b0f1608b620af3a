"""dlrm: trains a recommender (DLRM) with and without compressed gradients; `train_dlrm.py --help`.

Reading order: data (where rows come from), models (what is trained), modes (how gradients are
exchanged), traffic (bytes by purpose), loop (one run), experiment (all of them), report and plot,
launch, train; command_line and arguments are what a user meets.
"""

import warnings

# Torch would say at length what a command says in a sentence, if it is of any matter.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
