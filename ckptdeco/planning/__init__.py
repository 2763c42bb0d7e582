"""Measuring a training step, and choosing a schedule from what was measured.

``meter`` counts live activation bytes, operator by operator. ``measure`` runs a step under it and under a clock;
``watching`` notes what its layer calls do, ``attribution`` says which bytes are whose, ``measurement`` is the result.
Everything here sits on top of the package: nothing below imports it.
"""
