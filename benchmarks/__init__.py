"""Benchmarks that compare side by side, in one process, and print ratios.

Run one with ``python -m benchmarks.overhead`` or ``python -m benchmarks.memory``; ``--help`` says what it takes.
Figures differ from machine to machine, the ratios much less; no test asserts them.
"""
