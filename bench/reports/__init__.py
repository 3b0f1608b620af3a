"""What bench/report.py makes of bench/results: pages, tables in other pages, pictures."""
