"""``ckptdeco demo``: one small training run under several policies, as a table and a picture.

Invariant: every row starts from the same weights and seed and sees the same batches, so each must end with the same
losses, gradients and weights, bit for bit. Start reading at ``run``; ``rows`` says what is compared, ``table`` and
``picture`` show it. Needs the extra ``demo`` (rich, matplotlib).
"""
