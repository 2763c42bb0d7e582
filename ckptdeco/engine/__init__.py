"""One layer call and its recompute.

`call.run` runs a call as a probe and drops what it saved; `recompute.serve` brings it back. `dataflow` recognises what
earlier calls returned, so that a segment is whatever the references say; `kept` holds boundaries. `rng`, `ambient` and
`state` are what a recompute restores. Everything a recompute needs is frozen into the `Call` at forward (R7): nothing
here imports the policy, the context or the decorator.

Invariant: strong references lead only backwards in time. Start at `call.py`.
"""
