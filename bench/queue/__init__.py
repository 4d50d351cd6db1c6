"""`sluicegate bench queue`: what gateway and queue cost, measured beside bare aiohttp in the same run.

Reading order: `command`, `setting` (what it needs of whoever starts processes), `rows` (a measurement's result), `wire` (a light HTTP client), `load` (requests against a URL), `bare` (the server to
compare with), `cpu`, the measurements `latency`, `streams`, `fairness`, `routing`, `scale`, and `report` (table, JSON, picture).
"""
