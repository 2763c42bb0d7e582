"""The composing fuzzer: random programs of many ingredients times random policies, bit for bit the plain run.

A program (`program.py`) is a value that prints as the code that makes it again. `strategy.py` draws one from the
catalogues of ingredients: parts of a layer (`parts_*.py`), moves of the model (`moves_*.py`), loops, ways of
backward, changes between forward and backward, surroundings. `judge.py` runs it plain and under its policies and
compares. Start at `catalogue.py`: a new ingredient is one small class, and drawn from then on.
"""
