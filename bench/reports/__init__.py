"""What bench/report.py makes of bench/results: pages, blocks in other pages, a picture."""
