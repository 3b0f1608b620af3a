"""Step time and bytes of training over links of a set rate.

python bench/link.py --help
"""

import sys

import cli

if __name__ == "__main__":
    sys.exit(cli.main("link"))
