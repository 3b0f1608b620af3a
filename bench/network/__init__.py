"""bench.link: training over throttled links."""
