"""The cost model: predicted step times for 2 to thousands of ranks.

python bench/scale.py --help
"""

import sys

import cli

if __name__ == "__main__":
    sys.exit(cli.main("scale"))
