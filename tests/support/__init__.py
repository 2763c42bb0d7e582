"""What the tests share: subject (what is tested), oracle (is it exact?), meters (what does it cost?), layers, programs.

Start with `oracle.assert_same`. Invariant: nothing in here knows how ckptdeco works inside, so that
the same programs run against the stand-ins of `standins.py`, which prove that the oracle itself is right.
"""
