"""Trains DLRM, a click model, with several ways of exchanging gradients, and compares them.

python examples/train_dlrm.py --help
"""

import sys

from dlrm.comparison import main

if __name__ == "__main__":
    sys.exit(main())
