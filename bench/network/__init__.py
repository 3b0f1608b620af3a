"""bench.link: training over links of a known rate."""
