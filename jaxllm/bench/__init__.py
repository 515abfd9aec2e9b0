"""Measuring rates, and what they are held against: `jaxllm bench` as a library.

tests.py     what is measured       measure.py  how
limits.py    what the machine allows and the cost model predicts
peer.py      the other side, which is peer_program.py in another Python
results.py   rows, read and written  tables.py  rows as tables  compare.py  two runs
shapes.py    models of random weights
"""

from jaxllm.bench.compare import Comparison
from jaxllm.bench.results import Results

__all__ = ["Comparison", "Results"]
