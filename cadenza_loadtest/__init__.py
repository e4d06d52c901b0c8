"""The load-testing harness: a schedule fixed before the run, one clock for every server, reproducible results.

`requests` (what to send) and `arrivals` (when) make a schedule; `driver` sends it to a `target` and fills `columns`;
`metrics` summarises them; `results` is the file; `figures` and `report` show it. `cadenza_simulator` fills the same
columns in virtual time.
"""
