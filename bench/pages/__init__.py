"""What is made of bench/results: pages, tables in other pages, pictures."""

import examples_path  # noqa: F401  (first)
