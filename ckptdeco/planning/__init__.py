"""Measuring a training step, and choosing a schedule from what was measured.

``meter`` counts live activation bytes, operator by operator. Everything here sits on top of the package: nothing below
imports it.
"""
